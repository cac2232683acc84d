//! One peer's decisions.
//!
//! [`Peer`] hands each input to the component that it concerns, and the component's results to the next
//! one. Each component owns its state:
//!
//! | component | state |
//! |---|---|
//! | `contact` | the coordinator and its term |
//! | `membership` | the members, and those that left or are unreachable |
//! | `links` | estimates of the links to other peers |
//! | `pipeline` | the hosted stages, their microbatches and the queue of the engine's passes |
//! | `audits` | work of others that this peer computes again |
//! | `weights` | rounds, queued commits, the start of a newcomer, the migration to another stage, snapshots |
//!
//! A component reads the state of others through a `context::Context`. `inputs` has the hand-over of
//! messages and results, `progress` that of weights from step to step, `senders` what the sender of a
//! message must be.

mod audits;
mod config;
mod contact;
mod context;
mod inputs;
mod links;
mod membership;
mod pipeline;
mod progress;
mod senders;
#[cfg(test)]
mod tests;
mod weights;

pub use config::{PeerConfig, PeerLimits};

pub use crate::round::RoundCut;
use shoal_protocol::ids::{Member, Step, WeightGroup};
use shoal_protocol::message::{ToCoordinator, View};
use shoal_protocol::units::Moment;

use self::audits::Audits;
use self::contact::CoordinatorContact;
use self::context::Position;
use self::links::LinkEstimates;
use self::membership::Membership;
use self::pipeline::Pipeline;
use self::weights::Weights;
use crate::action::{Fault, PeerAction, PeerEvent, PeerInput, PeerLoad};

/// Retry intervals of silence after which this peer reports its presence to the coordinator.
const SILENCE: u32 = 4;

/// One peer's decisions: its part in every microbatch that passes through it, and in rounds and commits.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
    status: Status,
    /// The peer leaves as soon as no counted work depends on it.
    is_draining: bool,
    /// The version that is saved before it leaves, and when that is not waited for any more.
    saving: Option<(Step, Moment)>,
    position: Position,
    contact: CoordinatorContact,
    membership: Membership,
    links: LinkEstimates,
    pipeline: Pipeline,
    weights: Weights,
    audits: Audits,
    /// Tasks that the engine has.
    tasks: usize,
    /// The time of the next repetition of unanswered messages.
    retry_at: Moment,
}

/// The peer's part in the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// It asked for admission.
    Joining,
    Member,
    /// The run is over, at least for this peer.
    Over,
}

/// The actions that follow from one input.
type Out = Vec<PeerAction>;

/// The context of a peer's components. A macro, so that it borrows only the fields that it reads.
macro_rules! context_of {
    ($peer:expr, $now:expr) => {
        $crate::peer::context::Context {
            now: $now,
            config: &$peer.config,
            view: $peer.membership.view(),
            links: &$peer.links,
            position: $peer.position,
            target: $peer.weights.target(),
            status: $peer.status,
            is_serving: $peer.status == $crate::peer::Status::Member
                && !$peer.weights.is_newcomer(),
            is_draining: $peer.is_draining,
        }
    };
}
use context_of;

impl Peer {
    /// A peer that is not a member yet.
    #[must_use]
    pub fn new(config: PeerConfig) -> Self {
        let pipeline = Pipeline::new(&config);
        Self {
            config,
            status: Status::Joining,
            is_draining: false,
            saving: None,
            position: Position::default(),
            contact: CoordinatorContact::default(),
            membership: Membership::default(),
            links: LinkEstimates::default(),
            pipeline,
            weights: Weights::default(),
            audits: Audits::default(),
            tasks: 0,
            retry_at: Moment::default(),
        }
    }

    /// Asks for admission. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<PeerAction>) {
        self.retry_at = now + self.config.limits.retry;
        self.register(out);
    }

    /// Handles an input and appends the actions that follow from it to `out`, in order.
    pub fn handle(&mut self, now: Moment, input: PeerInput, out: &mut Vec<PeerAction>) {
        let given_before = out.len();
        let version = self.position.version;
        if matches!(input, PeerInput::Done { .. }) {
            self.tasks = self.tasks.saturating_sub(1);
        }
        if self.status == Status::Over {
            return self.release_input(now, input, out);
        }
        self.handle_input(now, input, out);
        if self.is_serving() {
            let ctx = context_of!(self, now);
            self.audits.advance(&ctx, (&self.pipeline, &self.weights), out);
            // The sums are those of audited work meanwhile.
            if !self.audits.are_busy() {
                self.pipeline.dispatch(&ctx, out);
            }
            self.pipeline.widen_when_idle(&ctx, out);
            self.pipeline.request_work(&ctx, out);
        }
        self.retry(now, out);
        if self.position.version != version {
            self.position.version_at = now;
        }
        let new = &out[given_before..];
        self.tasks += new.iter().filter(|action| matches!(action, PeerAction::Compute(_))).count();
    }

    /// The time at which a `Tick` is due, if there is no other input before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        // No pass begins meanwhile.
        let waits = self.is_serving() && !self.audits.are_busy();
        let wait = self.pipeline.wait_ends_at().filter(|_| waits);
        let saved = self.saving.map(|(_, at)| at);
        let due = wait.into_iter().chain(saved).fold(self.retry_at, Moment::min);
        (self.status != Status::Over).then_some(due)
    }

    /// The version of the weights: the number of steps whose commits this peer handled.
    #[must_use]
    pub fn version(&self) -> Step {
        self.position.version
    }

    /// The members of the run as this peer knows them.
    #[must_use]
    pub fn view(&self) -> &View {
        self.membership.view()
    }

    /// The resources that the peer holds.
    #[must_use]
    pub fn load(&self) -> PeerLoad {
        let (pipeline, weights) = (self.pipeline.load(), self.weights.load());
        PeerLoad {
            in_flight: pipeline.in_flight + self.audits.held(),
            computing: self.tasks,
            rounds: weights.rounds,
            heard: weights.heard,
            ..pipeline
        }
    }

    /// Whether this peer hosts a stage, migrates to it, or has no assignment yet.
    pub(crate) fn may_host(&self, weights: WeightGroup) -> bool {
        context_of!(self, Moment::default()).may_host(weights)
    }

    /// Whether the peer is a member with the current weights.
    fn is_serving(&self) -> bool {
        self.status == Status::Member && !self.weights.is_newcomer()
    }

    /// Repeats messages without an answer once the retry interval is over.
    fn retry(&mut self, now: Moment, out: &mut Out) {
        if self.status == Status::Over || now < self.retry_at {
            return;
        }
        self.retry_at = now + self.config.limits.retry;
        match self.status {
            Status::Joining => self.register(out),
            Status::Member => self.retry_as_member(now, out),
            Status::Over => {}
        }
    }

    fn retry_as_member(&mut self, now: Moment, out: &mut Out) {
        let retry = self.config.limits.retry;
        self.membership.repeat_request(now, retry, out);
        let ctx = context_of!(self, now);
        self.weights.repeat_group_requests(&ctx, out);
        self.pipeline.retry(&ctx, out);
        self.audits.repeat(&ctx, out);
        self.pipeline.repeat_acceptances(&ctx, out);
        self.weights.retry(&ctx, out);
        self.membership.repeat_unreachable(self.contact.current(), out);
        if self.contact.is_silent_for(now, retry * SILENCE) {
            out.push(PeerAction::ToCoordinator(ToCoordinator::KeepAlive));
        }
        if self.is_serving() {
            self.pipeline.repeat_work_request(&context_of!(self, now), out);
        }
    }

    fn register(&self, out: &mut Out) {
        let candidate = self.config.candidate.clone();
        out.push(PeerAction::ToCoordinator(ToCoordinator::Register(candidate)));
    }

    /// Ends the peer's part in the run and releases everything.
    fn end(&mut self, now: Moment, event: PeerEvent, out: &mut Out) {
        self.audits.abandon_all(out);
        self.pipeline.drop_through(&context_of!(self, now), Step(u64::MAX), out);
        self.weights.end(out);
        self.status = Status::Over;
        out.push(PeerAction::Event(event));
    }

    /// Leaves the run, since this peer's own state is faulty.
    fn leave(&mut self, now: Moment, fault: Fault, out: &mut Out) {
        let reason = fault.to_string();
        out.push(PeerAction::Event(PeerEvent::Fault(fault)));
        out.push(PeerAction::ToCoordinator(ToCoordinator::Leave));
        self.end(now, PeerEvent::Stopped { reason }, out);
    }
}

/// Reports a message whose sender is not what it must be for it.
fn report_unentitled(from: Member, what: &'static str, out: &mut Out) {
    out.push(PeerAction::Event(PeerEvent::Unentitled { from, what }));
}

/// Reports a message that no correct member sends.
fn report_invalid(from: Member, what: &'static str, out: &mut Out) {
    out.push(PeerAction::Event(PeerEvent::Fault(Fault::UnexpectedMessage { from, what })));
}
