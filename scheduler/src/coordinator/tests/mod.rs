//! Tests of the coordinator: the exact actions that follow from an input.

mod failures;
mod migrations;

use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{
    ClaimKey, ContentHash, Era, Grant, Incarnation, Member, Mend, Microbatch, PeerId, Stage,
    StageSpan, Step, Term, WeightGroup,
};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{
    Candidate, Duties, FixedLoss, FromCoordinator, LogRecord, PROJECTIONS, PassTimes, RoundCheck,
    RoundId, RoundOutcome, SnapshotPart, StageChoice, StageRoom, StoredFile, StoredStage,
    ToCoordinator, proof_of_all,
};
use shoal_protocol::units::{Bytes, Moment};

use super::{Coordinator, CoordinatorConfig};
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput, LossCause};
use crate::coordinator::placing::locality::Load;
use crate::coordinator::placing::rebalance::Rebalance;
use crate::router::Routing;
use crate::sim::{HashKeys, Scenario};

fn nth(number: u64) -> Grant {
    Grant { term: Term(1), number }
}

fn member(number: u8) -> Member {
    Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
}

/// A coordinator of a run that waits for two members. Records that it appends are in the log at once.
struct Run {
    coordinator: Coordinator,
    logged: Vec<LogRecord>,
    now: Moment,
}

impl Run {
    /// A run of so many stages, microbatches and steps.
    fn new(stages: u16, microbatches: u32, steps: u64) -> Self {
        Self::after(History::default(), stages, microbatches, steps)
    }

    /// Makes a step of one microbatch, given the number of members.
    fn step(&mut self, number: u64, members: u8) -> Vec<CoordinatorAction> {
        self.request_work(0, 1, number);
        self.finish(0, 0, number + 1);
        let reduced = (0..members).map(|member| self.reduce(member, outcome()));
        reduced.flatten().collect()
    }

    /// The same, with a history.
    fn after(history: History, stages: u16, microbatches: u32, steps: u64) -> Self {
        Self::waiting_for(2, history, (stages, microbatches, steps))
    }

    /// The same, with a changed manifest.
    fn with_manifest(
        (stages, microbatches, steps): (u16, u32, u64),
        change: impl FnOnce(&mut Manifest),
    ) -> Self {
        let mut manifest = Scenario::small_manifest(stages, microbatches, steps);
        change(&mut manifest);
        Self::of(2, History::default(), manifest)
    }

    fn waiting_for(
        members: usize,
        history: History,
        (stages, microbatches, steps): (u16, u32, u64),
    ) -> Self {
        Self::of(members, history, Scenario::small_manifest(stages, microbatches, steps))
    }

    fn of(members: usize, history: History, manifest: Manifest) -> Self {
        let stages = manifest.training.stages;
        let manifest = Arc::new(manifest);
        let sealer = HashKeys(member(0).peer).sealer(&manifest);
        let config = CoordinatorConfig {
            manifest,
            term: history.term.next(),
            history,
            founding: None,
            anchors: [member(0).peer].into(),
            wait_for: members,
            home: member(0),
            retry: Duration::from_secs(2),
            patience: Duration::from_secs(30),
            return_trip: Duration::from_secs(60),
            extend_after: Duration::from_secs(30),
            load: Load::of_stages(usize::from(stages)),
            rebalance: Rebalance::Never,
            sealer,
            routing: Routing::default(),
        };
        let mut run = Self {
            coordinator: Coordinator::new(config),
            logged: Vec::new(),
            now: Moment::default(),
        };
        let mut out = Vec::new();
        run.coordinator.start(Moment::default(), &mut out);
        assert_eq!(out, [CoordinatorAction::Append(LogRecord::Term(Term(1)))]);
        run.input(CoordinatorInput::Appended(LogRecord::Term(Term(1))));
        run
    }

    /// A run of one stage with two members, at its first step.
    fn opened(microbatches: u32, steps: u64) -> Self {
        let mut run = Self::new(1, microbatches, steps);
        run.receive(0, register(StageChoice::Auto));
        let actions = run.receive(1, register(StageChoice::Auto));
        let begun = [CoordinatorEvent::Opened { step: Step(0) }];
        assert_eq!(events(&actions), if steps > 0 { &begun[..] } else { &[] });
        run
    }

    fn input(&mut self, input: CoordinatorInput) -> Vec<CoordinatorAction> {
        let mut done = Vec::new();
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let mut actions = Vec::new();
            self.coordinator.handle(self.now, input, &mut actions);
            for action in actions {
                if let CoordinatorAction::Append(record) = action {
                    self.logged.push(record.clone());
                    inputs.push(CoordinatorInput::Appended(record));
                } else {
                    done.push(action);
                }
            }
        }
        done
    }

    fn receive(&mut self, from: u8, message: ToCoordinator) -> Vec<CoordinatorAction> {
        self.input(CoordinatorInput::Message { from: member(from), message })
    }

    fn request_work(&mut self, from: u8, room: u32, through: u64) -> Vec<CoordinatorAction> {
        let through = nth(through);
        let rooms = vec![(Step(0), room), (Step(1), room)];
        self.receive(from, ToCoordinator::WorkRequest { rooms, through, service_time: 0 })
    }

    fn finish(&mut self, from: u8, microbatch: u32, grant: u64) -> Vec<CoordinatorAction> {
        let (key, grant) = (key(microbatch), nth(grant));
        self.receive(
            from,
            ToCoordinator::Done {
                key,
                grant,
                loss: Some(FixedLoss::new(1, 1)),
                pass_times: PassTimes::default(),
                handover: Box::default(),
            },
        )
    }

    fn reduce(&mut self, from: u8, outcome: RoundOutcome) -> Vec<CoordinatorAction> {
        let members = self.coordinator.round(round()).map_or(0, |one| one.group.members.len());
        self.report(from, outcome, vec![RoundCheck::default(); members])
    }

    fn report(
        &mut self,
        from: u8,
        outcome: RoundOutcome,
        checks: Vec<RoundCheck>,
    ) -> Vec<CoordinatorAction> {
        let (round, mend, sums, rates) = (round(), Mend(0), Vec::new(), Vec::new());
        self.receive(from, ToCoordinator::Reduced { round, mend, outcome, checks, sums, rates })
    }

    /// A run whose first step, of a single microbatch, is closed.
    fn closed() -> Self {
        let mut run = Self::opened(1, 1);
        run.request_work(0, 1, 0);
        let actions = run.finish(0, 0, 1);
        let closes = messages(&actions, |message| matches!(message, FromCoordinator::Close { .. }));
        assert_eq!(closes.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [member(0), member(1)]);
        let sent = closes.into_iter().map(|(_, message)| match message {
            FromCoordinator::Close { round, counted, .. } => (round, counted),
            _ => unreachable!("just filtered"),
        });
        let sent: Vec<_> = sent.collect();
        assert_eq!(sent, [(round(), vec![(Stage(0), Microbatch(0))]), (round(), vec![])]);
        run
    }
}

fn files() -> Vec<StoredFile> {
    let hash = ContentHash([7; 32]);
    vec![StoredFile { name: "stage-0".to_owned(), hash, size: Bytes(8) }]
}

fn stored_by(holders: &[u8]) -> StoredStage {
    let holders = holders.iter().map(|number| member(*number).peer).collect();
    StoredStage { holders, files: files() }
}

fn register(choice: StageChoice) -> ToCoordinator {
    ToCoordinator::Register(Candidate {
        link_estimates: Some(Vec::new()),
        choice,
        fits: (0..8).map(Stage).collect(),
        addresses: Vec::new(),
        fingerprint: Some(ContentHash([0; 32])),
        duties: Duties { anchor: false, archive: true },
        devices: std::num::NonZeroU16::MIN,
        devices_per_pass: std::num::NonZeroU16::MIN,
        room: StageRoom::NONE,
        longest: 1,
        price: None,
        island: None,
        name: None,
    })
}

fn key(microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(microbatch) }
}

fn round() -> RoundId {
    let attempt = shoal_protocol::ids::Attempt(0);
    RoundId { era: Era(0), term: Term(1), step: Step(0), weights: WeightGroup(0), attempt }
}

fn outcome() -> RoundOutcome {
    let proof = proof_of_all(Step(0), Stage(0), 1);
    RoundOutcome { hash: ContentHash([5; 32]), square_norm: 9.0, proof }
}

fn events(actions: &[CoordinatorAction]) -> Vec<CoordinatorEvent> {
    let event = |action: &CoordinatorAction| match action {
        CoordinatorAction::Event(event) => Some(event.clone()),
        _ => None,
    };
    // Tests of registrations check admissions.
    let admitted = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Admitted { .. });
    actions.iter().filter_map(event).filter(|event| !admitted(event)).collect()
}

fn messages(
    actions: &[CoordinatorAction],
    wanted: fn(&FromCoordinator) -> bool,
) -> Vec<(Member, FromCoordinator)> {
    let message = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { to, message } if wanted(message) => Some((*to, message.clone())),
        _ => None,
    };
    actions.iter().filter_map(message).collect()
}

/// The memberships that are sent: the receiver, the membership that it changes (0 if it is whole) and the number of
/// listed members.
fn views(actions: &[CoordinatorAction]) -> Vec<(Member, (u64, usize))> {
    let view = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { to, message: FromCoordinator::View(change) } => {
            Some((*to, (change.since, change.here.len())))
        }
        CoordinatorAction::Send { to, message: FromCoordinator::Members { members, .. } } => {
            Some((*to, (0, members.len())))
        }
        _ => None,
    };
    actions.iter().filter_map(view).collect()
}

fn work(to: u8, grants: &[(u32, u64)]) -> (Member, FromCoordinator) {
    let grants = grants.iter().map(|(m, grant)| (Microbatch(*m), nth(*grant))).collect();
    (member(to), FromCoordinator::Work { step: Step(0), grants })
}

fn is_store(message: &FromCoordinator) -> bool {
    matches!(message, FromCoordinator::Store { .. })
}

fn is_work(message: &FromCoordinator) -> bool {
    matches!(message, FromCoordinator::Work { .. })
}

#[test]
fn newcomers_are_members_once_logged_and_the_first_step_waits_for_all() {
    let mut run = Run::new(2, 4, 1);
    let mut out = Vec::new();
    let message = register(StageChoice::Auto);
    let input = CoordinatorInput::Message { from: member(0), message };
    run.coordinator.handle(Moment::default(), input, &mut out);
    let span = StageSpan::one(Stage(0));
    let admitted = CoordinatorEvent::Admitted { member: member(0), span, name: None };
    assert_eq!(out[0], CoordinatorAction::Event(admitted));
    let [_, CoordinatorAction::Append(record)] = &out[..] else { panic!("{out:?}") };
    let answered = run.input(CoordinatorInput::Appended(record.clone()));
    let welcome = FromCoordinator::Admitted { era: Era(0), span, version: Step(0) };
    assert_eq!(answered[1], CoordinatorAction::Send { to: member(0), message: welcome });
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(1)], members: 1 };
    assert_eq!(events(&answered), [waiting]);
    let second = run.receive(1, register(StageChoice::Auto));
    // The first member receives the change, the newcomer the whole membership.
    assert_eq!(views(&second), [(member(0), (1, 1)), (member(1), (0, 2))]);
    assert_eq!(events(&second), [CoordinatorEvent::Opened { step: Step(0) }]);
}

#[test]
fn a_registration_for_an_unknown_stage_is_refused() {
    let mut run = Run::new(1, 1, 1);
    let refusal = |actions: &[CoordinatorAction]| match actions {
        [
            CoordinatorAction::Event(CoordinatorEvent::NotAdmitted { .. }),
            CoordinatorAction::Send { message: FromCoordinator::Refused { reason }, .. },
        ] => reason.clone(),
        other => panic!("{other:?}"),
    };
    let wrong = run.receive(0, register(StageChoice::Span(StageSpan::one(Stage(1)))));
    assert_eq!(refusal(&wrong), "the run has no stage 1: choose one from 0 to 0, or auto");
    let mut run = Run::opened(1, 1);
    // A repeated registration is answered again.
    let again = run.receive(1, register(StageChoice::Auto));
    let welcomed = messages(&again, |message| matches!(message, FromCoordinator::Admitted { .. }));
    assert_eq!(welcomed.len(), 1);
}

#[test]
fn a_newer_incarnation_replaces_the_older_one_which_is_then_refused() {
    let mut run = Run::new(1, 1, 1);
    let mut life = |incarnation| {
        let from = Member { incarnation: Incarnation(incarnation), ..member(0) };
        let message = register(StageChoice::Auto);
        run.input(CoordinatorInput::Message { from, message })
    };
    life(2);
    let newer = life(3);
    assert!(matches!(events(&newer)[0], CoordinatorEvent::Lost { .. }), "{newer:?}");
    let older = life(1);
    assert_eq!(
        messages(&older, |message| matches!(message, FromCoordinator::Refused { .. })).len(),
        1
    );
}

#[test]
fn unlike_machines_are_reported() {
    let mut run = Run::new(1, 1, 1);
    run.receive(0, register(StageChoice::Auto));
    let ToCoordinator::Register(candidate) = register(StageChoice::Auto) else { unreachable!() };
    let unlike = Candidate { fingerprint: Some(ContentHash([1; 32])), ..candidate };
    let actions = run.receive(1, ToCoordinator::Register(unlike));
    assert!(events(&actions).contains(&CoordinatorEvent::Unlike { member: member(1) }));
}

#[test]
fn work_is_granted_up_to_the_requested_room_and_a_repeated_request_is_one() {
    let mut run = Run::opened(6, 1);
    let first = run.request_work(0, 2, 0);
    assert_eq!(messages(&first, is_work), [work(0, &[(0, 1), (1, 2)])]);
    assert_eq!(run.request_work(0, 2, 0), []);
    let more = run.request_work(0, 1, 2);
    assert_eq!(messages(&more, is_work), [work(0, &[(2, 3)])]);
    // An old request that arrives late changes nothing.
    assert_eq!(run.request_work(0, 2, 0), []);
    let other = run.request_work(1, 9, 0);
    assert_eq!(messages(&other, is_work), [work(1, &[(3, 4), (4, 5), (5, 6)])]);
}

#[test]
fn an_unmet_request_is_met_when_the_next_step_opens() {
    let mut run = Run::opened(1, 2);
    assert_eq!(messages(&run.request_work(0, 1, 0), is_work).len(), 1);
    assert_eq!(run.request_work(1, 1, 0), []);
    let closed = run.finish(0, 0, 1);
    let (to, message) = &messages(&closed, is_work)[0];
    let grants = vec![(Microbatch(0), nth(2))];
    assert_eq!((*to, message), (member(1), &FromCoordinator::Work { step: Step(1), grants }));
}

#[test]
fn a_step_is_committed_when_all_hold_equal_results_and_applied_once_logged() {
    let mut run = Run::closed();
    assert_eq!(run.reduce(0, outcome()), []);
    assert_eq!(run.reduce(0, outcome()), []);
    let actions = run.reduce(1, outcome());
    let Some(LogRecord::Commit(record)) = run.logged.last() else { panic!("{:?}", run.logged) };
    // The norm is 3 for the mean over all tokens, of which a quarter are targets.
    assert_eq!(
        (record.step, record.gradient_norm, record.loss),
        (Step(0), 12.0, FixedLoss::new(1, 1))
    );
    let commits = messages(&actions, |message| matches!(message, FromCoordinator::Commit(_)));
    assert_eq!(commits.len(), 2);
    let stores = messages(&actions, is_store);
    let store = FromCoordinator::Store { version: Step(1), stage: Stage(0) };
    assert_eq!(stores, [(member(0), store.clone()), (member(1), store)], "one word is not enough");
    // A repeated report is answered, so that it ends.
    let noted = FromCoordinator::Noted { key: key(0), grant: nth(1) };
    let again = run.finish(0, 0, 1);
    assert_eq!(again, [CoordinatorAction::Send { to: member(0), message: noted }]);
}

#[test]
fn a_run_ends_when_its_last_checkpoint_is_stored_copied_logged_and_archived() {
    let mut run = Run::opened(1, 0);
    let stored = ToCoordinator::Stored { version: Step(0), stage: Stage(0), files: files() };
    let none = ToCoordinator::Stored { version: Step(0), stage: Stage(0), files: Vec::new() };
    assert_eq!(run.receive(1, none), [], "its disk was full");
    let part = SnapshotPart { stage: Stage(0), stored: stored_by(&[0]) };
    let keep = FromCoordinator::Keep { version: Step(0), part };
    let asked = run.receive(0, stored);
    assert_eq!(asked, [CoordinatorAction::Send { to: member(1), message: keep }]);
    let kept = ToCoordinator::Kept { version: Step(0), stage: Stage(0), whole: true };
    let ended = run.receive(1, kept);
    let stages = vec![stored_by(&[0, 1])];
    let record = LogRecord::Checkpoint { version: Step(0), stages, oldest: Step(0) };
    assert_eq!(run.logged.last(), Some(&record));
    let stages = vec![files()];
    let whole = CoordinatorEvent::CheckpointStored { version: Step(0), stages, last: true };
    assert_eq!(events(&ended), [whole]);
    let ended = run.receive(1, ToCoordinator::Archived { version: Step(0) });
    let finished = |message: &FromCoordinator| *message == FromCoordinator::Finished;
    assert_eq!(messages(&ended, finished).len(), 2);
    assert_eq!(events(&ended), [CoordinatorEvent::Finished]);
    assert_eq!(run.logged.last(), Some(&LogRecord::Completed));
    // From here on all members may leave.
    assert_eq!(run.input(CoordinatorInput::Disconnected { member: member(1) }), []);
}

#[test]
fn a_checkpoint_is_what_two_replicas_wrote_alike() {
    let stored = |files| ToCoordinator::Stored { version: Step(0), stage: Stage(0), files };
    let mut run = Run::opened(1, 0);
    assert_eq!(run.receive(1, stored(files())), [], "one word is not believed");
    run.receive(0, stored(files()));
    let stages = vec![stored_by(&[0, 1])];
    let record = LogRecord::Checkpoint { version: Step(0), stages, oldest: Step(0) };
    assert_eq!(run.logged.last(), Some(&record), "no copy was needed");

    // The other one says nothing: after a while the first is believed.
    let mut run = Run::opened(1, 0);
    run.receive(1, stored(files()));
    let asked = |actions: &[CoordinatorAction]| messages(actions, is_store).len();
    run.now = run.now + Duration::from_secs(2);
    assert_eq!(asked(&run.input(CoordinatorInput::Tick)), 1);
    run.now = run.now + Duration::from_secs(30);
    let late = run.input(CoordinatorInput::Tick);
    let keep = |message: &FromCoordinator| matches!(message, FromCoordinator::Keep { .. });
    assert_eq!((asked(&late), messages(&late, keep).len()), (0, 1));

    // Two that differ, and no third.
    let mut other = files();
    other[0].hash = ContentHash([9; 32]);
    let mut run = Run::opened(1, 0);
    run.receive(1, stored(other));
    let stopped = stop_reason(&run.receive(0, stored(files())));
    assert!(stopped.contains("stage 0 have different weights at version 0"), "{stopped}");
}

#[test]
fn of_different_checkpoints_the_majority_counts() {
    let mut run = Run::waiting_for(3, History::default(), (1, 1, 1));
    for number in 0..3 {
        run.receive(number, register(StageChoice::Auto));
    }
    let mut other = files();
    other[0].hash = ContentHash([9; 32]);
    let stores = |actions: &[CoordinatorAction]| -> Vec<Member> {
        messages(actions, is_store).into_iter().map(|(to, _)| to).collect()
    };
    let stored =
        |step, files| ToCoordinator::Stored { version: Step(step), stage: Stage(0), files };
    assert_eq!(stores(&run.step(0, 3)), [member(0), member(1)]);
    assert_eq!(run.receive(0, stored(1, other.clone())), []);
    // Nobody knows which one is right: the next version is written by all.
    assert_eq!(stores(&run.receive(1, stored(1, files()))), [member(0), member(1), member(2)]);
    run.receive(0, stored(1, other));
    run.receive(1, stored(1, files()));
    let decided = run.receive(2, stored(1, files()));
    let span = StageSpan::one(Stage(0));
    let lost = CoordinatorEvent::Lost { member: member(0), span, how: LossCause::Disproved };
    assert_eq!(events(&decided)[0], lost);
    let stages = vec![stored_by(&[1, 2])];
    let record = LogRecord::Checkpoint { version: Step(1), stages, oldest: Step(1) };
    assert!(run.logged.contains(&record), "{:?}", run.logged);
}

#[test]
fn a_checkpoint_comes_before_the_only_anchor_leaves() {
    let mut run = Run::with_manifest((1, 1, 9), |manifest| manifest.checkpoint.interval = 300);
    let mut anchor = register(StageChoice::Auto);
    if let ToCoordinator::Register(candidate) = &mut anchor {
        candidate.duties.anchor = true;
    }
    run.receive(0, anchor);
    run.receive(1, register(StageChoice::Auto));
    let stores = |actions: &[CoordinatorAction]| -> usize { messages(actions, is_store).len() };
    assert_eq!(stores(&run.step(0, 2)), 0, "the time begins");
    assert_eq!(stores(&run.receive(0, ToCoordinator::Draining)), 2, "the run stops with it");
}

#[test]
fn checkpoints_come_by_time_and_before_the_last_host_leaves() {
    let mut run = Run::with_manifest((1, 1, 9), |manifest| manifest.checkpoint.interval = 300);
    run.receive(0, register(StageChoice::Auto));
    run.receive(1, register(StageChoice::Auto));
    let stores = |actions: &[CoordinatorAction]| -> usize { messages(actions, is_store).len() };
    assert_eq!(stores(&run.receive(1, ToCoordinator::Draining)), 0, "initial weights");
    assert_eq!(stores(&run.step(0, 2)), 0, "the time begins");
    assert_eq!(stores(&run.receive(0, ToCoordinator::Draining)), 2, "both leave");
    let stored = ToCoordinator::Stored { version: Step(1), stage: Stage(0), files: files() };
    run.receive(0, stored.clone());
    run.receive(1, stored);
    assert!(matches!(run.logged.last(), Some(LogRecord::Checkpoint { .. })), "{:?}", run.logged);

    let mut run = Run::with_manifest((1, 1, 9), |manifest| manifest.checkpoint.interval = 300);
    run.receive(0, register(StageChoice::Auto));
    run.receive(1, register(StageChoice::Auto));
    assert_eq!(stores(&run.step(0, 2)), 0);
    run.now = run.now + Duration::from_secs(300);
    assert_eq!(stores(&run.receive(0, ToCoordinator::Draining)), 0, "another host stays");
}

fn stop_reason(actions: &[CoordinatorAction]) -> String {
    match events(actions).pop() {
        Some(CoordinatorEvent::Stopped { reason }) => reason,
        other => panic!("not stopped but {other:?}"),
    }
}

#[test]
fn a_result_of_the_last_replica_that_is_not_the_whole_batch_or_differs_stops_the_run() {
    let wrong = RoundOutcome { proof: 1, ..outcome() };
    assert!(stop_reason(&Run::closed().reduce(0, wrong)).contains("lost or counted twice"));
    let mut run = Run::closed();
    run.reduce(0, outcome());
    let other = RoundOutcome { hash: ContentHash([6; 32]), ..outcome() };
    assert!(stop_reason(&run.reduce(1, other)).contains("different results"));
    let refused =
        || ToCoordinator::RoundRefused { round: round(), owner: None, reason: "no".to_owned() };
    let mut run = Run::closed();
    let alone = events(&run.receive(1, refused()));
    assert!(
        matches!(alone[0], CoordinatorEvent::Lost { how: LossCause::Alarmed, .. }),
        "one word does not end a run: {alone:?}"
    );
    assert!(
        stop_reason(&Run::closed().receive(0, refused()))
            .ends_with("refused the all-reduce of weight group 0: no")
    );
}

#[test]
fn who_reports_what_cannot_be_goes_but_not_all() {
    let endless = RoundCheck { slack: f64::INFINITY, ..RoundCheck::default() };
    let broken = RoundCheck { own: [f64::NAN; PROJECTIONS], ..RoundCheck::default() };
    let plain = RoundCheck::default();
    let span = StageSpan::one(Stage(0));
    let lost = CoordinatorEvent::Lost { member: member(1), span, how: LossCause::Disproved };
    for checks in [vec![endless, plain], vec![plain, broken], vec![plain], vec![plain; 3]] {
        let mut run = Run::closed();
        assert_eq!(run.reduce(0, outcome()), []);
        assert_eq!(events(&run.report(1, outcome(), checks.clone()))[0], lost);

        let mut run = Run::closed();
        assert_eq!(run.report(0, outcome(), checks.clone()), []);
        let stopped = stop_reason(&run.report(1, outcome(), checks));
        assert!(stopped.contains("different results"), "{stopped}");
    }
}

#[test]
fn divergence_of_two_replicas_stops_the_run_and_names_the_place() {
    let diverged = || {
        let reason = "model.norm.weight is not finite".to_owned();
        ToCoordinator::Diverged { key: key(0), reason }
    };
    let mut run = Run::opened(1, 1);
    assert_eq!(run.receive(1, diverged()), [], "it does not hold the claim");
    run.request_work(1, 1, 0);
    let alone = events(&run.receive(1, diverged()));
    let span = StageSpan::one(Stage(0));
    let lost = CoordinatorEvent::Lost { member: member(1), span, how: LossCause::Alarmed };
    assert_eq!(alone[0], lost, "one word does not end a run: {alone:?}");
    run.request_work(0, 1, 0);
    let stopped = run.receive(0, diverged());
    let expected = "the numbers diverged at step 0 stage 0 microbatch 0: \
                    model.norm.weight is not finite";
    assert_eq!(stop_reason(&stopped), expected);
    // A later message is answered with the stop.
    let late = run.request_work(0, 1, 1);
    assert_eq!(
        messages(&late, |message| matches!(message, FromCoordinator::Stopped { .. })).len(),
        1
    );
}
