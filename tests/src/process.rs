//! A running process: its events as they come, and its outcome.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::PATIENCE;

/// The capacity for unread lines of stdout. No process of a test writes as many.
const BACKLOG: usize = 100_000;

/// A process of a test, which drop kills.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    stdout: String,
    stderr: Arc<Stderr>,
    stderr_reader: Option<JoinHandle<()>>,
}

/// All that a process has written to stderr so far.
#[derive(Debug, Default)]
struct Stderr {
    text: Mutex<String>,
    grown: Condvar,
}

/// The exit code and the output of a process.
#[derive(Debug)]
pub struct Outcome {
    name: String,
    /// The exit code; `None` after a signal.
    pub code: Option<i32>,
    /// All of stdout.
    pub stdout: String,
    /// All of stderr.
    pub stderr: String,
}

impl Process {
    /// Starts a command made by [`crate::program::prepared`]. Messages contain the name.
    ///
    /// # Panics
    /// When the process does not start.
    #[must_use]
    pub fn start(name: &str, mut command: Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let (sender, lines) = sync_channel(BACKLOG);
        let stdout = child.stdout.take().expect("it is piped");
        std::thread::spawn(move || forward_lines(stdout, &sender));
        let stderr = Arc::<Stderr>::default();
        let stderr_reader = child.stderr.take().map(|pipe| {
            let stderr = stderr.clone();
            std::thread::spawn(move || collect(pipe, &stderr))
        });
        Self { name: name.to_owned(), child, lines, stdout: String::new(), stderr, stderr_reader }
    }

    /// The number of the process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next event of this kind, and discards those before it.
    ///
    /// # Panics
    /// When the event does not come, or stdout is not a stream of events.
    pub fn event(&mut self, kind: &str) -> Value {
        self.next_of(&[kind])
    }

    /// Waits for the next event of either kind; `None` if it is of the other one.
    ///
    /// # Panics
    /// When neither event comes, or stdout is not a stream of events.
    pub fn event_before(&mut self, kind: &str, other: &str) -> Option<Value> {
        Some(self.next_of(&[kind, other])).filter(|event| event["event"] == kind)
    }

    /// Waits until the peer has joined, and gives its stage.
    ///
    /// # Panics
    /// When the peer does not join, or hosts no stage.
    pub fn joined_stage(&mut self) -> u64 {
        self.event("joined")["span"][0].as_u64().expect("a stage")
    }

    /// Waits for the end of the run, and gives the stage that the peer hosts then. `stage` is its stage now.
    ///
    /// # Panics
    /// When the peer does not finish.
    pub fn last_stage(&mut self, mut stage: u64) -> u64 {
        // Every move has an event before the end.
        while let Some(event) = self.event_before("moved", "finished") {
            stage = event["to"][0].as_u64().expect("a stage");
        }
        stage
    }

    /// Waits for the next event of one of these kinds.
    fn next_of(&mut self, kinds: &[&str]) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Some(line) = self.line(deadline, kinds[0]) else {
                panic!(
                    "{} ended without event {:?}:\n{}",
                    self.name,
                    kinds[0],
                    self.stderr_so_far()
                )
            };
            let event: Value = serde_json::from_str(&line)
                .unwrap_or_else(|error| panic!("{}: {error} in {line:?}", self.name));
            if kinds.iter().any(|kind| event["event"] == *kind) {
                return event;
            }
        }
    }

    /// Waits for the first whole line of stderr that contains a text.
    ///
    /// # Panics
    /// When there is no such line in time.
    #[must_use]
    pub fn stderr_line(&self, wanted: &str) -> String {
        let find = |text: &str| {
            let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            whole.map(str::trim_end).find(|line| line.contains(wanted)).map(str::to_owned)
        };
        let text = self.stderr.text.lock().unwrap_or_else(PoisonError::into_inner);
        let (text, _) = self
            .stderr
            .grown
            .wait_timeout_while(text, PATIENCE, |text| find(text).is_none())
            .unwrap_or_else(PoisonError::into_inner);
        find(&text).unwrap_or_else(|| {
            let seconds = PATIENCE.as_secs();
            panic!("{} wrote no line with {wanted:?} in {seconds} s:\n{text}", self.name)
        })
    }

    /// Waits until the process ends by itself.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn end(self) -> Outcome {
        self.end_within(PATIENCE)
    }

    /// Waits until the process ends by itself, for so long: a run of which many steps are computed again takes longer than
    /// one event.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn end_within(mut self, limit: Duration) -> Outcome {
        let deadline = Instant::now() + limit;
        while self.line(deadline, "its end").is_some() {}
        let reader = self.stderr_reader.take().expect("it ends once");
        reader.join().expect("it only reads");
        let code = self.child.wait().expect("it is our child").code();
        let stdout = std::mem::take(&mut self.stdout);
        Outcome { name: self.name.clone(), code, stdout, stderr: self.stderr_so_far() }
    }

    /// Kills the process, as `kill -9` does.
    ///
    /// # Panics
    /// When it had failed before.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        let code = self.child.wait().expect("it is our child").code();
        let (name, stderr) = (&self.name, self.stderr_so_far());
        assert!(
            matches!(code, None | Some(0)),
            "{name} had failed before it was killed:\n{stderr}"
        );
    }

    /// Asks the process to end, as `kill` does.
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub fn terminate(&self) {
        let mut kill = Command::new("kill");
        let status = kill.args(["-TERM", &self.child.id().to_string()]).status();
        assert!(status.expect("kill is there").success(), "{} is our child", self.name);
    }

    /// The next line of stdout; `None` at its end.
    fn line(&mut self, deadline: Instant, awaited: &str) -> Option<String> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.stdout.push_str(&line);
                self.stdout.push('\n');
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!(
                "{} printed no {awaited} in time; stdout:\n{}stderr:\n{}",
                self.name,
                self.stdout,
                self.stderr_so_far()
            ),
        }
    }

    fn stderr_so_far(&self) -> String {
        self.stderr.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Outcome {
    /// The stdout of a successful process.
    ///
    /// # Panics
    /// When the process failed.
    #[must_use]
    pub fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{} failed:\n{}", self.name, self.stderr);
        self.stdout
    }

    /// The one line that gives the reason of a failure with this exit code.
    ///
    /// # Panics
    /// When the process ended otherwise, or printed no reason, several, or more after it.
    #[must_use]
    pub fn failure(self, code: i32) -> String {
        let Self { name, code: found, stderr, .. } = self;
        assert_eq!(found, Some(code), "{name} printed:\n{stderr}");
        let mut reasons = stderr.lines().filter_map(|line| line.strip_prefix("shoal: "));
        let reason = reasons.next().unwrap_or_else(|| panic!("{name} gave no reason:\n{stderr}"));
        assert_eq!(reasons.next(), None, "{name} gave several reasons:\n{stderr}");
        assert!(
            stderr.trim_end().ends_with(reason),
            "{name} printed more after the reason:\n{stderr}"
        );
        assert!(
            !stderr.contains("backtrace") && !stderr.contains("a mistake in shoal itself"),
            "{name} panicked:\n{stderr}"
        );
        reason.to_owned()
    }
}

fn forward_lines(stdout: ChildStdout, sender: &SyncSender<String>) {
    for line in BufReader::new(stdout).lines() {
        let Ok(line) = line else { return };
        // The test is over once the receiver is gone.
        let Ok(()) = sender.send(line) else { return };
    }
}

fn collect(mut stderr: ChildStderr, all: &Stderr) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stderr.read(&mut buffer) {
        let text = String::from_utf8_lossy(&buffer[..length]);
        all.text.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
        all.grown.notify_all();
    }
}
