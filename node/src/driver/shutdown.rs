//! The end of this life: its reason, an orderly leave, and the wait for peers that missed the end of the run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use shoal_metrics::Preemption;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::View;

use super::setup::Leaving;
use super::timers::sleep_to;
use crate::anchor::AnchorEvent;
use crate::events::RunEvent;
use crate::exit::{Exit, ExitWith};
use crate::signals::Attended;

/// Time between two checks for the file that announces a preemption.
const PREEMPTION_POLL: Duration = Duration::from_millis(500);

/// How long a finished peer waits for peers that were away. A supervisor restarts a process
/// sooner.
const PATIENCE: Duration = Duration::from_secs(15);

/// Why this life ends.
#[derive(Debug)]
pub(super) enum Ending {
    Finished,
    Stopped(String),
    /// This process cannot go on; the run can.
    Failed(anyhow::Error),
    Refused(String),
    Expelled(String),
    Orphaned(String),
    /// The archive of this peer cannot have the last checkpoint.
    NotArchived(String),
    Drained,
}

/// How a life ends for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The run is over.
    Finished,
    /// The run goes on without this peer, which may come back in a new life.
    Expelled,
    /// The coordinator is unreachable; the peer may come back.
    Orphaned,
    /// The peer left in order, as it was asked to.
    Drained,
    /// The run was over before.
    Complete,
}

impl Ending {
    fn is_of_a_finished_run(&self, completed: impl Fn() -> bool) -> bool {
        match self {
            Self::Finished => true,
            // The log showed the end only after this life had begun.
            Self::Refused(_) => completed(),
            _ => false,
        }
    }

    /// Converts the reason to the outcome for the process. `completed` looks whether the log, which
    /// this process may keep again, has the end of the run.
    ///
    /// # Errors
    /// When the run stopped, or does not admit this peer.
    pub(super) fn outcome(self, completed: impl Fn() -> bool) -> anyhow::Result<Outcome> {
        match self {
            Self::Finished => Ok(Outcome::Finished),
            Self::Expelled(reason) => {
                tracing::warn!(%reason, "expelled");
                Ok(Outcome::Expelled)
            }
            Self::Drained => Ok(Outcome::Drained),
            Self::Orphaned(reason) => {
                tracing::warn!(%reason, "no coordinator is reachable");
                Ok(Outcome::Orphaned)
            }
            Self::NotArchived(reason) => bail!(
                "the last checkpoint cannot be uploaded: {reason}; start this peer again to go on"
            ),
            Self::Stopped(reason) => bail!("the run stopped: {reason}"),
            Self::Failed(error) => Err(error),
            Self::Refused(_) if completed() => Ok(Outcome::Complete),
            Self::Refused(reason) => {
                Err(anyhow!("not admitted: {reason}")).exit_with(Exit::NotAdmitted)
            }
        }
    }
}

/// An event of the end.
#[derive(Debug)]
pub(super) enum ShutdownEvent {
    /// The user or the machine's owner asks the peer to leave.
    Leave(Preemption),
    /// The time for an orderly leave is over.
    DrainTimeout,
    /// The wait for absent peers is over.
    WaitOver,
}

/// Owns the reason for the end, and the deadlines on the way to it.
#[derive(Debug)]
pub(super) struct Shutdown {
    ending: Option<Ending>,
    /// Peers that lost their place in the run while their processes live: each comes back in a new life.
    returning: BTreeSet<PeerId>,
    /// Set when the run is over.
    absent: Option<AbsentPeers>,
    preempt_file: Option<PathBuf>,
    next_poll: Instant,
    drain_timeout: Duration,
    /// The end of an orderly leave in progress.
    drain_until: Option<Instant>,
}

impl Shutdown {
    pub(super) fn new(leaving: Leaving) -> Self {
        Self {
            ending: None,
            returning: BTreeSet::new(),
            absent: None,
            preempt_file: leaving.preempt_file,
            next_poll: Instant::now(),
            drain_timeout: leaving.drain_timeout,
            drain_until: None,
        }
    }

    /// Ends this life, unless it ends already.
    pub(super) fn end(&mut self, ending: Ending) {
        self.ending.get_or_insert(ending);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Returns the reason for the end once this life may end. A peer whose run is over first archives
    /// checkpoints on their way, and informs absent peers. `completed` is that of [`Ending::outcome`].
    pub(super) fn take_ending(
        &mut self,
        archiving: bool,
        completed: impl Fn() -> bool,
    ) -> Option<Ending> {
        let drained = self.drain_until.is_some_and(|until| Instant::now() >= until);
        let waits = (archiving && !drained) || !self.has_informed_all();
        self.ending.take_if(|ending| !(waits && ending.is_of_a_finished_run(completed)))
    }

    fn has_informed_all(&self) -> bool {
        let over = |absent: &AbsentPeers| absent.is_over(Instant::now());
        self.drain_until.is_some() || self.absent.as_ref().is_none_or(over)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.drain_until.is_some()
    }

    /// Begins an orderly leave.
    pub(super) fn drain(&mut self) {
        self.drain_until = Some(Instant::now() + self.drain_timeout);
    }

    /// Waits for the next event. Safe to cancel.
    pub(super) async fn next(&mut self, signals: &mut Attended<'_>) -> ShutdownEvent {
        let wait_over = self.absent.as_ref().map(|absent| absent.until);
        let polls = self.preempt_file.is_some() && self.drain_until.is_none();
        loop {
            tokio::select! {
                source = signals.next() => return ShutdownEvent::Leave(source),
                () = sleep_to(self.drain_until) => return ShutdownEvent::DrainTimeout,
                () = sleep_to(wait_over) => {
                    self.absent = None;
                    return ShutdownEvent::WaitOver;
                }
                () = sleep_to(Some(self.next_poll)), if polls => {
                    self.next_poll = Instant::now() + PREEMPTION_POLL;
                    if self.preempt_file.as_deref().is_some_and(Path::exists) {
                        return ShutdownEvent::Leave(Preemption::File);
                    }
                }
            }
        }
    }

    /// Notes a peer that comes back in a new life, unless the run is over before.
    pub(super) fn comes_back(&mut self, peer: PeerId) {
        self.returning.insert(peer);
    }

    /// Notes that the run is over for this peer, and waits for the anchors and the returning peers that do not know.
    pub(super) fn finish(
        &mut self,
        mut voters: BTreeSet<PeerId>,
        view: &View,
        me: Member,
    ) -> Option<RunEvent> {
        voters.append(&mut self.returning);
        let absent = AbsentPeers::new(voters, view, me, Instant::now());
        let waits = !absent.is_over(Instant::now());
        let (peers, seconds) = (absent.peers.len(), PATIENCE.as_secs());
        self.absent = Some(absent);
        waits.then_some(RunEvent::AwaitsPeers { peers, seconds })
    }

    /// Notes a connection. Returns whether the peer does not know of the end and has to.
    pub(super) fn connected(&mut self, peer: PeerId) -> bool {
        self.absent.as_mut().is_some_and(|absent| absent.found(peer))
    }

    /// Returns whether the run is over, so that no election matters any more. A failure of the
    /// local anchor then ends the wait for the others.
    pub(super) fn ignores(&mut self, event: Option<&AnchorEvent>) -> bool {
        let over = self.absent.is_some();
        if matches!(event, None | Some(AnchorEvent::Failed(_))) {
            self.absent = None;
        }
        over
    }
}

/// Peers that were away when the run ended, and would come back to find nobody: an anchor would wait for a
/// majority that never forms again, another peer for a coordinator.
#[derive(Debug)]
struct AbsentPeers {
    peers: BTreeSet<PeerId>,
    until: Instant,
}

impl AbsentPeers {
    /// The members of the last membership know of the end. A peer that is none of them learned of it
    /// from others, and does not wait.
    fn new(mut peers: BTreeSet<PeerId>, view: &View, me: Member, now: Instant) -> Self {
        if !view.lists(me) {
            peers.clear();
        }
        for record in &view.members {
            peers.remove(&record.member.peer);
        }
        Self { peers, until: now + PATIENCE }
    }

    /// Returns whether all know of the end, or the time is up.
    fn is_over(&self, now: Instant) -> bool {
        self.peers.is_empty() || now >= self.until
    }

    /// Notes a connection. Returns whether the peer was absent.
    fn found(&mut self, peer: PeerId) -> bool {
        self.peers.remove(&peer)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, Stage, StageSpan};
    use shoal_protocol::message::MemberRecord;

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn view(members: &[u8]) -> View {
        let record = |number: &u8| MemberRecord::plain(member(*number), StageSpan::one(Stage(0)));
        let members = members.iter().map(record).map(Into::into).collect();
        View { members, ..View::default() }
    }

    fn voters() -> BTreeSet<PeerId> {
        [1, 2, 3].map(|number| PeerId([number; 32])).into()
    }

    #[test]
    fn an_absent_anchor_is_awaited_and_informed_once() {
        let now = Instant::now();
        let mut absent = AbsentPeers::new(voters(), &view(&[1, 2, 4]), member(1), now);
        assert!(!absent.is_over(now));
        assert!(!absent.found(member(2).peer), "it knows as a member");
        assert!(!absent.found(member(4).peer), "it is no anchor");
        assert!(absent.found(member(3).peer));
        assert!(!absent.found(member(3).peer));
        assert!(absent.is_over(now));
    }

    #[test]
    fn a_wait_has_an_end_and_a_reason() {
        let now = Instant::now();
        let waits = |members: &[u8], me: u8| {
            let absent = AbsentPeers::new(voters(), &view(members), member(me), now);
            assert!(absent.is_over(now + PATIENCE));
            !absent.is_over(now)
        };
        assert!(waits(&[1, 2], 1));
        assert!(!waits(&[1, 2, 3], 1), "all were there");
        assert!(!waits(&[2, 3], 1), "a latecomer itself");
    }

    #[test]
    fn an_expelled_peer_whose_process_lives_is_awaited_unless_it_is_back() {
        let leaving = Leaving { preempt_file: None, drain_timeout: Duration::ZERO };
        let finished = |members: &[u8]| {
            let mut shutdown = Shutdown::new(leaving.clone());
            shutdown.comes_back(member(4).peer);
            shutdown.end(Ending::Finished);
            let waits = shutdown.finish(BTreeSet::new(), &view(members), member(1)).is_some();
            (waits, shutdown)
        };
        let ended = |shutdown: &mut Shutdown| shutdown.take_ending(false, || false).is_some();
        let (waits, mut shutdown) = finished(&[1, 2]);
        assert!(waits && !ended(&mut shutdown));
        assert!(shutdown.connected(member(4).peer), "it is told");
        assert!(ended(&mut shutdown));
        let (waits, mut shutdown) = finished(&[1, 2, 4]);
        assert!(!waits && ended(&mut shutdown), "a member knows");
    }
}
