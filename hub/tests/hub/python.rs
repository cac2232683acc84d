//! Python's `huggingface_hub` on the same cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use shoal_hub::Hub;

use crate::repository::{COMMIT, Stored, answer, bytes, config, download, hub, stored};
use crate::server::{Answer, Asked, Server};

/// The interpreter of the workspace, if it has `huggingface_hub`.
fn interpreter() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join(".venv/bin/python");
    let found = Command::new(&python).args(["-c", "import huggingface_hub"]).output().ok()?;
    found.status.success().then_some(python)
}

/// The lines that a script prints, with the cache as its argument.
fn lines(python: &Path, script: &str, cache: &Path, variables: &[(&str, &str)]) -> Vec<String> {
    let output = Command::new(python)
        .args(["-c", script])
        .arg(cache)
        .envs(variables.iter().copied())
        .env("HF_HUB_DISABLE_TELEMETRY", "1")
        .env("HF_HUB_DISABLE_XET", "1")
        .output()
        .expect("Python runs");
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{failed}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn files() -> Vec<Stored> {
    vec![stored("config.json", "{}", false), stored("sub/model.bin", bytes(1000), true)]
}

/// The answers that `huggingface_hub` needs besides those of this client.
fn answer_python(asked: &Asked) -> Answer {
    let file = files().into_iter().find(|file| asked.path.ends_with(file.path));
    match file.filter(|_| asked.path.contains("/resolve/")) {
        Some(file) => {
            let answered = file
                .answer(asked)
                .header("etag", format!("\"{}\"", file.hash()))
                .header("x-repo-commit", COMMIT);
            if asked.method == "HEAD" { answered.cut(0) } else { answered }
        }
        None if asked.path.contains("/tree/") => {
            let mut asked = asked.clone();
            asked.path = format!("/api/models/owner/name/tree/{COMMIT}?recursive=true");
            answer(&files(), &asked)
        }
        None => answer(&files(), asked),
    }
}

#[test]
fn python_finds_what_is_in_the_cache() {
    let Some(python) = interpreter() else {
        eprintln!("skipped: scripts/setup.sh --tests installs Python with huggingface_hub");
        return;
    };
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| answer(&files(), asked));
    let snapshot = download(&hub(&server.url(), cache.path())).expect("downloaded");
    let script = "import sys, huggingface_hub as h\n\
                  print(h.snapshot_download('owner/name', cache_dir=sys.argv[1], \
                  local_files_only=True))\n\
                  print(h.hf_hub_download('owner/name', 'sub/model.bin', cache_dir=sys.argv[1], \
                  local_files_only=True))";
    let printed = lines(&python, script, cache.path(), &[("HF_HUB_OFFLINE", "1")]);
    let folder = snapshot.folder.canonicalize().expect("a folder");
    assert_eq!(printed.first().map(Path::new), Some(folder.as_path()));
    assert_eq!(printed.get(1).map(Path::new), Some(folder.join("sub/model.bin").as_path()));
}

#[test]
fn what_python_has_cached_is_used() {
    let Some(python) = interpreter() else {
        eprintln!("skipped: scripts/setup.sh --tests installs Python with huggingface_hub");
        return;
    };
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(answer_python);
    let script = "import sys, huggingface_hub as h\n\
                  print(h.snapshot_download('owner/name', cache_dir=sys.argv[1]))";
    let endpoint = server.url();
    let variables = [("HF_ENDPOINT", endpoint.as_str()), ("HF_HUB_OFFLINE", "0")];
    let printed = lines(&python, script, cache.path(), &variables);
    let asked = server.asked().len();
    let mut settings = config(&endpoint, cache.path());
    settings.offline = true;
    let snapshot = download(&Hub::new(settings).expect("a client")).expect("cached");
    let folder = snapshot.folder.canonicalize().expect("a folder");
    assert_eq!(printed.last().map(Path::new), Some(folder.as_path()));
    assert_eq!(snapshot.files.len(), 2);
    assert_eq!(server.asked().len(), asked);
    download(&hub(&endpoint, cache.path())).expect("cached");
    assert_eq!(server.asked().len(), asked + 1, "only the revision is asked for");
}
