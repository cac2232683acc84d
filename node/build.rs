//! Tells the linker where libtorch is.

#[path = "../engine/build/link.rs"]
mod link;

fn main() {
    println!("cargo:rerun-if-changed=../engine/build/link.rs");
    link::link_arguments();
}
