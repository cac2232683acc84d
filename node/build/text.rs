// The built-in text, for runs that name no text: this project's documentation and sources in one
// file, ordered by path.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

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

/// Writes the text to `text.txt` in the build's output folder.
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
    fs::write(Path::new(&folder).join("text.txt"), text).expect("the build's folder is writable");
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
