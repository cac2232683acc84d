//! A Python with transformers: which one, and what it answers.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

/// The script that Python runs.
const SCRIPT: &str = include_str!("compare.py");

/// The most bytes of an answer, and of the messages that an error repeats.
const ANSWER_BYTES: u64 = 16 << 20;
const MESSAGE_BYTES: u64 = 2 << 10;

/// Time between two looks at the process.
const PAUSE: Duration = Duration::from_millis(20);

/// What installs the modules.
const INSTALL: &str = "pip install torch 'transformers>=5'";

/// What the script reads.
#[derive(Debug, Serialize)]
pub(super) struct Request<'a> {
    /// Folder of a model in Hugging Face's format.
    pub(super) model: &'a Path,
    /// Token ids.
    pub(super) tokens: &'a [u32],
    /// Texts to encode.
    pub(super) texts: &'a [&'a str],
    /// The file for the logits.
    pub(super) logits: &'a Path,
}

/// What transformers computed.
#[derive(Debug, PartialEq, Deserialize)]
pub(super) struct Answer {
    /// Its version.
    #[serde(rename = "transformers")]
    pub(super) version: String,
    /// Shape of the logits in the file: tokens, vocabulary.
    pub(super) shape: [usize; 2],
    /// The ids of each text by `AutoTokenizer`.
    #[serde(default)]
    pub(super) ids: Vec<Vec<u32>>,
    /// The ids of each text by `tokenizer.json` alone.
    #[serde(default)]
    pub(super) plain: Vec<Vec<u32>>,
    /// Why there are no ids.
    pub(super) no_tokenizer: Option<String>,
}

/// Why a Python gives no comparison.
#[derive(Debug, thiserror::Error)]
pub(super) enum PythonError {
    /// It cannot be started.
    #[error("{python} cannot be started: {source}; name a Python with --python", python = python.display())]
    Start {
        /// The program.
        python: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It lacks a module.
    #[error("{python} has no module {module}: run `{INSTALL}` there, or name another Python with --python", python = python.display())]
    Missing {
        /// The program.
        python: PathBuf,
        /// The module.
        module: String,
    },
    /// It cannot load a module.
    #[error("{python} cannot load {module}: {reason}; name another Python with --python", python = python.display())]
    Broken {
        /// The program.
        python: PathBuf,
        /// The module.
        module: String,
        /// Python's error.
        reason: String,
    },
    /// Its transformers is too old.
    #[error("{python} has transformers {found}, and Shoal computes what version 5 does: run `{INSTALL}` there, or name another Python with --python", python = python.display())]
    Version {
        /// The program.
        python: PathBuf,
        /// The version.
        found: String,
    },
    /// There is too little memory for transformers.
    #[error("{python} has too little memory for the model, which takes 4 bytes a weight in f32: close other programs, or compare on a larger machine", python = python.display())]
    Memory {
        /// The program.
        python: PathBuf,
    },
    /// transformers refuses the model.
    #[error("transformers cannot compute the model: {reason}")]
    Refused {
        /// Python's error.
        reason: String,
    },
    /// It takes too long.
    #[error("{python} has not answered for {} s: compare on a faster machine", deadline.as_secs(), python = python.display())]
    Slow {
        /// The program.
        python: PathBuf,
        /// The time that it had.
        deadline: Duration,
    },
    /// It ended without an answer.
    #[error("{python} ended without an answer ({status}): {messages}", python = python.display())]
    NoAnswer {
        /// The program.
        python: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// The end of what it wrote to stderr.
        messages: String,
    },
    /// Its answer is not that of the script.
    #[error("{python} answers something else than the comparison: {source}", python = python.display())]
    Answer {
        /// The program.
        python: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// A temporary file cannot be written or read.
    #[error("{path}: {source}; TMPDIR names another folder for temporary files", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
}

impl PythonError {
    /// Whether another Python may give the comparison.
    pub(super) fn is_of_python(&self) -> bool {
        matches!(
            self,
            Self::Start { .. } | Self::Missing { .. } | Self::Broken { .. } | Self::Version { .. }
        )
    }
}

/// The Pythons to ask, the first first: that of `SHOAL_PYTHON`, otherwise the one whose libtorch this program has
/// loaded, and `python3`.
pub(super) fn candidates() -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os("SHOAL_PYTHON").filter(|name| !name.is_empty()) {
        return vec![named.into()];
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    beside_libtorch(&maps).into_iter().chain([PathBuf::from("python3")]).collect()
}

/// The Python of the environment with a loaded libtorch: `bin/python3` beside `lib/python3.N/site-packages/torch`.
fn beside_libtorch(maps: &str) -> Option<PathBuf> {
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    let library = paths.find(|path| path.ends_with("/torch/lib/libtorch_cpu.so"))?;
    let environment = Path::new(library).ancestors().nth(6)?;
    Some(environment.join("bin/python3")).filter(|python| python.exists())
}

/// Has a Python run the script, with temporary files in `folder`. It is killed after `deadline`.
///
/// # Errors
/// If it has not what the script needs, transformers refuses the model, or the time is over.
pub(super) fn ask(
    python: &Path,
    request: &Request<'_>,
    folder: &Path,
    deadline: Duration,
) -> Result<Answer, PythonError> {
    run(python, SCRIPT, request, (folder, deadline))
}

fn run(
    python: &Path,
    program: &str,
    request: &Request<'_>,
    (folder, deadline): (&Path, Duration),
) -> Result<Answer, PythonError> {
    let [script, input, output, messages] =
        ["compare.py", "request.json", "answer.json", "messages.txt"].map(|name| folder.join(name));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| PythonError::File { path, source }
    };
    let text = serde_json::to_vec(request).map_err(|error| failed(&input)(error.into()))?;
    for (path, text) in [(&script, program.as_bytes()), (&input, &text)] {
        File::create(path).and_then(|mut file| file.write_all(text)).map_err(failed(path))?;
    }
    let create = |path: &Path| File::create(path).map_err(failed(path));
    let child = Command::new(python)
        .arg(&script)
        .env("HF_HUB_OFFLINE", "1")
        .env("TRANSFORMERS_VERBOSITY", "error")
        .stdin(File::open(&input).map_err(failed(&input))?)
        .stdout(create(&output)?)
        .stderr(create(&messages)?)
        .spawn();
    let mut child =
        child.map_err(|source| PythonError::Start { python: python.to_owned(), source })?;
    let status = wait(&mut child, deadline)
        .map_err(failed(&script))?
        .ok_or_else(|| PythonError::Slow { python: python.to_owned(), deadline })?;
    let read = |path: &Path| read_end(path).map_err(failed(path));
    if !status.success() {
        return Err(ended(python, status, read(&messages)?));
    }
    let mut answer = Vec::new();
    let file = File::open(&output).map_err(failed(&output))?;
    file.take(ANSWER_BYTES).read_to_end(&mut answer).map_err(failed(&output))?;
    parse(python, &answer)
}

/// Waits for the end of a process; `None` if it was killed after `deadline`.
fn wait(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + deadline;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
}

/// The error of a Python that failed.
fn ended(python: &Path, status: ExitStatus, messages: String) -> PythonError {
    let python = python.to_owned();
    // The system kills the process that takes the last memory.
    match status.signal() == Some(Signal::SIGKILL as i32) {
        true => PythonError::Memory { python },
        false => PythonError::NoAnswer { python, status, messages },
    }
}

/// The end of a text file.
fn read_end(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MESSAGE_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(MESSAGE_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// What the script prints in place of an answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "problem", rename_all = "lowercase")]
enum Problem {
    Missing { module: String },
    Broken { module: String, reason: String },
    Version { found: String },
    Memory,
    Failed { reason: String },
}

fn parse(python: &Path, answer: &[u8]) -> Result<Answer, PythonError> {
    let other = |source| PythonError::Answer { python: python.to_owned(), source };
    let value: serde_json::Value = serde_json::from_slice(answer).map_err(other)?;
    if value.get("problem").is_none() {
        return serde_json::from_value(value).map_err(other);
    }
    let python = python.to_owned();
    Err(match serde_json::from_value(value).map_err(other)? {
        Problem::Missing { module } => PythonError::Missing { python, module },
        Problem::Broken { module, reason } => PythonError::Broken { python, module, reason },
        Problem::Version { found } => PythonError::Version { python, found },
        Problem::Memory => PythonError::Memory { python },
        Problem::Failed { reason } => PythonError::Refused { reason },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough for a shell to start.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Has a shell run a script, in place of a Python.
    fn answer_of(script: &str, deadline: Duration) -> Result<Answer, PythonError> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let logits = folder.path().join("logits");
        let request =
            Request { model: folder.path(), tokens: &[1], texts: &["a"], logits: &logits };
        run(Path::new("/bin/sh"), script, &request, (folder.path(), deadline))
    }

    fn printed(text: &str) -> Result<Answer, PythonError> {
        answer_of(&format!("cat > /dev/null; printf '%s' '{text}'"), PATIENCE)
    }

    #[test]
    fn an_answer_is_read() {
        let answer =
            printed(r#"{"transformers": "5.1", "shape": [1, 2], "ids": [[7]], "plain": [[8]]}"#);
        let expected = Answer {
            version: "5.1".to_owned(),
            shape: [1, 2],
            ids: vec![vec![7]],
            plain: vec![vec![8]],
            no_tokenizer: None,
        };
        assert_eq!(answer.expect("an answer"), expected);
    }

    #[test]
    fn each_problem_says_what_would_do() {
        let text = |answer: &str| printed(answer).expect_err("a problem").to_string();
        let missing = text(r#"{"problem": "missing", "module": "torch"}"#);
        assert!(missing.contains("has no module torch: run `pip install torch"), "{missing}");
        let broken = text(r#"{"problem": "broken", "module": "torch", "reason": "no symbol"}"#);
        assert!(broken.contains("cannot load torch: no symbol"), "{broken}");
        let version = text(r#"{"problem": "version", "found": "4.57.1"}"#);
        assert!(version.contains("has transformers 4.57.1"), "{version}");
        let memory = text(r#"{"problem": "memory"}"#);
        assert!(memory.contains("4 bytes a weight"), "{memory}");
        let refused = text(r#"{"problem": "failed", "reason": "ValueError: no"}"#);
        assert!(refused.contains("ValueError: no"), "{refused}");
    }

    #[test]
    fn only_what_another_python_may_have_is_of_the_python() {
        let is_of_python = |answer: &str| printed(answer).expect_err("a problem").is_of_python();
        assert!(is_of_python(r#"{"problem": "missing", "module": "torch"}"#));
        assert!(is_of_python(r#"{"problem": "version", "found": "4.57.1"}"#));
        assert!(!is_of_python(r#"{"problem": "memory"}"#));
        assert!(!is_of_python(r#"{"problem": "failed", "reason": "ValueError: no"}"#));
    }

    #[test]
    fn a_python_that_gives_no_answer_is_an_error() {
        let killed = answer_of("kill -9 $$", PATIENCE).expect_err("killed");
        assert!(matches!(killed, PythonError::Memory { .. }), "{killed}");
        let failed =
            answer_of("echo first >&2; echo last >&2; exit 3", PATIENCE).expect_err("failed");
        assert!(failed.to_string().contains("exit status: 3): first\nlast"), "{failed}");
        let other = printed("hello").expect_err("no JSON");
        assert!(matches!(other, PythonError::Answer { .. }), "{other}");
        let part = printed(r#"{"transformers": "5.1"}"#).expect_err("no shape");
        assert!(matches!(part, PythonError::Answer { .. }), "{part}");
        let slow = answer_of("exec sleep 600", Duration::from_millis(50)).expect_err("too slow");
        assert!(matches!(slow, PythonError::Slow { .. }), "{slow}");
        let nothing = tempfile::tempdir().expect("a temporary folder");
        let (folder, python) = (nothing.path(), nothing.path().join("python"));
        let request = Request { model: folder, tokens: &[], texts: &[], logits: &python };
        let absent = ask(&python, &request, folder, PATIENCE).expect_err("no such program");
        assert!(matches!(absent, PythonError::Start { .. }) && absent.is_of_python(), "{absent}");
    }

    #[test]
    fn the_environment_of_libtorch_has_its_python() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = folder.path().display();
        let line = |name: &str| {
            format!(
                "7f00-7f10 r-xp 00000000 08:01 99    {root}/lib/python3.11/site-packages/{name}\n"
            )
        };
        let maps = line("numpy/core.so") + &line("torch/lib/libtorch_cpu.so");
        assert_eq!(beside_libtorch(&maps), None, "there is no program");
        fs::create_dir(folder.path().join("bin")).expect("writable");
        fs::write(folder.path().join("bin/python3"), "").expect("writable");
        assert_eq!(beside_libtorch(&maps), Some(folder.path().join("bin/python3")));
        assert_eq!(beside_libtorch(&line("torch/lib/libc10.so")), None);
    }
}
