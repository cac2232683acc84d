//! Compiles the few C++ functions that tch lacks and tells the linker where libtorch is.

#[path = "build/link.rs"]
mod link;

fn main() {
    println!("cargo:rerun-if-changed=build/link.rs");
    println!("cargo:rerun-if-changed=csrc");
    link::link_arguments();
    let include = link::libtorch_folder().with_file_name("include");
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .flag("-isystem")
        .flag(include.display().to_string())
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").display().to_string())
        .include("csrc/stand_ins")
        .flag_if_supported("-Wno-unused-parameter")
        .opt_level(3)
        .file("csrc/engine.cpp")
        .compile("shoal_engine_shim");
}
