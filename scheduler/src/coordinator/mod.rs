//! The coordinator: the decisions of a run.
//!
//! | module | decides |
//! |---|---|
//! | `members` | which peers are members, which stages they host, which peers keep the log |
//! | `work` | which member works on what, and which claims are late |
//! | `rounds` | the all-reduces of the present step |
//! | `weights` | which members write, keep and fetch snapshots and checkpoints |
//! | `audits` | which work is computed again before its step is committed, and whose work was wrong |
//! | `balance` | when members change their stage |
//! | `alarms` | whether a report that the run cannot go on is believed |
//! | `progress`, `census`, `lost_stage` | term, era, version and phase |
//!
//! `steps` and `transitions` join them: steps, and changes of the membership, of the term and of the era.

mod alarms;
mod audits;
mod balance;
mod census;
mod config;
mod context;
mod lost_stage;
pub(crate) mod members;
pub mod placing;
mod progress;
mod rounds;
mod spans;
mod steps;
#[cfg(test)]
mod tests;
mod transitions;
mod weights;
pub(crate) mod work;

pub use config::{CoordinatorConfig, round_patience};
use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Member, Term};
use shoal_protocol::message::{
    Followed, FromCoordinator, LogRecord, Round, RoundId, ToCoordinator,
};
use shoal_protocol::units::Moment;

use self::alarms::Alarms;
use self::audits::Audits;
use self::balance::Balance;
use self::context::Context;
use self::members::Members;
use self::progress::{Phase, Progress};
use self::rounds::{Report, Rounds};
use self::weights::Weights;
use self::work::Work;
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput, LossCause};
use crate::coordinator::members::membership::Membership;

/// The decisions of a run, made by one member at a time. Whatever must outlast the coordinator goes through the
/// log before members learn of it.
///
/// The coordinator hands an input to the component that it concerns, and the values that this returns to the
/// next. The components read `Context`, which only changes between their calls.
#[derive(Debug)]
pub struct Coordinator {
    /// The first record of an empty log, if the run continues from an archive.
    founded: Option<LogRecord>,
    context: Context,
    work: Work,
    rounds: Rounds,
    weights: Weights,
    balance: Balance,
    alarms: Alarms,
    audits: Audits,
    /// A rule that is broken on purpose, to check that the simulator notices.
    #[cfg(test)]
    pub(crate) omit: Option<crate::sim::Omit>,
}

/// The actions that follow from one input, in order.
type Out = Vec<CoordinatorAction>;

impl Coordinator {
    /// A coordinator at the beginning of its term.
    #[must_use]
    pub fn new(mut config: CoordinatorConfig) -> Self {
        let stages = config.manifest.training.stages;
        let mut history = std::mem::take(&mut config.history);
        let empty = history == History::default();
        let founded = config.founding.take().filter(|_| empty).map(LogRecord::Founded);
        if let Some(founded) = &founded {
            history.apply(founded).expect("nothing is before it, and its number is not 0");
        }
        let anchors = std::mem::take(&mut config.anchors);
        let progress = Progress::of(&history, config.term);
        let membership = Membership::of(stages, &history);
        let stays = history.stays;
        Self {
            founded,
            work: Work::new(progress.term, config.routing),
            rounds: Rounds::default(),
            weights: Weights::new(config.manifest.first_version(), history.checkpoints),
            balance: Balance::default(),
            alarms: Alarms::default(),
            audits: Audits::default(),
            context: Context {
                config,
                members: Members::new(membership, history.view, anchors, stays),
                progress,
                now: Moment::default(),
            },
            #[cfg(test)]
            omit: None,
        }
    }

    /// Begins the term. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<CoordinatorAction>) {
        self.context.now = now;
        out.extend(self.founded.take().map(CoordinatorAction::Append));
        out.push(CoordinatorAction::Append(LogRecord::Term(self.context.progress.term)));
    }

    /// Handles an input and adds the resulting actions, in order, to `out`.
    pub fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
        out: &mut Vec<CoordinatorAction>,
    ) {
        self.context.now = now;
        #[cfg(test)]
        if !matches!(input, CoordinatorInput::Message { .. }) {
            assert!(self.work.is_counted(), "cached sums equal a recount");
        }
        match input {
            CoordinatorInput::Message { from, message } => self.handle_message(from, message, out),
            CoordinatorInput::Disconnected { member } => {
                self.member_lost(member, LossCause::Disconnected, out);
            }
            CoordinatorInput::Appended(record) => self.handle_appended(record, out),
            CoordinatorInput::Tick => {}
        }
        self.end_late_search(out);
        self.retry_census(out);
        if !self.context.progress.is_suspended() {
            self.retry(out);
        }
    }

    /// Repeats messages without an effect and asks for late work, where that is due.
    fn retry(&mut self, out: &mut Out) {
        self.work.replay_when_due(&self.context, out);
        while let Some((holder, how)) = self.work.reclaim_late(&self.context, out) {
            self.member_lost(holder, how, out);
        }
        self.retry_late_rounds(out);
        self.retry_audits(out);
        self.weights.retry_snapshots(&self.context, self.listens_from(), out);
        self.judge_snapshots(out);
        self.end_when_saved(out);
        self.weights.retry_copies(&self.context, out);
        self.rebalance(out);
        if self.context.progress.lacks_hosts_since.is_some() {
            self.open_when_gathered(out);
        }
    }

    /// A round that is open, or whose results are being appended to the log.
    pub(crate) fn round(&self, id: RoundId) -> Option<&Round> {
        self.rounds.round(id)
    }

    /// The era of the run.
    #[must_use]
    pub fn era(&self) -> Era {
        self.context.progress.era
    }

    /// The term of office.
    #[must_use]
    pub fn term(&self) -> Term {
        self.context.progress.term
    }

    /// Whether the term has begun. Before that, messages are ignored.
    #[must_use]
    pub fn is_in_office(&self) -> bool {
        !matches!(self.context.progress.phase, Phase::Beginning)
    }

    /// Whether this incarnation of a peer is a member.
    #[must_use]
    pub fn is_member(&self, member: Member) -> bool {
        self.context.members.current.contains(member)
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        // A suspended coordinator waits for the log, or for members.
        match &self.context.progress.phase {
            Phase::LostStage(search) => return Some(search.until()),
            Phase::Census(census) => return Some(census.retry_at()),
            Phase::Finished | Phase::Stopped { .. } => return None,
            _ if self.context.progress.is_suspended() => return None,
            _ => {}
        }
        let retries = [self.work.next_timeout(), self.weights.next_timeout()];
        let others = [
            self.rounds.deadline(),
            self.balance.next_comparison(&self.context),
            self.context.extends_at(),
            self.audits.next_timeout(),
        ];
        retries.into_iter().chain(others).flatten().min()
    }

    /// Handles a message of a peer, which may not be a member.
    fn handle_message(&mut self, from: Member, message: ToCoordinator, out: &mut Out) {
        if matches!(self.context.progress.phase, Phase::Beginning) {
            return;
        }
        if let ToCoordinator::Register(candidate) = message {
            return self.register(from, candidate, out);
        }
        // A message is dropped because its sender is not a member, and for no other reason.
        if !self.context.members.current.contains(from) {
            let reason = "it is not a member any more".to_owned();
            return send(from, FromCoordinator::Expelled { reason }, out);
        }
        if let Phase::Stopped { reason } = &self.context.progress.phase {
            let reason = reason.clone();
            return send(from, FromCoordinator::Stopped { reason }, out);
        }
        if matches!(self.context.progress.phase, Phase::Finished) {
            // The earlier message was lost.
            return send(from, FromCoordinator::Finished, out);
        }
        if self.context.progress.accepts(&message) {
            self.dispatch(from, message, out);
        }
    }

    /// Hands a member's message to the component that it concerns.
    fn dispatch(&mut self, from: Member, message: ToCoordinator, out: &mut Out) {
        match message {
            ToCoordinator::Register(_) => {}
            ToCoordinator::WorkRequest { rooms, through, service_time } => {
                self.work.request(&self.context, from, &rooms, (through, service_time), out);
            }
            ToCoordinator::Claim { key } => self.work.claim(&self.context, from, key, out),
            ToCoordinator::Done { key, grant, loss, pass_times, handover } => {
                let Self { work, context, .. } = self;
                let done = (loss, pass_times, *handover);
                if work.done(context, from, (key, grant), done, out) {
                    self.compare_handovers(key, out);
                    self.close_when_complete(out);
                }
            }
            ToCoordinator::Working { key, grant } => {
                self.work.keep(&self.context, from, (key, grant), out);
            }
            ToCoordinator::Reduced { round, mend, outcome, checks, sums, rates } => {
                let report = Report { outcome, checks, sums };
                self.reduced(from, (round, mend), report, &rates, out)
            }
            ToCoordinator::Audited { id, finding } => self.audited(from, id, finding, out),
            ToCoordinator::RoundGroupRequest { round } => self.rounds.send_group(from, round, out),
            ToCoordinator::RoundRefused { round, owner, reason } => {
                self.round_refused(from, (round, owner), &reason, out);
            }
            ToCoordinator::Diverged { key, reason } => {
                if self.work.holder(key) == Some(from) {
                    let reason = format!("the numbers diverged at {key}: {reason}");
                    self.alarm(from, key.step, reason, out);
                }
            }
            ToCoordinator::Stored { version, stage, files } => {
                self.weights.stored(&self.context, from, (version, stage), files, out);
                self.judge_snapshots(out);
            }
            ToCoordinator::Held { claims, part, last } => {
                self.claims_held(from, &claims, (part, last), out);
            }
            ToCoordinator::Archived { version } => {
                if self
                    .context
                    .members
                    .current
                    .with_duty(|duties| duties.archive)
                    .any(|it| it == from)
                {
                    self.weights.archived(version);
                    self.end_when_saved(out);
                }
            }
            ToCoordinator::Kept { version, stage, whole } => {
                self.copied(from, (version, stage, whole), out);
            }
            ToCoordinator::Released { key, grant } => {
                self.work.release(&self.context, from, (key, grant), out);
            }
            ToCoordinator::Ready { version, view } => self.ready(from, version, view, out),
            ToCoordinator::Behind(of) => self.stale(from, of == Followed::Destination, out),
            ToCoordinator::CannotReach { member } => self.unreachable(from, member, out),
            ToCoordinator::LinkEstimates { link_estimates } => {
                self.context.members.measure_links(from.peer, &link_estimates)
            }
            ToCoordinator::ViewRequest => self.send_view(from, out),
            ToCoordinator::KeepAlive => {}
            ToCoordinator::Draining => self.draining(from, out),
            ToCoordinator::Leave => self.member_lost(from, LossCause::Left, out),
        }
    }

    /// Handles a record that is in the log for good.
    fn handle_appended(&mut self, record: LogRecord, out: &mut Out) {
        if matches!(self.context.progress.phase, Phase::Stopped { .. }) {
            return;
        }
        match record {
            LogRecord::Term(_) if self.context.progress.completed => self.finish(out),
            LogRecord::Term(_) => self.begin_census(out),
            LogRecord::View(change) => self.view_logged(change, out),
            // The rewind that follows in the log undoes this commit.
            LogRecord::Commit(_)
                if matches!(
                    self.context.progress.phase,
                    Phase::Rewinding { .. } | Phase::LostStage(_)
                ) => {}
            LogRecord::Commit(record) => self.committed(record, out),
            LogRecord::Rewind { era, version } => self.rewound(era, version, out),
            LogRecord::Checkpoint { version, stages, oldest } => {
                self.checkpoint_logged((version, stages, oldest), out);
            }
            LogRecord::Convicted(conviction) => self.convicted(conviction, out),
            LogRecord::Completed => self.finish(out),
            // The term that follows in the log begins the history.
            LogRecord::Founded(_) => {}
        }
    }

    /// Stops the run, which cannot continue, and sends all members the reason.
    fn stop(&mut self, reason: String, out: &mut Out) {
        if self.context.progress.is_over() {
            return;
        }
        self.context.members.broadcast(&FromCoordinator::Stopped { reason: reason.clone() }, out);
        event(CoordinatorEvent::Stopped { reason: reason.clone() }, out);
        self.context.progress.enter(Phase::Stopped { reason });
    }
}

fn send(to: Member, message: FromCoordinator, out: &mut Out) {
    out.push(CoordinatorAction::Send { to, message });
}

fn event(event: CoordinatorEvent, out: &mut Out) {
    out.push(CoordinatorAction::Event(event));
}
