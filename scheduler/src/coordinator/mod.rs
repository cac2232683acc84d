//! The run's decisions: who is a member (`registration`, `joining`), who works on what (`work`), when
//! a step is closed and committed (`closing`), what becomes of the work of who is gone (`recovery`),
//! what is written (`snapshots`) and saved (`checkpoint`), and where it all begins again when a stage
//! is lost (`rewind`). What is late is asked back (`stragglers`), and
//! what the slow have yet to begin when others have nothing left (`relief`). A term begins with what the log says
//! and what members hold (`census`).

mod balance;
mod census;
mod checkpoint;
mod closing;
mod config;
mod joining;
mod moving;
mod queue;
mod recovery;
mod registration;
mod relief;
mod rewind;
mod snapshots;
mod stragglers;
#[cfg(test)]
mod tests;
mod wanting;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use config::{CoordinatorConfig, round_patience};
use shoal_protocol::ids::{Era, Member, PeerId, Stage, Step, Term};
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, LogRecord, RoundGroup, ToCoordinator, View,
};
use shoal_protocol::units::{Moment, Rate};

use self::balance::Balance;
use self::census::Census;
use self::checkpoint::Checkpoints;
use self::closing::Rounds;
use self::joining::Newcomers;
use self::recovery::{Complaints, Gaps};
use self::rewind::{Archive, Search};
use self::snapshots::Snapshots;
use self::stragglers::Stragglers;
use self::work::Work;
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput};
use crate::deadline::Estimate;
use crate::locality::LinkEstimates;
use crate::membership::Membership;

/// The run's decisions. One member at a time is the run's coordinator; what must outlast it goes
/// through the log before it is said.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    /// Its term of office.
    term: Term,
    era: Era,
    /// The version that the era began at.
    began_at: Step,
    /// The newest commit of the era.
    last_commit: Option<CommitRecord>,
    /// Whether anything was ever given out.
    begun: bool,
    /// Who was last asked to keep the log.
    anchors: BTreeSet<PeerId>,
    membership: Membership,
    /// The membership that the log holds; what members are told of.
    logged_view: View,
    /// Whether a membership is on its way into the log, and whether a newer one must follow.
    view_pending: bool,
    view_outdated: bool,
    /// What the run last said that it waits for.
    waiting_said: Option<(Vec<Stage>, usize)>,
    phase: Phase,
    /// The version of the weights: steps committed.
    version: Step,
    work: Work,
    rounds: Rounds,
    /// Whom each stage's last round was among.
    round_groups: BTreeMap<Stage, Arc<RoundGroup>>,
    /// How long the rounds of this term took.
    round_times: Option<Estimate>,
    /// What the links between replicas of a stage were measured to carry, from whom and to whom.
    link_rates: BTreeMap<(Member, Member), Rate>,
    /// What members measured of their links to each other.
    link_estimates: LinkEstimates,
    newcomers: Newcomers,
    balance: Balance,
    snapshots: Snapshots,
    checkpoints: Checkpoints,
    archive: Archive,
    /// Whether the log had the run's end before this term.
    completed: bool,
    complaints: Complaints,
    stragglers: Stragglers,
    /// The time of the present input.
    now: Moment,
    /// What nobody had claimed at the last look.
    gaps: Gaps,
    /// When it is looked at again, and replays are asked for again.
    replay_at: Option<Moment>,
    /// A rule that it does not keep, to see that this is noticed.
    #[cfg(test)]
    pub(crate) omit: Option<crate::sim::Omit>,
}

/// Where the run stands.
#[derive(Debug)]
enum Phase {
    /// The term is on its way into the log.
    Beginning,
    /// It is not known yet what every member holds.
    Census(Census),
    /// Members are still missing.
    Gathering,
    /// A stage is lost, and it is not known yet what can be gone back to.
    StageLost(Search),
    /// A return to an earlier version is on its way into the log, after who hosts what from then on.
    Rewinding { version: Step, logging: bool },
    /// Microbatches flow.
    Open,
    /// All are done, the all-reduce is on.
    Closing,
    /// The step's last word is on its way into the log.
    Committing,
    /// The last step is committed, the last checkpoint is not yet where it belongs.
    Saving,
    /// That the run is over is on its way into the log.
    Ending,
    /// All is said and done.
    Finished,
    /// The run cannot go on.
    Stopped { reason: String },
}

/// What one input makes the coordinator do.
type Out = Vec<CoordinatorAction>;

impl Coordinator {
    /// A coordinator at the beginning of its term.
    #[must_use]
    pub fn new(mut config: CoordinatorConfig) -> Self {
        let stages = config.manifest.training.stages;
        let history = std::mem::take(&mut config.history);
        let term = history.term.next();
        Self {
            term,
            era: history.era,
            began_at: history.began_at,
            begun: history.has_begun(),
            anchors: std::mem::take(&mut config.anchors),
            membership: Membership::of(stages, &history),
            archive: Archive::of(history.checkpoints),
            version: history.version,
            last_commit: history.commit,
            completed: history.completed,
            logged_view: history.view,
            work: Work::new(term, config.routing),
            config,
            view_pending: false,
            view_outdated: false,
            waiting_said: None,
            phase: Phase::Beginning,
            rounds: Rounds::default(),
            round_groups: BTreeMap::new(),
            round_times: None,
            link_rates: BTreeMap::new(),
            link_estimates: LinkEstimates::default(),
            newcomers: Newcomers::default(),
            balance: Balance::default(),
            snapshots: Snapshots::default(),
            checkpoints: Checkpoints::default(),
            complaints: Complaints::default(),
            stragglers: Stragglers::default(),
            now: Moment::default(),
            gaps: Gaps::new(),
            replay_at: None,
            #[cfg(test)]
            omit: None,
        }
    }

    /// Begins the term. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<CoordinatorAction>) {
        self.now = now;
        out.push(CoordinatorAction::Append(LogRecord::Term(self.term)));
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
        out: &mut Vec<CoordinatorAction>,
    ) {
        self.now = now;
        #[cfg(test)]
        if !matches!(input, CoordinatorInput::Message { .. }) {
            assert!(self.work.is_counted() && self.stragglers.is_counted(), "sums are kept up");
        }
        match input {
            CoordinatorInput::Message { from, message } => self.heard(from, message, out),
            CoordinatorInput::Disconnected { member } => {
                self.lost(member, "its connection broke", out);
            }
            CoordinatorInput::Appended(record) => self.appended(record, out),
            CoordinatorInput::Tick => {}
        }
        if let Phase::StageLost(search) = &self.phase
            && now >= search.until
        {
            self.ask_holders(out);
        }
        self.ask_again(out);
        if self.is_suspended() {
            return;
        }
        if self.replay_at.is_some_and(|at| now >= at) {
            self.replay_old_gaps(out);
        }
        self.reclaim_late(out);
        self.retry_late_rounds(out);
        self.retry_snapshots(out);
        self.retry_copies(out);
        self.balance(out);
    }

    /// The era of the run.
    #[must_use]
    pub fn era(&self) -> Era {
        self.era
    }

    /// The term of office.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// Whether its term has begun: before that it hears nobody.
    #[must_use]
    pub fn is_in_office(&self) -> bool {
        !matches!(self.phase, Phase::Beginning)
    }

    /// Whether this life of a peer is a member.
    #[must_use]
    pub fn is_member(&self, member: Member) -> bool {
        self.membership.contains(member)
    }

    /// Whether it decides nothing now but who is a member.
    fn is_suspended(&self) -> bool {
        matches!(
            self.phase,
            Phase::Beginning | Phase::Census(_) | Phase::StageLost(_) | Phase::Rewinding { .. }
        )
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        // Who is suspended waits for the log, or for others.
        match &self.phase {
            Phase::StageLost(search) => return Some(search.until),
            Phase::Census(census) => return Some(census.again_at),
            Phase::Finished | Phase::Stopped { .. } => return None,
            _ if self.is_suspended() => return None,
            _ => {}
        }
        let again = [self.snapshots.again_at, self.checkpoints.again_at, self.balance_due()];
        let others = [self.replay_at, self.rounds.patience(), self.stragglers.patience()];
        others.into_iter().chain(again).flatten().min()
    }

    fn heard(&mut self, from: Member, message: ToCoordinator, out: &mut Out) {
        if matches!(self.phase, Phase::Beginning) {
            return;
        }
        if let ToCoordinator::Register(candidate) = message {
            return self.register(from, candidate, out);
        }
        // A word is dropped because its sender is no member, and for no other reason.
        if !self.membership.contains(from) {
            let reason = "it is not a member any more".to_owned();
            return send(from, FromCoordinator::Expelled { reason }, out);
        }
        if let Phase::Stopped { reason } = &self.phase {
            let reason = reason.clone();
            return send(from, FromCoordinator::Stopped { reason }, out);
        }
        if matches!(self.phase, Phase::Finished) {
            // It was told, and that was lost.
            return send(from, FromCoordinator::Finished, out);
        }
        if self.is_suspended() && !self.hears_while_suspended(&message) {
            return;
        }
        match message {
            ToCoordinator::Register(_) => {}
            ToCoordinator::WorkRequest { rooms, through, service_time } => {
                self.wanted(from, &rooms, through, service_time, out);
            }
            ToCoordinator::Claim { key } => self.claimed(from, key, out),
            ToCoordinator::Done { key, grant, loss, pass_times } => {
                self.done(from, key, grant, (loss, pass_times), out);
            }
            ToCoordinator::Working { key, grant } => {
                self.working(from, key, grant);
                self.relief_refused(key, grant, out);
            }
            ToCoordinator::Reduced { round, mend, outcome, rates } => {
                self.reduced(from, (round, mend), outcome, &rates, out)
            }
            ToCoordinator::RoundGroupRequest { round } => {
                self.round_group_requested(from, round, out)
            }
            ToCoordinator::RoundRefused { round, reason } => {
                self.round_refused(from, round, &reason, out);
            }
            ToCoordinator::Diverged { key, reason } => {
                self.stop(format!("the numbers diverged at {key}: {reason}"), out);
            }
            ToCoordinator::Stored { version, stage, files } => {
                self.stored(from, version, stage, files, out);
            }
            ToCoordinator::Held { claims, part, last } => {
                self.counted(from, &claims, (part, last), out);
            }
            ToCoordinator::Archived { version } => self.archived_whole(version, out),
            ToCoordinator::Kept { version, stage, whole } => {
                self.kept(from, version, stage, whole, out);
            }
            ToCoordinator::Released { key, grant } => self.released(from, key, grant, out),
            ToCoordinator::Ready { version, view } => self.ready(from, version, view, out),
            ToCoordinator::Stale { there } => self.behind(from, there, out),
            ToCoordinator::CannotReach { member } => self.cannot_reach(from, member, out),
            ToCoordinator::LinkEstimates { link_estimates } => {
                self.link_estimates.note(from.peer, &link_estimates)
            }
            ToCoordinator::ViewRequest => self.view_wanted(from, out),
            ToCoordinator::KeepAlive => {}
            ToCoordinator::Draining => self.draining(from, out),
            ToCoordinator::Leave => self.lost(from, "it left", out),
        }
    }

    /// What is of use before anything is given out: who leaves, and what members hold.
    fn hears_while_suspended(&self, message: &ToCoordinator) -> bool {
        match message {
            ToCoordinator::Leave
            | ToCoordinator::Draining
            | ToCoordinator::CannotReach { .. }
            | ToCoordinator::ViewRequest => true,
            ToCoordinator::Held { .. }
            | ToCoordinator::Done { .. }
            | ToCoordinator::Stored { .. }
            | ToCoordinator::Released { .. } => matches!(self.phase, Phase::Census(_)),
            ToCoordinator::Kept { .. } => matches!(self.phase, Phase::StageLost(_)),
            _ => false,
        }
    }

    fn appended(&mut self, record: LogRecord, out: &mut Out) {
        if matches!(self.phase, Phase::Stopped { .. }) {
            return;
        }
        match record {
            LogRecord::Term(_) if self.completed => self.finish(out),
            LogRecord::Term(_) => self.begin_census(out),
            LogRecord::View(change) => self.view_logged(change, out),
            // What was committed last is undone by the rewind that follows it in the log.
            LogRecord::Commit(_)
                if matches!(self.phase, Phase::Rewinding { .. } | Phase::StageLost(_)) => {}
            LogRecord::Commit(record) => self.committed(record, out),
            LogRecord::Rewind { era, version } => self.rewound(era, version, out),
            LogRecord::Checkpoint { version, stages, oldest } => {
                self.checkpoint_logged(version, stages, oldest, out);
            }
            LogRecord::Completed => self.finish(out),
        }
    }

    /// The run cannot go on, and everybody hears why.
    fn stop(&mut self, reason: String, out: &mut Out) {
        if matches!(self.phase, Phase::Finished | Phase::Stopped { .. }) {
            return;
        }
        self.tell_all(&FromCoordinator::Stopped { reason: reason.clone() }, out);
        event(CoordinatorEvent::Stopped { reason: reason.clone() }, out);
        self.phase = Phase::Stopped { reason };
    }

    fn tell_all(&self, message: &FromCoordinator, out: &mut Out) {
        for member in self.membership.members() {
            send(member, message.clone(), out);
        }
    }

    /// The replicas of a stage in a step that the log knows and nobody misses.
    fn replicas_at(&self, stage: Stage, step: Step) -> Vec<Member> {
        self.logged(true, |member| self.membership.hosts(member, stage, step))
    }

    /// The replicas of a stage now that stay with it.
    fn replicas_of(&self, stage: Stage) -> Vec<Member> {
        let staying: BTreeSet<Member> = self.membership.staying(stage).collect();
        self.logged(true, |member| staying.contains(&member))
    }

    /// Who will host a stage and hears what becomes of a step there: newcomers, and who is to move. A newcomer
    /// that is ready listens until the log says that it serves: no round before that counts on it, and
    /// none may pass it by.
    fn listeners_at(&self, stage: Stage, step: Step) -> Vec<Member> {
        let is_told = |member| !self.newcomers.is_queued(member);
        let comes = |member| self.membership.span_of(member).is_some_and(|it| it.contains(stage));
        let moves = |member| self.membership.listens(member, stage, step);
        let comers = self.logged(false, |member| comes(member) && is_told(member));
        let movers = self.logged(true, |member| moves(member) && is_told(member));
        comers.into_iter().chain(movers).collect()
    }

    /// The members in the log, serving or not, of whom something is so.
    fn logged(&self, serving: bool, is_so: impl Fn(Member) -> bool) -> Vec<Member> {
        let logged = self.logged_view.members.iter().filter(|record| record.serving == serving);
        logged.map(|record| record.member).filter(|member| is_so(*member)).collect()
    }
}

fn send(to: Member, message: FromCoordinator, out: &mut Out) {
    out.push(CoordinatorAction::Send { to, message });
}

fn event(event: CoordinatorEvent, out: &mut Out) {
    out.push(CoordinatorAction::Event(event));
}
