//! What the coordinator does, action by action.

use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{
    ClaimKey, ContentHash, Era, Grant, Incarnation, Microbatch, PeerId, StageSpan, Term,
};
use shoal_protocol::message::{
    Candidate, Duties, FixedLoss, RoundId, RoundOutcome, SnapshotPart, Spent, StageChoice,
    StoredFile, StoredStage, proof_of_all,
};
use shoal_protocol::units::Bytes;

use super::*;
use crate::nearness::Load;
use crate::rebalance::Rebalance;
use crate::router::Routing;
use crate::sim::Scenario;

fn nth(number: u64) -> Grant {
    Grant { term: Term(1), number }
}

fn member(number: u8) -> Member {
    Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
}

/// A coordinator of a run of so many stages, microbatches and steps that waits for two members, and
/// whatever it logs is down at once.
struct Run {
    coordinator: Coordinator,
    logged: Vec<LogRecord>,
    now: Moment,
}

impl Run {
    fn new(stages: u16, microbatches: u32, steps: u64) -> Self {
        let manifest = Arc::new(Scenario::small_manifest(stages, microbatches, steps));
        let config = CoordinatorConfig {
            manifest,
            history: History::default(),
            anchors: [member(0).peer].into(),
            wait_for: 2,
            home: member(0),
            retry: Duration::from_secs(2),
            patience: Duration::from_secs(30),
            homecoming: Duration::from_secs(60),
            load: Load::of_stages(usize::from(stages)),
            rebalance: Rebalance::Never,
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

    /// A run of one stage with its two members, at its first step.
    fn opened(microbatches: u32, steps: u64) -> Self {
        let mut run = Self::new(1, microbatches, steps);
        run.hear(0, register(StageChoice::Auto));
        let actions = run.hear(1, register(StageChoice::Auto));
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

    fn hear(&mut self, from: u8, message: ToCoordinator) -> Vec<CoordinatorAction> {
        self.input(CoordinatorInput::Message { from: member(from), message })
    }

    fn want(&mut self, from: u8, room: u32, through: u64) -> Vec<CoordinatorAction> {
        let through = nth(through);
        let rooms = vec![(Step(0), room), (Step(1), room)];
        self.hear(from, ToCoordinator::WorkWanted { rooms, through, pace: 0 })
    }

    fn finish(&mut self, from: u8, microbatch: u32, grant: u64) -> Vec<CoordinatorAction> {
        let (key, grant) = (key(microbatch), nth(grant));
        self.hear(
            from,
            ToCoordinator::Done { key, grant, loss: Some(FixedLoss(1)), spent: Spent::default() },
        )
    }

    fn reduce(&mut self, from: u8, outcome: RoundOutcome) -> Vec<CoordinatorAction> {
        self.hear(from, ToCoordinator::Reduced { round: round(), outcome, rates: Vec::new() })
    }

    /// Brings the first step of a single microbatch to its close.
    fn closed() -> Self {
        let mut run = Self::opened(1, 1);
        run.want(0, 1, 0);
        let actions = run.finish(0, 0, 1);
        let closes = messages(&actions, |message| matches!(message, FromCoordinator::Close { .. }));
        assert_eq!(closes.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [member(0), member(1)]);
        let told = closes.into_iter().map(|(_, message)| match message {
            FromCoordinator::Close { round, counted, .. } => (round, counted),
            _ => unreachable!("just filtered"),
        });
        let told: Vec<_> = told.collect();
        assert_eq!(told, [(round(), vec![Microbatch(0)]), (round(), vec![])]);
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
        ways: Some(Vec::new()),
        choice,
        fits: (0..8).map(Stage).collect(),
        addresses: Vec::new(),
        fingerprint: Some(ContentHash([0; 32])),
        duties: Duties { anchor: false, archive: true },
        mobile: false,
    })
}

fn key(microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(microbatch) }
}

fn round() -> RoundId {
    let attempt = shoal_protocol::ids::Attempt(0);
    RoundId { era: Era(0), term: Term(1), step: Step(0), stage: Stage(0), attempt }
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
    // Admissions are checked where they matter.
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

/// Who hears of the membership: how many are listed, as a change of which one; of none if it is all.
fn views(actions: &[CoordinatorAction]) -> Vec<(Member, (u64, usize))> {
    let told = |action: &CoordinatorAction| match action {
        CoordinatorAction::Send { to, message: FromCoordinator::View(change) } => {
            Some((*to, (change.since, change.here.len())))
        }
        CoordinatorAction::Send { to, message: FromCoordinator::Members { members, .. } } => {
            Some((*to, (0, members.len())))
        }
        _ => None,
    };
    actions.iter().filter_map(told).collect()
}

fn work(to: u8, grants: &[(u32, u64)]) -> (Member, FromCoordinator) {
    let grants = grants.iter().map(|(m, grant)| (Microbatch(*m), nth(*grant))).collect();
    (member(to), FromCoordinator::Work { step: Step(0), grants })
}

fn is_work(message: &FromCoordinator) -> bool {
    matches!(message, FromCoordinator::Work { .. })
}

#[test]
fn newcomers_are_members_when_the_log_has_them_and_the_first_step_waits_for_all() {
    let mut run = Run::new(2, 4, 1);
    let mut out = Vec::new();
    let message = register(StageChoice::Auto);
    let input = CoordinatorInput::Message { from: member(0), message };
    run.coordinator.handle(Moment::default(), input, &mut out);
    let span = StageSpan::one(Stage(0));
    let admitted = CoordinatorEvent::Admitted { member: member(0), span };
    assert_eq!(out[0], CoordinatorAction::Event(admitted));
    let [_, CoordinatorAction::Append(record)] = &out[..] else { panic!("{out:?}") };
    let answered = run.input(CoordinatorInput::Appended(record.clone()));
    let welcome = FromCoordinator::Admitted { era: Era(0), span, version: Step(0) };
    assert_eq!(answered[1], CoordinatorAction::Send { to: member(0), message: welcome });
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(1)], members: 1 };
    assert_eq!(events(&answered), [waiting]);
    let second = run.hear(1, register(StageChoice::Auto));
    // Who was there hears who came, who came hears of all.
    assert_eq!(views(&second), [(member(0), (1, 1)), (member(1), (0, 2))]);
    assert_eq!(events(&second), [CoordinatorEvent::Opened { step: Step(0) }]);
}

#[test]
fn who_asks_for_what_is_not_there_is_refused() {
    let mut run = Run::new(1, 1, 1);
    let refusal = |actions: &[CoordinatorAction]| match actions {
        [
            CoordinatorAction::Event(CoordinatorEvent::NotAdmitted { .. }),
            CoordinatorAction::Send { message: FromCoordinator::Refused { reason }, .. },
        ] => reason.clone(),
        other => panic!("{other:?}"),
    };
    let wrong = run.hear(0, register(StageChoice::One(Stage(1))));
    assert_eq!(refusal(&wrong), "the run has no stage 1: choose one from 0 to 0, or auto");
    let mut run = Run::opened(1, 1);
    // A member that asks again is told again.
    let again = run.hear(1, register(StageChoice::Auto));
    let welcomed = messages(&again, |message| matches!(message, FromCoordinator::Admitted { .. }));
    assert_eq!(welcomed.len(), 1);
}

#[test]
fn a_newer_life_replaces_the_old_one_and_an_old_one_is_refused() {
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
fn unlike_machines_are_told_of() {
    let mut run = Run::new(1, 1, 1);
    run.hear(0, register(StageChoice::Auto));
    let ToCoordinator::Register(candidate) = register(StageChoice::Auto) else { unreachable!() };
    let unlike = Candidate { fingerprint: Some(ContentHash([1; 32])), ..candidate };
    let actions = run.hear(1, ToCoordinator::Register(unlike));
    assert!(events(&actions).contains(&CoordinatorEvent::Unlike { member: member(1) }));
}

#[test]
fn work_goes_to_who_has_room_and_a_wish_said_twice_is_one_wish() {
    let mut run = Run::opened(6, 1);
    let first = run.want(0, 2, 0);
    assert_eq!(messages(&first, is_work), [work(0, &[(0, 1), (1, 2)])]);
    assert_eq!(run.want(0, 2, 0), []);
    let more = run.want(0, 1, 2);
    assert_eq!(messages(&more, is_work), [work(0, &[(2, 3)])]);
    // An old wish that comes late changes nothing.
    assert_eq!(run.want(0, 2, 0), []);
    let other = run.want(1, 9, 0);
    assert_eq!(messages(&other, is_work), [work(1, &[(3, 4), (4, 5), (5, 6)])]);
}

#[test]
fn an_unmet_wish_is_met_when_the_next_step_is_given_out() {
    let mut run = Run::opened(1, 2);
    assert_eq!(messages(&run.want(0, 1, 0), is_work).len(), 1);
    assert_eq!(run.want(1, 1, 0), []);
    let closed = run.finish(0, 0, 1);
    let (to, message) = &messages(&closed, is_work)[0];
    let grants = vec![(Microbatch(0), nth(2))];
    assert_eq!((*to, message), (member(1), &FromCoordinator::Work { step: Step(1), grants }));
}

#[test]
fn a_step_is_committed_when_all_hold_the_same_and_applied_when_the_log_has_it() {
    let mut run = Run::closed();
    assert_eq!(run.reduce(0, outcome()), []);
    assert_eq!(run.reduce(0, outcome()), []);
    let actions = run.reduce(1, outcome());
    let Some(LogRecord::Commit(record)) = run.logged.last() else { panic!("{:?}", run.logged) };
    assert_eq!((record.step, record.gradient_norm, record.loss), (Step(0), 3.0, FixedLoss(1)));
    let commits = messages(&actions, |message| matches!(message, FromCoordinator::Commit(_)));
    assert_eq!(commits.len(), 2);
    let stores = messages(&actions, |message| matches!(message, FromCoordinator::Store { .. }));
    let store = FromCoordinator::Store { version: Step(1), stage: Stage(0) };
    assert_eq!(stores, [(member(0), store)]);
    // A report that comes again now is answered, so that it ends.
    let noted = FromCoordinator::Noted { key: key(0), grant: nth(1) };
    let again = run.finish(0, 0, 1);
    assert_eq!(again, [CoordinatorAction::Send { to: member(0), message: noted }]);
}

#[test]
fn a_run_ends_when_its_last_checkpoint_is_stored_copied_logged_and_archived() {
    let mut run = Run::opened(1, 0);
    let stored = ToCoordinator::Stored { version: Step(0), stage: Stage(0), files: files() };
    assert_eq!(run.hear(1, stored.clone()), []);
    let part = SnapshotPart { stage: Stage(0), stored: stored_by(&[0]) };
    let keep = FromCoordinator::Keep { version: Step(0), part };
    let asked = run.hear(0, stored);
    assert_eq!(asked, [CoordinatorAction::Send { to: member(1), message: keep }]);
    let kept = ToCoordinator::Kept { version: Step(0), stage: Stage(0), whole: true };
    let ended = run.hear(1, kept);
    let stages = vec![stored_by(&[0, 1])];
    let record = LogRecord::Checkpoint { version: Step(0), stages, oldest: Step(0) };
    assert_eq!(run.logged.last(), Some(&record));
    let stages = vec![files()];
    let whole = CoordinatorEvent::CheckpointStored { version: Step(0), stages, last: true };
    assert_eq!(events(&ended), [whole]);
    let ended = run.hear(1, ToCoordinator::Archived { version: Step(0) });
    let finished = |message: &FromCoordinator| *message == FromCoordinator::Finished;
    assert_eq!(messages(&ended, finished).len(), 2);
    assert_eq!(events(&ended), [CoordinatorEvent::Finished]);
    assert_eq!(run.logged.last(), Some(&LogRecord::Completed));
    // From here on everybody may go.
    assert_eq!(run.input(CoordinatorInput::Disconnected { member: member(1) }), []);
}

fn stop_reason(actions: &[CoordinatorAction]) -> String {
    match events(actions).pop() {
        Some(CoordinatorEvent::Stopped { reason }) => reason,
        other => panic!("not stopped but {other:?}"),
    }
}

#[test]
fn a_result_that_is_not_the_whole_batch_or_not_everybodys_stops_the_run() {
    let wrong = RoundOutcome { proof: 1, ..outcome() };
    assert!(stop_reason(&Run::closed().reduce(0, wrong)).contains("lost or counted twice"));
    let mut run = Run::closed();
    run.reduce(0, outcome());
    let other = RoundOutcome { hash: ContentHash([6; 32]), ..outcome() };
    assert!(stop_reason(&run.reduce(1, other)).contains("different results"));
    let refused = ToCoordinator::RoundRefused { round: round(), reason: "no".to_owned() };
    assert!(
        stop_reason(&Run::closed().hear(0, refused))
            .ends_with("refused the all-reduce of stage 0: no")
    );
}

#[test]
fn divergence_stops_the_run_and_names_the_place() {
    let reason = "model.norm.weight is not finite".to_owned();
    let mut run = Run::opened(1, 1);
    let stopped = run.hear(0, ToCoordinator::Diverged { key: key(0), reason });
    let expected = "the numbers diverged at step 0 stage 0 microbatch 0: \
                    model.norm.weight is not finite";
    assert_eq!(stop_reason(&stopped), expected);
    // Who speaks after the end hears that it is the end.
    let late = run.want(1, 1, 0);
    assert_eq!(
        messages(&late, |message| matches!(message, FromCoordinator::Stopped { .. })).len(),
        1
    );
}

fn lost(number: u8, how: &str) -> CoordinatorEvent {
    let span = StageSpan::one(Stage(0));
    CoordinatorEvent::Lost { member: member(number), span, how: how.to_owned() }
}

fn revoked(number: u8, claims: u64) -> CoordinatorEvent {
    CoordinatorEvent::Revoked { member: member(number), claims }
}

const BROKE: &str = "its connection broke";

#[test]
fn a_loss_before_the_first_step_is_waited_out() {
    let mut run = Run::new(1, 1, 1);
    run.hear(0, register(StageChoice::Auto));
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(0)], members: 2 };
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 0), waiting]);
    // The life that was expelled never comes back; the next one does.
    let again = run.hear(0, register(StageChoice::Auto));
    let expelled = |message: &FromCoordinator| matches!(message, FromCoordinator::Expelled { .. });
    assert_eq!(messages(&again, expelled).len(), 1);
    let from = Member { incarnation: Incarnation(2), ..member(0) };
    let message = register(StageChoice::Auto);
    let next = run.input(CoordinatorInput::Message { from, message });
    assert!(!messages(&next, |m| matches!(m, FromCoordinator::Admitted { .. })).is_empty());
}

#[test]
fn what_a_lost_member_held_is_given_to_others_and_the_step_closes_without_it() {
    let mut run = Run::opened(2, 1);
    run.want(0, 1, 0);
    run.want(1, 2, 0);
    run.finish(0, 0, 1);
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 1)]);
    let grants = vec![(Microbatch(0), nth(3))];
    let work = FromCoordinator::Work { step: Step(0), grants };
    assert_eq!(messages(&gone, is_work), [(member(1), work)]);
    // A word of who is gone changes nothing.
    let late = run.finish(0, 0, 1);
    assert!(matches!(
        late[..],
        [CoordinatorAction::Send { message: FromCoordinator::Expelled { .. }, .. }]
    ));
    run.finish(1, 1, 2);
    let closed = run.finish(1, 0, 3);
    let closes = messages(&closed, |message| matches!(message, FromCoordinator::Close { .. }));
    let [(to, FromCoordinator::Close { round, counted, .. })] = &closes[..] else {
        panic!("{closes:?}")
    };
    let members = run.coordinator.round(*round).map(|round| round.crew.members.len());
    assert_eq!((*to, members), (member(1), Some(1)));
    assert_eq!(*counted, [Microbatch(0), Microbatch(1)]);
}

#[test]
fn a_loss_during_the_all_reduce_begins_another_try_and_old_results_are_not_heard() {
    let mut run = Run::closed();
    assert_eq!(run.reduce(0, outcome()), []);
    // Member 1 counted nothing, so nothing is missing without it.
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    let aborted = CoordinatorEvent::RoundsAborted { step: Step(0), rounds: 1, late: false };
    assert_eq!(events(&gone), [lost(1, BROKE), revoked(1, 0), aborted]);
    let closes = messages(&gone, |message| matches!(message, FromCoordinator::Close { .. }));
    let [(_, FromCoordinator::Close { round: second, .. })] = &closes[..] else {
        panic!("{closes:?}")
    };
    let second = *second;
    assert_eq!(second, RoundId { attempt: shoal_protocol::ids::Attempt(1), ..round() });
    assert_eq!(run.reduce(0, outcome()), [], "a result of the first try");
    run.hear(0, ToCoordinator::Reduced { round: second, outcome: outcome(), rates: Vec::new() });
    assert!(matches!(run.logged.last(), Some(LogRecord::Commit(_))), "{:?}", run.logged);
}

#[test]
fn an_all_reduce_that_takes_too_long_is_tried_again_and_called_late() {
    let mut run = Run::closed();
    run.now = Moment(Duration::from_secs(31));
    let again = run.input(CoordinatorInput::Tick);
    let late = CoordinatorEvent::RoundsAborted { step: Step(0), rounds: 1, late: true };
    assert_eq!(events(&again), [late]);
    let closes = messages(&again, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 2, "both members take part again");
}

#[test]
fn with_its_last_replica_a_stage_and_the_run_go_back_in_a_new_era() {
    let mut run = Run::opened(1, 1);
    run.want(1, 1, 0);
    run.input(CoordinatorInput::Disconnected { member: member(1) });
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    let rewound = CoordinatorEvent::Rewound { era: Era(1), version: Step(0), steps: 0 };
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(0)], members: 0 };
    let stranded = CoordinatorEvent::Stranded { stages: vec![Stage(0)], version: Step(0) };
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 0), stranded, rewound, waiting]);
    assert!(run.logged.contains(&LogRecord::Rewind { era: Era(1), version: Step(0) }));
    // Whoever comes begins from there, and the step begins anew when it is ready.
    let next = run.hear(2, register(StageChoice::Auto));
    let snapshot = FromCoordinator::Snapshot { version: Step(0), parts: Vec::new() };
    assert!(next.contains(&CoordinatorAction::Send { to: member(2), message: snapshot }));
    let ready = run.hear(2, ToCoordinator::Ready { version: Step(0), view: 9 });
    assert_eq!(events(&ready), [CoordinatorEvent::Opened { step: Step(0) }]);
    let grants = vec![(Microbatch(0), nth(2))];
    let work = FromCoordinator::Work { step: Step(0), grants };
    assert_eq!(messages(&run.want(2, 1, 0), is_work), [(member(2), work)]);
}

#[test]
fn a_newcomer_begins_from_a_snapshot_hears_rounds_and_serves_once_it_is_ready() {
    let mut run = Run::opened(1, 3);
    run.want(0, 1, 0);
    run.finish(0, 0, 1);
    run.reduce(0, outcome());
    run.reduce(1, outcome());
    let span = StageSpan::one(Stage(0));
    let received = run.hear(2, register(StageChoice::Auto));
    let admitted = FromCoordinator::Admitted { era: Era(0), span, version: Step(1) };
    assert_eq!(
        messages(&received, |m| matches!(m, FromCoordinator::Admitted { .. })),
        [(member(2), admitted)]
    );
    let store = FromCoordinator::Store { version: Step(1), stage: Stage(0) };
    let stores = messages(&received, |m| matches!(m, FromCoordinator::Store { .. }));
    assert_eq!(stores, [(member(0), store)]);
    let stored = ToCoordinator::Stored { version: Step(1), stage: Stage(0), files: files() };
    let told = run.hear(0, stored);
    let part = SnapshotPart { stage: Stage(0), stored: stored_by(&[0]) };
    let snapshot = FromCoordinator::Snapshot { version: Step(1), parts: vec![part] };
    assert_eq!(told, [CoordinatorAction::Send { to: member(2), message: snapshot }]);
    // The next step is closed without it, and it hears the result.
    run.want(0, 1, 1);
    let grant = nth(2);
    let key = ClaimKey { step: Step(1), ..key(0) };
    let done =
        ToCoordinator::Done { key, grant, loss: Some(FixedLoss(1)), spent: Spent::default() };
    let closed = run.hear(0, done);
    let closes = messages(&closed, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 3);
    let FromCoordinator::Close { round, .. } = &closes[0].1 else { unreachable!("just filtered") };
    let crew = &run.coordinator.round(*round).expect("it is on").crew;
    assert_eq!((crew.members.len(), &crew.listeners[..]), (2, &[member(2)][..]));
    // Of an old version it is not ready, of the present one it is.
    assert_eq!(run.hear(2, ToCoordinator::Ready { version: Step(0), view: 9 }), []);
    let ready = run.hear(2, ToCoordinator::Ready { version: Step(1), view: 9 });
    let views = messages(&ready, |message| matches!(message, FromCoordinator::View(_)));
    let FromCoordinator::View(change) = &views[0].1 else { unreachable!("just filtered") };
    assert!(change.here.iter().all(|record| record.serving));
}

#[test]
fn a_newcomer_that_is_ready_hears_the_rounds_that_close_before_the_log_says_that_it_serves() {
    let mut run = Run::opened(1, 3);
    run.hear(2, register(StageChoice::Auto));
    run.want(0, 1, 0);
    let ready = ToCoordinator::Ready { version: Step(0), view: 9 };
    let mut on_its_way = Vec::new();
    let ready = CoordinatorInput::Message { from: member(2), message: ready };
    run.coordinator.handle(run.now, ready, &mut on_its_way);
    let [CoordinatorAction::Append(view @ LogRecord::View(_))] = &on_its_way[..] else {
        panic!("a membership goes into the log: {on_its_way:?}")
    };
    let closed = run.finish(0, 0, 1);
    let closes = messages(&closed, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 3);
    let crew = &run.coordinator.round(round()).expect("it is on").crew;
    assert_eq!((crew.members.len(), &crew.listeners[..]), (2, &[member(2)][..]));
    let views = run.input(CoordinatorInput::Appended(view.clone()));
    assert_eq!(messages(&views, |message| matches!(message, FromCoordinator::View(_))).len(), 3);
}

#[test]
fn of_two_who_cannot_reach_each_other_one_goes() {
    let mut run = Run::opened(1, 1);
    run.hear(2, register(StageChoice::Auto));
    run.hear(2, ToCoordinator::Ready { version: Step(0), view: 9 });
    let cut = run.hear(2, ToCoordinator::CannotReach { member: member(1) });
    assert_eq!(events(&cut)[0], lost(1, "another member cannot reach it"));
    // The last but one is at home, and the coordinator would know if it were gone.
    for _ in 0..2 {
        assert_eq!(run.hear(2, ToCoordinator::CannotReach { member: member(0) }), []);
    }
    let cut = run.hear(2, ToCoordinator::CannotReach { member: member(0) });
    assert_eq!(events(&cut)[0], lost(2, "it cannot reach another member"));
}

#[test]
fn a_word_about_anothers_claim_is_refused_and_changes_nothing() {
    let mut run = Run::opened(1, 1);
    run.want(1, 1, 0);
    let refused = [CoordinatorEvent::ClaimRefused { member: member(0), key: key(0) }];
    assert_eq!(events(&run.finish(0, 0, 1)), refused, "it is member 1's");
    assert_eq!(
        events(&run.finish(1, 0, 2))[..],
        [CoordinatorEvent::ClaimRefused { member: member(1), key: key(0) }]
    );
    let nowhere = ClaimKey { stage: Stage(7), ..key(0) };
    let refused = [CoordinatorEvent::ClaimRefused { member: member(0), key: nowhere }];
    assert_eq!(events(&run.hear(0, ToCoordinator::Claim { key: nowhere })), refused);
    let closes =
        messages(&run.finish(1, 0, 1), |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 2, "the holder's own word counts");
}

/// The next recall, when it is due.
fn next_recall(run: &mut Run) -> Vec<(Member, FromCoordinator)> {
    let is_recall = |message: &FromCoordinator| matches!(message, FromCoordinator::Recall { .. });
    for _ in 0..100 {
        run.now = run.coordinator.next_timeout().expect("it looks after claims");
        let recalls = messages(&run.input(CoordinatorInput::Tick), is_recall);
        if !recalls.is_empty() {
            return recalls;
        }
    }
    panic!("nothing is asked back");
}

#[test]
fn a_late_claim_is_asked_back_and_what_is_let_go_of_goes_to_another() {
    let mut run = Run::opened(2, 1);
    assert_eq!(messages(&run.want(1, 1, 0), is_work), [work(1, &[(0, 1)])]);
    let patience = Duration::from_secs(30);
    let recalls = next_recall(&mut run);
    assert_eq!(run.now, Moment::default() + patience, "nobody is measured yet");
    let patience = Spent { forward: patience, backward: patience };
    let recall = FromCoordinator::Recall { key: key(0), grant: nth(1), patience };
    assert_eq!(recalls, [(member(1), recall)]);
    let released = ToCoordinator::Released { key: key(0), grant: nth(1) };
    let actions = run.hear(1, released);
    let recalled = CoordinatorEvent::Recalled { member: member(1), key: key(0) };
    assert_eq!(events(&actions), [recalled]);
    // Who let go of it gets other work first.
    assert_eq!(messages(&run.want(0, 1, 0), is_work), [work(0, &[(0, 2)])]);
    let recalls = next_recall(&mut run);
    let doubled = Duration::from_secs(60);
    let patience = Spent { forward: doubled, backward: doubled };
    let again = FromCoordinator::Recall { key: key(0), grant: nth(2), patience };
    assert_eq!(recalls, [(member(0), again)]);
}

#[test]
fn who_never_answers_when_work_is_asked_back_is_expelled() {
    let mut run = Run::opened(2, 1);
    run.want(1, 1, 0);
    next_recall(&mut run);
    let working = ToCoordinator::Working { key: key(0), grant: nth(1) };
    run.hear(1, working);
    for _ in 0..8 {
        next_recall(&mut run);
    }
    run.now = run.coordinator.next_timeout().expect("it still waits");
    let actions = run.input(CoordinatorInput::Tick);
    let lost = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { member: who, .. } if *who == member(1));
    assert!(events(&actions).iter().any(lost), "{actions:?}");
}
