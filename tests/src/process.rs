//! A running process: its events as they come, and how it ends.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use serde_json::Value;

use crate::PATIENCE;

/// Lines of stdout that wait to be looked at; no process of a test writes as many.
const BACKLOG: usize = 100_000;

/// A process of a test. It is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    stdout: String,
    stderr: Arc<Stderr>,
    listener: Option<JoinHandle<()>>,
}

/// Everything that a process has written to stderr so far.
#[derive(Debug, Default)]
struct Stderr {
    text: Mutex<String>,
    grown: Condvar,
}

/// How a process ended, and what it wrote.
#[derive(Debug)]
pub struct Outcome {
    name: String,
    /// The exit code; none where a signal ended it.
    pub code: Option<i32>,
    /// All of stdout.
    pub stdout: String,
    /// All of stderr.
    pub stderr: String,
}

impl Process {
    /// Starts a command made by [`crate::program::prepared`]. The name is for messages.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(name: &str, mut command: Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let (sender, lines) = sync_channel(BACKLOG);
        let stdout = child.stdout.take().expect("it is piped");
        std::thread::spawn(move || pass_on(stdout, &sender));
        let stderr = Arc::<Stderr>::default();
        let listener = child.stderr.take().map(|pipe| {
            let stderr = stderr.clone();
            std::thread::spawn(move || collect(pipe, &stderr))
        });
        Self { name: name.to_owned(), child, lines, stdout: String::new(), stderr, listener }
    }

    /// The next event of this kind; those before it are passed over.
    ///
    /// # Panics
    /// When it does not come, or stdout is not a stream of events.
    pub fn event(&mut self, kind: &str) -> Value {
        self.next_of(&[kind])
    }

    /// The next event of this kind, if it comes before one of another.
    ///
    /// # Panics
    /// When neither comes, or stdout is not a stream of events.
    pub fn event_before(&mut self, kind: &str, other: &str) -> Option<Value> {
        Some(self.next_of(&[kind, other])).filter(|event| event["event"] == kind)
    }

    /// The stage that it hosts from when it has joined.
    ///
    /// # Panics
    /// When it does not join, or hosts none.
    pub fn joined_stage(&mut self) -> u64 {
        self.event("joined")["span"][0].as_u64().expect("a stage")
    }

    /// The stage that it hosts when the run is over, from the one that it hosts now.
    ///
    /// # Panics
    /// When it does not finish.
    pub fn last_stage(&mut self, mut stage: u64) -> u64 {
        // Who moves says so before it has finished.
        while let Some(event) = self.event_before("moved", "finished") {
            stage = event["to"].as_u64().expect("a stage");
        }
        stage
    }

    /// The next event of one of these kinds.
    fn next_of(&mut self, kinds: &[&str]) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Some(line) = self.line(deadline, kinds[0]) else {
                panic!("{} ended without event {:?}:\n{}", self.name, kinds[0], self.said())
            };
            let event: Value = serde_json::from_str(&line)
                .unwrap_or_else(|error| panic!("{}: {error} in {line:?}", self.name));
            if kinds.iter().any(|kind| event["event"] == *kind) {
                return event;
            }
        }
    }

    /// The first whole line of stderr that contains a text, once there is one.
    ///
    /// # Panics
    /// When there is none in time.
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

    /// Waits until the process has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn end(mut self) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        while self.line(deadline, "its end").is_some() {}
        let listener = self.listener.take().expect("it ends once");
        listener.join().expect("it only reads");
        let code = self.child.wait().expect("it is our child").code();
        let stdout = std::mem::take(&mut self.stdout);
        Outcome { name: self.name.clone(), code, stdout, stderr: self.said() }
    }

    /// Kills it, as `kill -9` does.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child");
    }

    /// Asks it to end, as `kill` does.
    ///
    /// # Panics
    /// When it cannot be asked.
    pub fn terminate(&self) {
        let mut kill = Command::new("kill");
        let status = kill.args(["-TERM", &self.child.id().to_string()]).status();
        assert!(status.expect("kill is there").success(), "{} is our child", self.name);
    }

    /// The next line of stdout, or none when there are no more.
    fn line(&mut self, deadline: Instant, awaited: &str) -> Option<String> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.stdout.push_str(&line);
                self.stdout.push('\n');
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!(
                "{} kept us waiting {} s for {awaited}; stdout:\n{}stderr:\n{}",
                self.name,
                PATIENCE.as_secs(),
                self.stdout,
                self.said()
            ),
        }
    }

    fn said(&self) -> String {
        self.stderr.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended already is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Outcome {
    /// Its stdout, having checked that all went well.
    ///
    /// # Panics
    /// When it did not.
    #[must_use]
    pub fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{} failed:\n{}", self.name, self.stderr);
        self.stdout
    }

    /// The one line that says why it failed, having checked that it ended with this code.
    ///
    /// # Panics
    /// When it ended otherwise, or said more or less than that.
    #[must_use]
    pub fn failure(self, code: i32) -> String {
        let Self { name, code: found, stderr, .. } = self;
        assert_eq!(found, Some(code), "{name} said:\n{stderr}");
        let mut reasons = stderr.lines().filter_map(|line| line.strip_prefix("shoal: "));
        let reason = reasons.next().unwrap_or_else(|| panic!("{name} gave no reason:\n{stderr}"));
        assert_eq!(reasons.next(), None, "{name} gave several reasons:\n{stderr}");
        assert!(
            stderr.trim_end().ends_with(reason),
            "{name} went on after it had said why it fails:\n{stderr}"
        );
        assert!(
            !stderr.contains("backtrace") && !stderr.contains("a mistake in shoal itself"),
            "{name} panicked:\n{stderr}"
        );
        reason.to_owned()
    }
}

fn pass_on(stdout: ChildStdout, sender: &SyncSender<String>) {
    for line in BufReader::new(stdout).lines() {
        let Ok(line) = line else { return };
        // Nobody listens once the test is over.
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
