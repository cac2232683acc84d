//! What a peer does, action by action: windows, backpressure, claims, repeats.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{
    Attempt, ClaimKey, ContentHash, Era, Grant, Incarnation, Member, Microbatch, PeerId, Stage,
    StageSpan, Step, Term,
};
use shoal_protocol::message::{
    Candidate, CommitRecord, Duties, FixedLoss, FromCoordinator, MemberRecord, Move, MoveReason,
    PassTimes, PeerMessage, RoundOutcome, SnapshotPart, StageChoice, StoredStage, TensorTag,
    ToCoordinator, ViewChange,
};

use super::{Peer, PeerConfig, PeerLimits};
use crate::action::{Payload, PayloadId, PeerAction, PeerEvent, PeerInput, Task, TaskResult};
use crate::router::Routing;
use crate::sim::Scenario;
use shoal_protocol::units::{Bytes, Moment};

const COORDINATOR: u8 = 100;
const ME: u8 = 0;

fn nth(number: u64) -> Grant {
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
    /// A replica of a stage of a run of two stages and eight microbatches, with the other stage at
    /// members 1 and 2.
    fn at(stage: u16, change: impl FnOnce(&mut PeerLimits)) -> (Self, Vec<PeerAction>) {
        let mut limits = PeerLimits::default();
        change(&mut limits);
        Self::hosting(StageSpan::one(Stage(stage)), 1 - stage, limits)
    }

    /// A member of that run that hosts a span, with a stage at members 1 and 2.
    fn hosting(span: StageSpan, others: u16, limits: PeerLimits) -> (Self, Vec<PeerAction>) {
        let manifest = Arc::new(Scenario::small_manifest(2, 8, 3));
        let config = PeerConfig {
            me: member(ME),
            parameters: manifest.stages().map(|stage| (stage, 4)).collect(),
            manifest,
            candidate: Candidate {
                link_estimates: None,
                choice: if span.is_empty() {
                    StageChoice::None
                } else {
                    StageChoice::One(span.first)
                },
                fits: span.stages().collect(),
                addresses: Vec::new(),
                fingerprint: Some(ContentHash([0; 32])),
                duties: Duties::default(),
                mobile: false,
            },
            limits,
            seed: 0,
            routing: Routing::default(),
        };
        let mut probe = Self { peer: Peer::new(config), now: Moment::default() };
        probe.peer.start(probe.now, &mut Vec::new());
        let record = |number, span| MemberRecord {
            member: member(number),
            span,
            addresses: Vec::new(),
            serving: true,
            duties: Duties::default(),
            mobile: false,
            moves: None,
        };
        let other = StageSpan::one(Stage(others));
        let members = vec![record(ME, span), record(1, other), record(2, other)];
        let here = members.into_iter().map(Arc::new).collect();
        probe.tell(FromCoordinator::View(ViewChange { number: 1, here, ..ViewChange::default() }));
        let admitted =
            probe.tell(FromCoordinator::Admitted { era: Era(0), span, version: Step(0) });
        (probe, admitted)
    }

    /// Another membership, in which this peer is on its way from the second stage to the first.
    fn is_to_move(&mut self, number: u64, at: Option<Step>) -> Vec<PeerAction> {
        let moves = Move { to: Stage(0), era: Era(0), at, reason: MoveReason::Uneven };
        let record = self.peer.view().record(member(ME)).expect("it is listed").clone();
        let here = vec![Arc::new(MemberRecord { moves: Some(moves), ..record })];
        let change = ViewChange { since: number - 1, number, here, ..ViewChange::default() };
        self.tell(FromCoordinator::View(change))
    }

    fn input(&mut self, input: PeerInput) -> Vec<PeerAction> {
        let mut out = Vec::new();
        self.peer.handle(self.now, input, &mut out);
        out
    }

    fn tell(&mut self, message: FromCoordinator) -> Vec<PeerAction> {
        self.input(PeerInput::FromCoordinator { from: member(COORDINATOR), message })
    }

    fn hear(&mut self, from: u8, message: PeerMessage) -> Vec<PeerAction> {
        self.input(PeerInput::PeerMessage { from: member(from), message })
    }

    fn tensor(&mut self, from: u8, tag: TensorTag, id: u64) -> Vec<PeerAction> {
        self.input(PeerInput::Tensor { from: member(from), tag, payload: payload(id) })
    }

    fn done(&mut self, result: TaskResult) -> Vec<PeerAction> {
        self.input(PeerInput::Done { result, busy: Duration::from_millis(1) })
    }

    fn give(&mut self, microbatches: std::ops::Range<u32>) -> Vec<PeerAction> {
        let grants = microbatches.map(|m| (Microbatch(m), grant(m))).collect();
        self.tell(FromCoordinator::Work { step: Step(0), grants })
    }

    fn offer(&mut self, from: u8, microbatch: u32) -> Vec<PeerAction> {
        let (key, size, retry) = (key(1, microbatch), Bytes(64), false);
        self.hear(from, PeerMessage::Offer { key, size, retry })
    }

    /// Takes one microbatch of the last stage through both passes; returns what the end of the
    /// backward pass leads to.
    fn complete(&mut self, microbatch: u32) -> Vec<PeerAction> {
        let key = key(1, microbatch);
        self.tensor(1, TensorTag::Activation { key }, u64::from(microbatch));
        let next_holder = None;
        self.tell(FromCoordinator::Granted { key, grant: grant(microbatch), next_holder });
        self.done(TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss(7)) });
        let gradient = Some(payload(100 + u64::from(microbatch)));
        self.done(TaskResult::Returned { key, gradient })
    }
}

fn key(stage: u16, microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(stage), microbatch: Microbatch(microbatch) }
}

fn grant(microbatch: u32) -> Grant {
    nth(u64::from(microbatch) + 1)
}

fn payload(id: u64) -> Payload {
    Payload { id: PayloadId(id), size: Bytes(32) }
}

/// A wish for so much of the first step, and a whole window of each of the next two.
fn wanted(room: u32, window: u32, through: u64) -> PeerAction {
    let through = if through == 0 { Grant::default() } else { nth(through) };
    let rooms = [(Step(0), room), (Step(1), window), (Step(2), window)];
    let rooms = rooms.into_iter().filter(|(_, room)| *room > 0).collect();
    PeerAction::ToCoordinator(ToCoordinator::WorkRequest { rooms, through, service_time: 0 })
}

fn send(to: u8, message: PeerMessage) -> PeerAction {
    PeerAction::Send { to: member(to), message }
}

fn accepted(to: u8, microbatch: u32) -> PeerAction {
    send(to, PeerMessage::Accepted { key: key(1, microbatch), service_time: 0 })
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
    })
}

/// To whom a microbatch is offered.
fn offered(actions: &[PeerAction]) -> Vec<(Member, ClaimKey)> {
    let offer = |action: &PeerAction| match action {
        PeerAction::Send { to, message: PeerMessage::Offer { key, .. } } => Some((*to, *key)),
        _ => None,
    };
    actions.iter().filter_map(offer).collect()
}

#[test]
fn who_hosts_nothing_follows_every_commit() {
    let (mut watcher, _) = Probe::hosting(StageSpan::none(), 1, PeerLimits::default());
    // More than are ever applied at once.
    for step in (0..2000).map(Step) {
        let outcome = RoundOutcome { hash: ContentHash([5; 32]), square_norm: 1.0, proof: 0 };
        let record = CommitRecord {
            era: Era(0),
            term: Term(1),
            step,
            stages: vec![(Attempt(0), outcome); 2],
            gradient_norm: 1.0,
            loss: FixedLoss(1),
            held_out_loss: None,
        };
        let actions = watcher.tell(FromCoordinator::Commit(record.clone()));
        assert!(actions.contains(&PeerAction::Event(PeerEvent::Applied { record })), "{actions:?}");
        assert_eq!(watcher.peer.version(), step.next());
    }
}

#[test]
fn the_first_stage_wishes_for_a_window_of_work_and_offers_it_onward_at_once() {
    let (mut probe, admitted) = Probe::at(0, |_| {});
    let span = StageSpan::one(Stage(0));
    let serving = PeerEvent::Serving { version: Step(0) };
    let events = [PeerEvent::Admitted { span }, serving].map(PeerAction::Event);
    assert_eq!(admitted, [&events[..], &[wanted(5, 5, 0)]].concat());
    let actions = probe.give(0..2);
    let keys: Vec<ClaimKey> = offered(&actions).into_iter().map(|(_, key)| key).collect();
    assert_eq!(keys, [key(1, 0), key(1, 1)]);
    let to: BTreeSet<Member> = offered(&actions).into_iter().map(|(to, _)| to).collect();
    assert_eq!(to, BTreeSet::from([member(1), member(2)]), "each replica gets its turn");
    let forward = |microbatch| {
        let task = Task::Forward { key: key(0, microbatch), activation: None, held_out: false };
        PeerAction::Compute(task)
    };
    assert_eq!(actions[2..], [forward(0), forward(1), wanted(3, 5, 2)]);
    assert_eq!(probe.give(0..2), [], "work said twice is one work");
}

#[test]
fn an_activation_is_sent_once_when_it_is_both_accepted_and_computed() {
    for accepted_first in [true, false] {
        let (mut probe, _) = Probe::at(0, |_| {});
        let (to, _) = offered(&probe.give(0..1))[0];
        let from = to.peer.0[0];
        let accept = PeerMessage::Accepted { key: key(1, 0), service_time: 0 };
        let result = TaskResult::Forwarded { key: key(0, 0), output: Some(payload(9)), loss: None };
        let last = if accepted_first {
            assert_eq!(probe.hear(from, accept.clone()), []);
            probe.done(result)
        } else {
            probe.done(result);
            probe.hear(from, accept.clone())
        };
        let tag = TensorTag::Activation { key: key(1, 0) };
        assert_eq!(last, [PeerAction::SendTensor { to, tag, payload: PayloadId(9) }]);
        assert_eq!(probe.hear(from, accept), [], "an acceptance said twice sends nothing");
        assert_eq!(probe.peer.load().logged, Bytes(32));
    }
}

#[test]
fn offers_are_taken_up_to_the_window_then_queued_then_answered_busy() {
    let (mut probe, _) = Probe::at(1, |limits| {
        limits.largest_window = 1;
        limits.offers = 1;
    });
    assert_eq!(probe.offer(1, 3), [accepted(1, 3), claim(3)]);
    assert_eq!(probe.offer(1, 3), [accepted(1, 3)], "an offer said twice is answered twice");
    assert_eq!(probe.offer(1, 5), []);
    assert_eq!(probe.offer(2, 6), [send(2, PeerMessage::Busy { key: key(1, 6), service_time: 0 })]);
    // An older microbatch goes ahead in the queue, and who loses its place is told.
    assert_eq!(probe.offer(2, 4), [send(1, PeerMessage::Busy { key: key(1, 5), service_time: 0 })]);
    let load = probe.peer.load();
    assert_eq!((load.accepted[&Stage(1)], load.waiting[&Stage(1)]), (1, 1));
}

#[test]
fn room_comes_back_with_the_gradient_and_those_turned_away_hear_of_it() {
    let (mut probe, _) = Probe::at(1, |limits| {
        limits.largest_window = 1;
        limits.offers = 1;
    });
    for (from, microbatch) in [(1, 0), (2, 1), (1, 2)] {
        probe.offer(from, microbatch);
    }
    let actions = probe.complete(0);
    let tag = TensorTag::ActivationGradient { key: key(0, 0) };
    let service_time = 2_000_000;
    let expected = [
        PeerAction::Compute(Task::Accumulate { key: key(1, 0) }),
        PeerAction::SendTensor { to: member(1), tag, payload: PayloadId(100) },
        send(2, PeerMessage::Accepted { key: key(1, 1), service_time }),
        claim(1),
        send(1, PeerMessage::Free { stage: Stage(1) }),
    ];
    assert_eq!(actions, expected);
}

#[test]
fn nothing_is_counted_without_its_claim_and_a_report_repeats_until_it_is_noted() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let key = key(1, 0);
    probe.tensor(1, TensorTag::Activation { key }, 1);
    let forwarded = TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss(7)) };
    assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(1))]);
    let granted = FromCoordinator::Granted { key, grant: grant(0), next_holder: None };
    let backward = PeerAction::Compute(Task::Backward { key, gradient: None });
    assert_eq!(probe.tell(granted.clone()), [backward]);
    assert_eq!(probe.tell(granted), []);
    probe.done(TaskResult::Returned { key, gradient: Some(payload(2)) });
    let report = done(key, grant(0), Some(FixedLoss(7)));
    let counted = PeerAction::Event(PeerEvent::Counted { key });
    assert_eq!(probe.done(TaskResult::Accumulated { key }), [counted, report.clone()]);
    probe.now = probe.peer.next_timeout().expect("it waits for an answer");
    assert_eq!(probe.input(PeerInput::Tick), [report]);
    probe.tell(FromCoordinator::Noted { key, grant: grant(0) });
    probe.now = probe.peer.next_timeout().expect("it goes on");
    assert_eq!(probe.input(PeerInput::Tick), []);
}

#[test]
fn backward_goes_before_forward_and_few_passes_wait_in_the_engine() {
    let (mut probe, _) = Probe::at(1, |limits| limits.first_window = 8);
    let passes = |actions: &[PeerAction]| -> Vec<(bool, u32)> {
        let pass = |action: &PeerAction| match action {
            PeerAction::Compute(Task::Forward { key, .. }) => Some((true, key.microbatch.0)),
            PeerAction::Compute(Task::Backward { key, .. }) => Some((false, key.microbatch.0)),
            _ => None,
        };
        actions.iter().filter_map(pass).collect()
    };
    let next_holder = None;
    for microbatch in 0..4 {
        probe.offer(1, microbatch);
        let key = key(1, microbatch);
        // The last stage turns round at once, where it knows that it may.
        if microbatch > 0 {
            probe.tell(FromCoordinator::Granted { key, grant: grant(microbatch), next_holder });
        }
        let given = probe.tensor(1, TensorTag::Activation { key }, u64::from(microbatch));
        let expected: &[(bool, u32)] = match microbatch {
            0 => &[(true, 0)],
            1 => &[(true, 1), (false, 1)],
            _ => &[],
        };
        assert_eq!(passes(&given), expected);
    }
    let forwarded = |microbatch| TaskResult::Forwarded {
        key: key(1, microbatch),
        output: None,
        loss: Some(FixedLoss(1)),
    };
    assert_eq!(passes(&probe.done(forwarded(0))), [], "two passes wait, and a claim");
    probe.tell(FromCoordinator::Granted { key: key(1, 0), grant: grant(0), next_holder });
    assert_eq!(passes(&probe.done(forwarded(1))), [(false, 0)], "before what is new");
    let returned = TaskResult::Returned { key: key(1, 1), gradient: Some(payload(9)) };
    assert_eq!(passes(&probe.done(returned)), [(true, 2), (false, 2)]);
}

#[test]
fn late_work_is_let_go_of_when_asked_and_what_is_not_late_is_kept() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let (key, grant) = (key(1, 0), grant(0));
    let second = Duration::from_secs(1);
    let patience = PassTimes { forward: second, backward: second };
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    assert_eq!(probe.tell(reclaim), [released], "it does not know of it");
    let late_grant = FromCoordinator::Granted { key, grant, next_holder: None };
    probe.offer(1, 0);
    assert_eq!(probe.tell(late_grant), [], "what was let go of stays let go of");

    let grant = nth(9);
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    probe.tell(FromCoordinator::Granted { key, grant, next_holder: None });
    let begin = probe.now;
    probe.now = begin + second;
    assert_eq!(probe.tell(reclaim.clone())[0], working, "its input is not there");
    probe.tensor(1, TensorTag::Activation { key }, 1);
    probe.now = begin + second + second / 2;
    assert_eq!(probe.tell(reclaim.clone()), [working], "the pass began only now");
    probe.now = begin + second * 2;
    let let_go = probe.tell(reclaim);
    let busy = send(1, PeerMessage::Busy { key, service_time: 0 });
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    let discard = PeerAction::Compute(Task::Discard { key });
    assert_eq!(let_go[..3], [busy, released, discard], "{let_go:?}");
}

#[test]
fn what_is_done_is_never_late() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    probe.complete(0);
    let (key, grant) = (key(1, 0), grant(0));
    probe.done(TaskResult::Accumulated { key });
    let reclaim = FromCoordinator::Reclaim { key, grant, patience: PassTimes::default() };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    assert_eq!(probe.tell(reclaim), [working], "its report is on its way");
}

#[test]
fn work_that_is_anothers_is_dropped_and_its_sender_told() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let key = key(1, 0);
    probe.tensor(1, TensorTag::Activation { key }, 1);
    let holder = member(9);
    let held = probe.tell(FromCoordinator::Held { key, holder });
    let told = send(1, PeerMessage::HeldBy { key, holder });
    assert_eq!(held, [told, PeerAction::Compute(Task::Discard { key })]);
    // While the engine still has it, it is not taken again.
    assert_eq!(probe.offer(1, 0), [send(1, PeerMessage::Busy { key, service_time: 0 })]);
    let forwarded = TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss(1)) };
    assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(1))]);
    let free = send(1, PeerMessage::Free { stage: Stage(1) });
    assert_eq!(probe.done(TaskResult::Discarded { key }), [free]);
    assert_eq!(probe.peer.load().in_flight, Bytes(0));
}

#[test]
fn work_goes_to_the_holder_and_from_a_busy_replica_to_another() {
    let (mut probe, _) = Probe::at(0, |_| {});
    let (first, _) = offered(&probe.give(0..1))[0];
    let other = if first == member(1) { 2 } else { 1 };
    let busy = PeerMessage::Busy { key: key(1, 0), service_time: 5 };
    let again = probe.hear(first.peer.0[0], busy.clone());
    assert_eq!(offered(&again), [(member(other), key(1, 0))]);
    assert_eq!(offered(&probe.hear(other, busy)), [], "nobody has room");
    let freed = probe.hear(other, PeerMessage::Free { stage: Stage(1) });
    assert_eq!(offered(&freed), [(member(other), key(1, 0))]);
    let holder = first;
    let redirected = probe.hear(other, PeerMessage::HeldBy { key: key(1, 0), holder });
    assert_eq!(offered(&redirected), [(first, key(1, 0))]);
    let again = probe.hear(other, PeerMessage::HeldBy { key: key(1, 0), holder });
    assert_eq!(offered(&again), [], "it is on its way already");
}

#[test]
fn what_nobody_takes_is_offered_again_after_a_while() {
    let (mut probe, _) = Probe::at(0, |_| {});
    probe.give(0..1);
    for from in [1, 2, 1, 2] {
        probe.hear(from, PeerMessage::Busy { key: key(1, 0), service_time: 0 });
    }
    probe.now = probe.peer.next_timeout().expect("it waits");
    assert_eq!(offered(&probe.input(PeerInput::Tick)).len(), 1);
}

#[test]
fn the_window_widens_by_one_when_the_engine_falls_idle_and_only_then() {
    let (mut probe, _) = Probe::at(0, |limits| limits.largest_window = 6);
    assert_eq!(probe.peer.load().window[&Stage(0)], 5);
    probe.give(0..5);
    for microbatch in 0..5 {
        assert_eq!(probe.peer.load().window[&Stage(0)], 5, "the engine has work");
        let (key, output) = (key(0, microbatch), Some(payload(u64::from(microbatch))));
        let actions = probe.done(TaskResult::Forwarded { key, output, loss: None });
        let idle = microbatch == 4;
        assert_eq!(actions.contains(&wanted(1, 6, 5)), idle, "{actions:?}");
    }
    assert_eq!(probe.peer.load().window[&Stage(0)], 6);
    probe.give(5..6);
    let (key, output) = (key(0, 5), Some(payload(5)));
    probe.done(TaskResult::Forwarded { key, output, loss: None });
    assert_eq!(probe.peer.load().window[&Stage(0)], 6, "it has a limit");
}

#[test]
fn a_stage_is_saved_at_its_version_and_the_report_can_be_asked_for_again() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let (version, stage) = (Step(0), Stage(1));
    let store = FromCoordinator::Store { version, stage };
    let task = PeerAction::Compute(Task::Store { version, stage });
    assert_eq!(probe.tell(store.clone()), [task]);
    assert_eq!(probe.tell(store.clone()), [], "it is being written");
    let files = Vec::new();
    let stored = TaskResult::Stored { version, stage, files: files.clone() };
    let report = PeerAction::ToCoordinator(ToCoordinator::Stored { version, stage, files });
    assert_eq!(probe.done(stored), vec![report.clone()]);
    assert_eq!(probe.tell(store), [report]);
    let later = FromCoordinator::Store { version: Step(1), stage };
    assert_eq!(probe.tell(later), [], "not at that version yet");
}

#[test]
fn a_holder_that_is_busy_has_let_go_and_others_are_asked() {
    let (mut probe, _) = Probe::at(0, |_| {});
    let (first, key) = offered(&probe.give(0..1))[0];
    let first = first.peer.0[0];
    let holder = 3 - first;
    let told = probe.hear(first, PeerMessage::HeldBy { key, holder: member(holder) });
    assert_eq!(offered(&told), [(member(holder), key)]);
    let busy = probe.hear(holder, PeerMessage::Busy { key, service_time: 0 });
    assert_eq!(offered(&busy), [(member(first), key)]);
}

#[test]
fn who_lacks_what_it_is_to_serve_moves_anew_until_that_is_decided_and_cannot_go_on_later() {
    for decided in [None, Some(Step(1))] {
        let (mut probe, _) = Probe::at(1, |_| {});
        let (to, reason) = (Stage(0), MoveReason::Uneven);
        let begun = PeerAction::Event(PeerEvent::MoveBegun { to, reason });
        assert!(probe.is_to_move(2, None).contains(&begun));
        let stored = StoredStage { holders: vec![member(1).peer], files: Vec::new() };
        let (version, stage) = (Step(1), to);
        let parts = vec![SnapshotPart { stage, stored }];
        probe.tell(FromCoordinator::Snapshot { version, parts });
        if decided.is_some() {
            probe.is_to_move(3, decided);
        }
        let actions = probe.input(PeerInput::Fetched { version, stage, whole: false });
        let there = decided.is_none();
        let behind = PeerAction::ToCoordinator(ToCoordinator::Stale { there });
        assert!(actions.contains(&behind), "{actions:?}");
    }
}

#[test]
fn a_tensor_that_nobody_asked_for_is_let_go() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let activation = TensorTag::Activation { key: key(1, 0) };
    assert_eq!(probe.tensor(1, activation, 4), [PeerAction::Release(PayloadId(4))]);
    let gradient = TensorTag::ActivationGradient { key: key(1, 0) };
    assert_eq!(probe.tensor(1, gradient, 5), [PeerAction::Release(PayloadId(5))]);
}

#[test]
fn a_peer_that_is_expelled_ends_and_keeps_nothing() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    probe.offer(1, 1);
    probe.tensor(1, TensorTag::Activation { key: key(1, 0) }, 1);
    probe.tensor(1, TensorTag::Activation { key: key(1, 1) }, 2);
    // Without its coordinator it goes on: another one will ask what it holds.
    assert_eq!(probe.input(PeerInput::Disconnected { member: member(COORDINATOR) }), []);
    let ended = probe.tell(FromCoordinator::Expelled { reason: "it was silent".to_owned() });
    assert!(matches!(ended.last(), Some(PeerAction::Event(PeerEvent::Expelled { .. }))));
    // The engine has both, and what it uses is released when it is done.
    for (microbatch, payload) in [(0, 1), (1, 2)] {
        let key = key(1, microbatch);
        let forwarded = TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss(1)) };
        assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(payload))]);
    }
    assert_eq!(probe.peer.next_timeout(), None);
}

#[test]
fn who_drains_finishes_the_open_step_takes_nothing_of_the_next_and_leaves_with_the_commit() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let draining = PeerAction::ToCoordinator(ToCoordinator::Draining);
    assert_eq!(probe.input(PeerInput::Drain), std::slice::from_ref(&draining));
    // Another coordinator does not know of it.
    assert!(probe.tell(FromCoordinator::TakenOver).contains(&draining));
    assert_eq!(probe.offer(1, 1), [accepted(1, 1), claim(1)]);
    let key = ClaimKey { step: Step(1), ..key(1, 0) };
    let offer = PeerMessage::Offer { key, size: Bytes(64), retry: false };
    assert_eq!(probe.hear(1, offer), [send(1, PeerMessage::Busy { key, service_time: 0 })]);
    let leaves = PeerAction::ToCoordinator(ToCoordinator::Leave);
    let (mut idle, _) = Probe::at(1, |_| {});
    let left = idle.input(PeerInput::Drain);
    assert_eq!(left, [leaves, PeerAction::Event(PeerEvent::Drained)]);
}

#[test]
fn a_forward_pass_may_wait_for_the_longer_backward_pass_of_another() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let (key, grant) = (key(1, 0), nth(9));
    probe.tell(FromCoordinator::Granted { key, grant, next_holder: None });
    probe.tensor(1, TensorTag::Activation { key }, 1);
    let second = Duration::from_secs(1);
    let patience = PassTimes { forward: second, backward: second * 3 };
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    let begin = probe.now;
    probe.now = begin + second * 2;
    assert_eq!(probe.tell(reclaim.clone())[0], working);
    probe.now = begin + second * 3;
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    assert!(probe.tell(reclaim).contains(&released));
}

/// What was let go of when its stage was left, whose offer came late.
#[test]
fn who_takes_what_a_stage_that_was_left_had_hears_that_nothing_comes() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let key = key(1, 4);
    let withdrawn = send(2, PeerMessage::Withdrawn { key });
    assert_eq!(probe.hear(2, PeerMessage::Accepted { key, service_time: 0 }), [withdrawn]);
}
