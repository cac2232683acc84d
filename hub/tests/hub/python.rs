//! Python's `huggingface_hub` on the same cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repository::{answer, bytes, download, hub, stored};
use crate::server::Server;

/// The interpreter of the workspace, if it has `huggingface_hub`.
fn interpreter() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join(".venv/bin/python");
    let found = Command::new(&python).args(["-c", "import huggingface_hub"]).output().ok()?;
    found.status.success().then_some(python)
}

#[test]
fn python_finds_what_is_in_the_cache() {
    let Some(python) = interpreter() else {
        eprintln!("skipped: scripts/setup.sh --tests installs Python with huggingface_hub");
        return;
    };
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| {
        let model = stored("sub/model.bin", bytes(1000), true);
        answer(&[stored("config.json", "{}", false), model], asked)
    });
    let snapshot = download(&hub(&server.url(), cache.path())).expect("downloaded");
    let script = "import sys, huggingface_hub as h\n\
                  print(h.snapshot_download('owner/name', cache_dir=sys.argv[1], \
                  local_files_only=True))\n\
                  print(h.hf_hub_download('owner/name', 'sub/model.bin', cache_dir=sys.argv[1], \
                  local_files_only=True))";
    let output = Command::new(python)
        .args(["-c", script])
        .arg(cache.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("Python runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = printed.lines().collect();
    let folder = snapshot.folder.canonicalize().expect("a folder");
    assert_eq!(lines.first().map(Path::new), Some(folder.as_path()), "{failed}");
    assert_eq!(lines.get(1).map(Path::new), Some(folder.join("sub/model.bin").as_path()));
}
