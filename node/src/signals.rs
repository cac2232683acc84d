//! Signals that ask the process to leave, from its start to its end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use shoal_metrics::Preemption;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::exit::Exit;
use crate::logging;

/// Requests that wait for the process: one to leave in order, one to leave at once.
const QUEUE: usize = 2;

/// SIGHUP's place in the masks of signals.
const HANGUP_BIT: u64 = 1;

/// Returns the source of a request to leave, for people.
pub(crate) fn source_of(source: Preemption) -> &'static str {
    match source {
        Preemption::Terminated => "SIGTERM",
        Preemption::Interrupted => "SIGINT",
        Preemption::HungUp => "SIGHUP",
        Preemption::File => "the preemption file",
    }
}

/// The signals of this process. A signal reaches the part of the program that attends to it. While no part does, it
/// ends the process, as it does without a handler. So it works as process 1 too, for which the system has no default.
#[derive(Debug)]
pub struct Signals {
    requests: mpsc::Receiver<Preemption>,
    attended: Arc<AtomicBool>,
    /// Passes signals on. Ends with this value.
    _task: JoinSet<()>,
}

impl Signals {
    /// Takes the signals over from the system's default, which ends the process.
    ///
    /// # Errors
    /// When the system does not allow it.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn listen() -> io::Result<Self> {
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        // `nohup` has the process ignore it, and goes on.
        let hangup = if is_without_hangup() { None } else { Some(signal(SignalKind::hangup())?) };
        let (sender, requests) = mpsc::channel(QUEUE);
        let attended = Arc::new(AtomicBool::new(false));
        let mut task = JoinSet::new();
        task.spawn(pass_on(interrupt, terminate, hangup, attended.clone(), sender));
        Ok(Self { requests, attended, _task: task })
    }

    /// Attends to signals until the result is dropped.
    pub(crate) fn attend(&mut self) -> Attended<'_> {
        self.attended.store(true, Ordering::SeqCst);
        Attended { requests: &mut self.requests, attended: &self.attended }
    }

    /// Waits for a result, and gives up at a signal.
    ///
    /// # Errors
    /// Like the awaited, or when a signal came before.
    pub(crate) async fn or_stop<T>(
        &mut self,
        awaited: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut attended = self.attend();
        tokio::select! {
            result = awaited => result,
            source = attended.next() => bail!("stopped by {}", source_of(source)),
        }
    }
}

/// The signals while a part of the program attends to them.
#[derive(Debug)]
pub(crate) struct Attended<'a> {
    requests: &'a mut mpsc::Receiver<Preemption>,
    attended: &'a AtomicBool,
}

impl Attended<'_> {
    /// Waits for the next request to leave. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Preemption {
        match self.requests.recv().await {
            Some(request) => request,
            // The task that passes signals on ended with the runtime.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        self.attended.store(false, Ordering::SeqCst);
    }
}

/// Passes signals on while they are attended to, and ends the process otherwise.
async fn pass_on(
    mut interrupt: Signal,
    mut terminate: Signal,
    mut hangup: Option<Signal>,
    attended: Arc<AtomicBool>,
    requests: mpsc::Sender<Preemption>,
) {
    loop {
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let request = tokio::select! {
            _ = interrupt.recv() => Preemption::Interrupted,
            _ = terminate.recv() => Preemption::Terminated,
            _ = hung_up => Preemption::HungUp,
        };
        if attended.load(Ordering::SeqCst) {
            // A full queue has the request to leave at once already.
            let _ = requests.try_send(request);
        } else {
            logging::report_failure(&format!("stopped by {}", source_of(request)));
            std::process::exit(Exit::Failed as i32);
        }
    }
}

/// Whether this process was started with SIGHUP ignored.
fn is_without_hangup() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores_hangup(&status))
}

/// The same, by its `/proc/self/status`.
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & HANGUP_BIT != 0)
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, raise};

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn every_signal_is_a_request_and_stops_a_wait() {
        let mut signals = Signals::listen().expect("signals");
        for (raised, expected) in [
            (Signal::SIGTERM, Preemption::Terminated),
            (Signal::SIGINT, Preemption::Interrupted),
            (Signal::SIGHUP, Preemption::HungUp),
        ] {
            if raised == Signal::SIGHUP && is_without_hangup() {
                continue; // these tests run under `nohup`
            }
            let mut attended = signals.attend();
            raise(raised).expect("raised");
            assert_eq!(attended.next().await, expected);
        }
        let waits = async {
            raise(Signal::SIGTERM).expect("raised");
            std::future::pending::<anyhow::Result<()>>().await
        };
        let error = signals.or_stop(waits).await.expect_err("stopped");
        assert_eq!(error.to_string(), "stopped by SIGTERM");
    }

    #[test]
    fn nohup_is_honoured() {
        assert!(ignores_hangup("Name:\tshoal\nSigIgn:\t0000000000001001\n"));
        assert!(!ignores_hangup("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000001\n"));
        assert!(!ignores_hangup(""));
    }
}
