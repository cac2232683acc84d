// The built-in text, for runs that name no text: this project's documentation and sources in one
// file, ordered by path.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// Files and folders of the project in the text.
const PARTS: [&str; 7] = [
    "README.md",
    "ARCHITECTURE.md",
    "protocol/src",
    "scheduler/src",
    "engine/src",
    "metrics/src",
    "node/src",
];

/// Writes the text, compressed, to `text.zlib` in the build's output folder.
pub(crate) fn embed() {
    let project = Path::new("..");
    let mut text = String::new();
    for part in PARTS {
        println!("cargo:rerun-if-changed=../{part}");
        let mut files = Vec::new();
        collect(&project.join(part), &mut files);
        files.sort();
        for file in files {
            let content = fs::read_to_string(&file)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            let name = file.strip_prefix(project).expect("below the project").display();
            writeln!(text, "==> {name}\n\n{content}").expect("memory");
        }
    }
    let folder = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let file = File::create(Path::new(&folder).join("text.zlib"));
    let mut encoder =
        ZlibEncoder::new(file.expect("the build's folder is writable"), Compression::best());
    encoder.write_all(text.as_bytes()).expect("the build's folder is writable");
    encoder.finish().expect("the build's folder is writable");
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let entries =
            fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for entry in entries {
            collect(&entry.expect("a folder can be listed").path(), files);
        }
    } else if path.extension().is_some_and(|kind| kind == "md" || kind == "rs") && path.exists() {
        files.push(path.to_owned());
    }
}
