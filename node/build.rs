//! Sets the linker's path of libtorch, and writes the built-in text.

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
