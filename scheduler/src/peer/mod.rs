//! One peer's decisions.
//!
//! A microbatch's life at one stage is a `job::Job`: taken in (`admission`), computed
//! (`compute`), sent on (`routing`), answered and reported. Words of the coordinator come in
//! through `control`, which may ask work back (`reclaim`); the end of a step is `closing`,
//! among whom `round_groups` says. What a loss
//! of others leads to is `recovery`; a newcomer catches up in `joining`, with what it hears of rounds
//! (`hearing`), and so does who changes its stage (`moving`). Who is a member comes in through
//! `viewing`. A new coordinator is told what this peer holds in `census`.

mod admission;
mod census;
mod closing;
mod compute;
mod config;
mod control;
mod hearing;
mod job;
mod joining;
mod link_estimates;
mod moving;
mod reclaim;
mod recovery;
mod round_groups;
mod routing;
mod stage;
mod stores;
#[cfg(test)]
mod tests;
mod viewing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use config::{PeerConfig, PeerLimits, RoundCut};
use shoal_protocol::ids::{
    ClaimKey, Era, Grant, Incarnation, Member, PeerId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{LinkEstimate, PeerMessage, TensorTag, ToCoordinator, View};
use shoal_protocol::units::{Bytes, Moment};

use self::closing::{Applying, EarlyPieces, Word};
use self::compute::Compute;
use self::hearing::Hearing;
use self::job::Job;
use self::joining::{Newcomer, Stale};
use self::moving::Moving;
use self::round_groups::RoundGroups;
use self::stage::{Hosted, Waiting};
use self::stores::Stores;
use self::viewing::Viewing;
use crate::action::{Fault, Payload, PeerAction, PeerEvent, PeerInput, PeerLoad};
use crate::round::Reduction;

/// Retries without a word of the coordinator after which it is told that this peer is there.
const SILENCE: u32 = 4;

/// One peer's decisions: the life of every microbatch that passes through it, and its part in
/// rounds and commits.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
    status: Status,
    /// Who spoke last as the coordinator.
    coordinator: Option<Member>,
    /// When it last did.
    heard_at: Moment,
    /// The newest term of a coordinator that asked what this peer holds.
    term: Term,
    span: Option<StageSpan>,
    view: View,
    viewing: Viewing,
    /// What the links to other peers were measured to be.
    links: BTreeMap<PeerId, LinkEstimate>,
    /// What the coordinator was told of them.
    ways_said: BTreeMap<PeerId, LinkEstimate>,
    /// The newest era that this peer heard of the beginning of.
    era: Era,
    /// Steps whose commit was taken in: the version of the weights that later tasks read.
    version: Step,
    /// Since when.
    version_at: Moment,
    /// The newest grant that came with work.
    through: Grant,
    /// What the coordinator was last told of room at the first stage.
    wish: Option<(Vec<(Step, u32)>, Grant)>,
    stages: BTreeMap<Stage, Hosted>,
    jobs: BTreeMap<ClaimKey, Job>,
    compute: Compute,
    rounds: BTreeMap<Stage, Reduction>,
    round_groups: RoundGroups,
    /// Rounds that came to nothing and of which the engine still has tasks.
    ended: Vec<Reduction>,
    /// Results of rounds that this peer only listens to.
    hearing: BTreeMap<(Step, Stage), Hearing>,
    /// Results of no more use, of which the engine still has tasks.
    unheard: Vec<Hearing>,
    /// Words about steps that this peer is not ready for.
    backlog: VecDeque<Word>,
    /// The step whose commit waits for its result, and since when nothing of that comes.
    lacks: Option<(Step, Moment)>,
    /// How far a peer is that does not serve yet.
    newcomer: Option<Newcomer>,
    behind: Stale,
    /// The stage that it is to host in place of its own.
    moving: Option<Moving>,
    /// The last grant of each work that was let go of.
    released: BTreeMap<ClaimKey, Grant>,
    /// It leaves as soon as nothing that it counted depends on it.
    draining: bool,
    /// Members that cannot be reached.
    unreachable: BTreeSet<Member>,
    /// Who is gone for good: nothing that an earlier life of theirs says is heard.
    gone: BTreeMap<PeerId, Incarnation>,
    /// Who spoke and is in no membership that this peer knows, and since when.
    strangers: BTreeMap<Member, Moment>,
    early: EarlyPieces,
    applying: Applying,
    stores: Stores,
    /// Who offered something before this peer knew what it hosts.
    early_askers: BTreeSet<(Stage, Member)>,
    in_flight: Bytes,
    logged: Bytes,
    /// Tasks given to the engine and not yet done.
    tasks: usize,
    /// When words without an answer are said again.
    sweep_at: Moment,
}

/// Whether the peer takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// It asked to be admitted.
    Joining,
    /// It is a member.
    Member,
    /// The run is over, or over for this peer.
    Over,
}

/// What one input makes the peer do.
type Out = Vec<PeerAction>;

impl Peer {
    /// A peer that is not a member yet.
    #[must_use]
    pub fn new(config: PeerConfig) -> Self {
        Self {
            config,
            status: Status::Joining,
            coordinator: None,
            heard_at: Moment::default(),
            term: Term(0),
            span: None,
            view: View::default(),
            viewing: Viewing::default(),
            links: BTreeMap::new(),
            ways_said: BTreeMap::new(),
            era: Era(0),
            version: Step(0),
            version_at: Moment::default(),
            through: Grant::default(),
            wish: None,
            stages: BTreeMap::new(),
            jobs: BTreeMap::new(),
            compute: Compute::default(),
            rounds: BTreeMap::new(),
            round_groups: RoundGroups::new(),
            ended: Vec::new(),
            hearing: BTreeMap::new(),
            unheard: Vec::new(),
            backlog: VecDeque::new(),
            lacks: None,
            newcomer: Some(Newcomer::default()),
            behind: Stale::default(),
            moving: None,
            released: BTreeMap::new(),
            draining: false,
            unreachable: BTreeSet::new(),
            gone: BTreeMap::new(),
            strangers: BTreeMap::new(),
            early: EarlyPieces::default(),
            applying: Applying::default(),
            stores: Stores::default(),
            early_askers: BTreeSet::new(),
            in_flight: Bytes(0),
            logged: Bytes(0),
            tasks: 0,
            sweep_at: Moment::default(),
        }
    }

    /// Asks to be admitted. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<PeerAction>) {
        self.sweep_at = now + self.config.limits.retry;
        self.register(out);
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(&mut self, now: Moment, input: PeerInput, out: &mut Vec<PeerAction>) {
        let given_before = out.len();
        let version = self.version;
        if matches!(input, PeerInput::Done { .. }) {
            self.tasks = self.tasks.saturating_sub(1);
        }
        if self.status == Status::Over {
            return self.let_go(now, input, out);
        }
        match input {
            PeerInput::FromCoordinator { from, message } => {
                self.coordinator = Some(from);
                self.heard_at = now;
                self.told(now, message, out);
            }
            PeerInput::PeerMessage { from, message } => self.heard(now, from, message, out),
            PeerInput::Tensor { from, tag, payload } => self.received(now, from, tag, payload, out),
            PeerInput::Done { result, busy } => self.computed(now, result, busy, out),
            PeerInput::Disconnected { member } => self.disconnected(now, member, out),
            PeerInput::Unreachable { member } => self.cannot_reach(member, out),
            PeerInput::Fetched { version, stage, whole } => {
                self.fetched(version, stage, whole, out);
            }
            PeerInput::Kept { version, stage, whole } => {
                let message = ToCoordinator::Kept { version, stage, whole };
                out.push(PeerAction::ToCoordinator(message));
            }
            PeerInput::Archived { version } => {
                out.push(PeerAction::ToCoordinator(ToCoordinator::Archived { version }));
            }
            PeerInput::Links(links) => self.measured(links, out),
            PeerInput::LinksProbed(link_estimates) => self.looked(link_estimates, out),
            PeerInput::Drain => self.drain(out),
            PeerInput::Tick => {}
        }
        if self.serves() {
            self.dispatch(out);
            self.widen_when_idle(now, out);
            self.wish_for_work(out);
        }
        self.sweep(now, out);
        if self.version != version {
            self.version_at = now;
        }
        let new = &out[given_before..];
        self.tasks += new.iter().filter(|action| matches!(action, PeerAction::Compute(_))).count();
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        (self.status != Status::Over).then_some(self.sweep_at)
    }

    /// Steps whose commit it took in: the version of the weights.
    #[must_use]
    pub fn version(&self) -> Step {
        self.version
    }

    /// What the peer holds now.
    #[must_use]
    pub fn load(&self) -> PeerLoad {
        let by_stage = |count: fn(&Hosted) -> usize| {
            self.stages.iter().map(|(stage, hosted)| (*stage, count(hosted))).collect()
        };
        PeerLoad {
            accepted: by_stage(Hosted::accepted),
            waiting: by_stage(|hosted| hosted.offers.len()),
            window: by_stage(|hosted| hosted.window),
            computing: self.tasks,
            in_flight: self.in_flight,
            logged: self.logged,
            rounds: self.rounds.values().chain(&self.ended).map(Reduction::held).sum::<Bytes>()
                + self.early.parts(),
            heard: self.heard_bytes(),
        }
    }

    /// Whether it takes part: a newcomer without weights does not.
    fn serves(&self) -> bool {
        self.status == Status::Member && self.newcomer.is_none()
    }

    fn heard(&mut self, now: Moment, from: Member, message: PeerMessage, out: &mut Out) {
        if !self.is_known(now, from) {
            return;
        }
        match message {
            PeerMessage::Offer { key, retry, .. } => {
                self.offered(now, Waiting { from, retry }, key, out);
            }
            PeerMessage::Accepted { key, service_time } => {
                self.accepted(now, from, key, service_time, out)
            }
            PeerMessage::Busy { key, service_time } => {
                self.turned_away(now, from, key, service_time, out)
            }
            PeerMessage::HeldBy { key, holder } => self.redirected(now, from, key, holder, out),
            PeerMessage::Free { stage } => self.freed(now, from, stage, out),
            PeerMessage::Withdrawn { key } => self.withdrawn(now, from, key, out),
            PeerMessage::Evaluated { key } => self.answered_evaluated(now, key, out),
        }
    }

    fn received(
        &mut self,
        now: Moment,
        from: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) {
        match tag {
            TensorTag::Activation { key } => self.activation(now, key, payload, out),
            TensorTag::ActivationGradient { key } => self.gradient(now, key, payload, out),
            TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => {
                self.round_piece(now, from, tag, payload, out);
            }
        }
    }

    /// Says again what has gone without an answer for too long.
    fn sweep(&mut self, now: Moment, out: &mut Out) {
        if self.status == Status::Over || now < self.sweep_at {
            return;
        }
        self.sweep_at = now + self.config.limits.retry;
        match self.status {
            Status::Joining => self.register(out),
            Status::Member => {
                self.repeat_want_of_view(now, out);
                self.repeat_round_group_requests(now, out);
                self.repeat_reports(now, out);
                self.retry_blocked(now, out);
                self.retry_offers(now, out);
                self.repeat_outcomes(out);
                self.give_up_lost_results(now, out);
                self.give_up_lost_result_there(now, out);
                self.repeat_readiness(out);
                self.complain(out);
                self.forget_strangers(now, out);
                if now.since(self.heard_at) >= self.config.limits.retry * SILENCE {
                    out.push(PeerAction::ToCoordinator(ToCoordinator::KeepAlive));
                }
                if self.serves() {
                    self.wish = None;
                    self.wish_for_work(out);
                }
            }
            Status::Over => {}
        }
    }

    fn register(&self, out: &mut Out) {
        let candidate = self.config.candidate.clone();
        out.push(PeerAction::ToCoordinator(ToCoordinator::Register(candidate)));
    }

    /// Takes no further part, and lets go of everything.
    fn end(&mut self, event: PeerEvent, out: &mut Out) {
        self.drop_jobs_through(Step(u64::MAX), out);
        self.early.drop_through(Era(u32::MAX), Step(u64::MAX), out);
        self.moving = None;
        self.stop_listening(out);
        self.abort_rounds(out);
        self.status = Status::Over;
        out.push(PeerAction::Event(event));
    }

    /// Something is wrong with this peer's own state: it leaves rather than spoil the run.
    fn leave(&mut self, fault: Fault, out: &mut Out) {
        let reason = fault.to_string();
        out.push(PeerAction::Event(PeerEvent::Fault(fault)));
        out.push(PeerAction::ToCoordinator(ToCoordinator::Leave));
        self.end(PeerEvent::Stopped { reason }, out);
    }

    fn nonsense(from: Member, what: &'static str, out: &mut Out) {
        out.push(PeerAction::Event(PeerEvent::Fault(Fault::Nonsense { from, what })));
    }

    /// Whether this peer hosts the last stage of the run at `key`.
    fn is_last(&self, key: ClaimKey) -> bool {
        key.stage == self.config.manifest.last_stage()
    }

    /// Whether there will be no backward pass.
    fn is_held_out(&self, key: ClaimKey) -> bool {
        key.microbatch.0 >= self.config.manifest.training.microbatches
    }

    /// Nanoseconds that the engine needs for one microbatch of each hosted stage, which it works on
    /// in turn; 0 while one is not measured.
    fn service_time(&self) -> u64 {
        let service_times = self.stages.values().map(|hosted| hosted.service_time.nanoseconds());
        service_times.sum::<Option<u64>>().unwrap_or(0)
    }
}
