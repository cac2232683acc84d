//! The actions of a peer: windows, backpressure, claims and repetitions.

mod downstream;
mod exchanges;
mod lifecycle;
mod senders;
mod upstream;

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{
    Attempt, ClaimKey, ContentHash, Era, Exchange, Grant, Incarnation, Member, Microbatch, PeerId,
    Stage, StageSpan, Step, Term,
};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{
    Candidate, CommitRecord, Duties, FixedLoss, Followed, FromCoordinator, MemberRecord, Move,
    MoveReason, PassTimes, PeerMessage, RoundOutcome, SnapshotPart, StageChoice, StageRoom,
    StoredStage, TensorTag, ToCoordinator, ViewChange,
};
use shoal_protocol::units::{Bytes, Moment};

use super::{Peer, PeerConfig, PeerLimits};
use crate::action::{
    DeviceIndex, Payload, PayloadId, PeerAction, PeerEvent, PeerInput, Task, TaskResult,
};
use crate::office::InOffice;
use crate::router::Routing;
use crate::sim::{HashKeys, Scenario};

const COORDINATOR: u8 = 100;
const ME: u8 = 0;

const FIRST: Exchange = Exchange(0);

fn grant_number(number: u64) -> Grant {
    Grant { term: Term(1), number }
}

fn member(number: u8) -> Member {
    Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
}

/// A peer under test.
struct Probe {
    peer: Peer,
    now: Moment,
}

impl Probe {
    /// A replica of one of two stages, in a run of eight microbatches. Members 1 and 2 host the other
    /// stage.
    fn at(stage: u16, change: impl FnOnce(&mut PeerLimits)) -> (Self, Vec<PeerAction>) {
        let mut limits = PeerLimits::default();
        change(&mut limits);
        Self::hosting(StageSpan::one(Stage(stage)), 1 - stage, limits)
    }

    /// A member of that run that hosts a span with one device. Members 1 and 2 host the stage `others`.
    fn hosting(span: StageSpan, others: u16, limits: PeerLimits) -> (Self, Vec<PeerAction>) {
        Self::with_devices(NonZeroU16::MIN, span, others, limits)
    }

    fn with_devices(
        devices: NonZeroU16,
        span: StageSpan,
        others: u16,
        limits: PeerLimits,
    ) -> (Self, Vec<PeerAction>) {
        Self::of_run(Scenario::small_manifest(2, 8, 3), devices, (span, others), limits)
    }

    fn of_run(
        manifest: Manifest,
        devices: NonZeroU16,
        hosted: (StageSpan, u16),
        limits: PeerLimits,
    ) -> (Self, Vec<PeerAction>) {
        Self::with_division(manifest, (devices, false), hosted, limits)
    }

    /// A member whose devices may divide the stages.
    fn with_division(
        manifest: Manifest,
        (devices, divides_stages): (NonZeroU16, bool),
        (span, others): (StageSpan, u16),
        limits: PeerLimits,
    ) -> (Self, Vec<PeerAction>) {
        let manifest = Arc::new(manifest);
        let sealer = HashKeys(member(ME).peer).sealer(&manifest);
        let config = PeerConfig {
            me: member(ME),
            saving: Duration::from_secs(25),
            parameters: manifest.weight_groups().map(|weights| (weights, 4)).collect(),
            manifest,
            candidate: Candidate {
                link_estimates: None,
                choice: if span.is_empty() { StageChoice::None } else { StageChoice::Span(span) },
                fits: span.stages().collect(),
                addresses: Vec::new(),
                fingerprint: Some(ContentHash([0; 32])),
                duties: Duties::default(),
                devices,
                devices_per_pass: NonZeroU16::MIN,
                room: StageRoom::NONE,
                longest: 1,
                price: None,
                island: None,
                name: None,
            },
            limits,
            seed: 0,
            sealer,
            routing: Routing::default(),
            divides_stages,
        };
        let mut probe = Self { peer: Peer::new(config), now: Moment::default() };
        probe.peer.start(probe.now, &mut Vec::new());
        let record =
            |number, span| MemberRecord { devices, ..MemberRecord::plain(member(number), span) };
        let other = StageSpan::one(Stage(others));
        let members = vec![record(ME, span), record(1, other), record(2, other)];
        let here = members.into_iter().map(Arc::new).collect();
        probe.receive_from_coordinator(FromCoordinator::View(ViewChange {
            number: 1,
            here,
            ..ViewChange::default()
        }));
        let admitted = probe.receive_from_coordinator(FromCoordinator::Admitted {
            era: Era(0),
            span,
            version: Step(0),
        });
        (probe, admitted)
    }

    /// Sends a view in which this peer moves from the second stage to the first.
    fn assign_move(&mut self, number: u64, at: Option<Step>) -> Vec<PeerAction> {
        let moves =
            Move { to: StageSpan::one(Stage(0)), era: Era(0), at, reason: MoveReason::Uneven };
        let record = self.peer.view().record(member(ME)).expect("it is listed").clone();
        let here = vec![Arc::new(MemberRecord { moves: Some(moves), ..record })];
        let change = ViewChange { since: number - 1, number, here, ..ViewChange::default() };
        self.receive_from_coordinator(FromCoordinator::View(change))
    }

    fn input(&mut self, input: PeerInput) -> Vec<PeerAction> {
        let mut out = Vec::new();
        self.peer.handle(self.now, input, &mut out);
        out
    }

    fn receive_from_coordinator(&mut self, message: FromCoordinator) -> Vec<PeerAction> {
        let from = InOffice::unchecked(member(COORDINATOR));
        self.input(PeerInput::FromCoordinator { from, message })
    }

    fn receive_from(&mut self, from: u8, message: PeerMessage) -> Vec<PeerAction> {
        self.input(PeerInput::PeerMessage { from: member(from), message })
    }

    fn tensor(&mut self, from: u8, tag: TensorTag, id: u64) -> Vec<PeerAction> {
        self.input(PeerInput::Tensor { from: member(from), tag, payload: payload(id) })
    }

    fn done(&mut self, result: TaskResult) -> Vec<PeerAction> {
        self.input(PeerInput::Done { result, busy: Duration::from_millis(1) })
    }

    fn hand_out(&mut self, microbatches: std::ops::Range<u32>) -> Vec<PeerAction> {
        let grants = microbatches.map(|m| (Microbatch(m), grant(m))).collect();
        self.receive_from_coordinator(FromCoordinator::Work { step: Step(0), grants })
    }

    fn offer(&mut self, from: u8, microbatch: u32) -> Vec<PeerAction> {
        let (key, size, retry) = (key(1, microbatch), Bytes(64), false);
        self.receive_from(from, PeerMessage::Offer { key, size, retry })
    }

    /// Takes one microbatch of the last stage through both passes. Returns the actions that follow the end
    /// of the backward pass.
    fn complete(&mut self, microbatch: u32) -> Vec<PeerAction> {
        self.complete_all_but(microbatch, false)
    }

    /// The same; the backward pass may leave products to the addition of its gradient.
    fn complete_all_but(&mut self, microbatch: u32, leaves: bool) -> Vec<PeerAction> {
        let key = key(1, microbatch);
        self.tensor(1, TensorTag::Activation { key, exchange: FIRST }, u64::from(microbatch));
        let next_holder = None;
        self.receive_from_coordinator(FromCoordinator::Granted {
            key,
            grant: grant(microbatch),
            next_holder,
        });
        self.done(TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss::new(7, 1)) });
        let gradient = Some(payload(100 + u64::from(microbatch)));
        self.done(TaskResult::Returned { key, gradient, leaves })
    }
}

fn key(stage: u16, microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(stage), microbatch: Microbatch(microbatch) }
}

fn grant(microbatch: u32) -> Grant {
    grant_number(u64::from(microbatch) + 1)
}

fn payload(id: u64) -> Payload {
    Payload { id: PayloadId(id), size: Bytes(32), hash: None, seal: None }
}

/// A request for work of the first step, and for a whole window of each of the next two.
fn work_request(room: u32, window: u32, through: u64) -> PeerAction {
    let through = if through == 0 { Grant::default() } else { grant_number(through) };
    let rooms = [(Step(0), room), (Step(1), window), (Step(2), window)];
    let rooms = rooms.into_iter().filter(|(_, room)| *room > 0).collect();
    PeerAction::ToCoordinator(ToCoordinator::WorkRequest { rooms, through, service_time: 0 })
}

fn send(to: u8, message: PeerMessage) -> PeerAction {
    PeerAction::Send { to: member(to), message }
}

fn accepted(to: u8, microbatch: u32) -> PeerAction {
    send(to, PeerMessage::Accepted { key: key(1, microbatch), wanted: FIRST, service_time: 0 })
}

fn claim(microbatch: u32) -> PeerAction {
    PeerAction::ToCoordinator(ToCoordinator::Claim { key: key(1, microbatch) })
}

fn done(key: ClaimKey, grant: Grant, loss: Option<FixedLoss>) -> PeerAction {
    PeerAction::ToCoordinator(ToCoordinator::Done {
        key,
        grant,
        loss,
        pass_times: PassTimes::default(),
        handover: Box::default(),
    })
}

/// The receivers of offers, each with the offered work.
fn offered(actions: &[PeerAction]) -> Vec<(Member, ClaimKey)> {
    let offer = |action: &PeerAction| match action {
        PeerAction::Send { to, message: PeerMessage::Offer { key, .. } } => Some((*to, *key)),
        _ => None,
    };
    actions.iter().filter_map(offer).collect()
}
