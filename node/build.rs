//! Tells the linker where libtorch is, and gathers the text that is built in.

#[path = "../engine/build/link.rs"]
mod link;
#[path = "build/text.rs"]
mod text;

fn main() {
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=../engine/build/link.rs");
    link::link_arguments();
    text::embed();
}
