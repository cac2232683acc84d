//! Compiles the few C++ functions that tch lacks and tells the linker where libtorch is.

#[path = "build/link.rs"]
mod link;

fn main() {
    println!("cargo:rerun-if-changed=build/link.rs");
    println!("cargo:rerun-if-changed=csrc");
    println!("cargo:rerun-if-changed=kernels");
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
        // A product is rounded before it is added, on all processors.
        .flag_if_supported("-ffp-contract=off")
        .opt_level(3)
        .file("csrc/engine.cpp")
        // Of its own, so that only tests link it.
        .file("csrc/kernels.cpp")
        .compile("shoal_engine_shim");
}
