//! The client of `serve.py`, of which a program of tests has one.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};

/// The time that a script may take. Only a failure takes that long.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process that runs scripts for as long as its stdin is open.
struct Server {
    _process: Child,
    socket: PathBuf,
}

/// Runs a script, whose path begins at the workspace's root, and parses the JSON that it prints.
pub(crate) fn run(script: &Path, arguments: &[&OsStr]) -> Value {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let server = SERVER.get_or_init(start);
    let script = root().join(script);
    let plain = |text: &OsStr| text.to_str().expect("plain arguments").to_owned();
    let request: Vec<String> =
        [script.as_os_str()].iter().chain(arguments).map(|text| plain(text)).collect();
    let mut stream = UnixStream::connect(&server.socket).expect("the server of scripts runs");
    stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
    writeln!(stream, "{}", json!(request)).expect("it reads the request");
    let answer: Value = serde_json::from_reader(stream)
        .unwrap_or_else(|error| panic!("{} gave no answer: {error}", script.display()));
    let text = |name: &str| answer[name].as_str().expect("text");
    assert_eq!(answer["success"], true, "{}: {}", script.display(), text("stderr"));
    serde_json::from_str(text("stdout")).expect("the script prints JSON")
}

fn start() -> Server {
    let interpreter = root().join(".venv/bin/python");
    assert!(
        interpreter.exists(),
        "this test compares with PyTorch: scripts/setup.sh --tests installs it"
    );
    let mut server = Command::new(interpreter)
        .arg(root().join("engine/tests/python/serve.py"))
        .env("OMP_NUM_THREADS", "1")
        // No requests to the network.
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python starts");
    let stdout = server.stdout.take().expect("it is piped");
    let mut socket = String::new();
    let read = BufReader::new(stdout).read_line(&mut socket);
    assert!(read.is_ok_and(|bytes| bytes > 0), "the server of scripts does not start");
    Server { _process: server, socket: socket.trim_end().into() }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of a workspace")
}
