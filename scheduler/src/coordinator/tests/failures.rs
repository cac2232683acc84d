//! Members that are lost, late or new, and the loss of an earlier coordinator.

use std::collections::BTreeSet;

use shoal_protocol::message::{MemberRecord, Mended, StageRoom, View};

use super::*;

fn lost(number: u8, how: LossCause) -> CoordinatorEvent {
    let span = StageSpan::one(Stage(0));
    CoordinatorEvent::Lost { member: member(number), span, how }
}

fn revoked(number: u8, claims: u64) -> CoordinatorEvent {
    CoordinatorEvent::Revoked { member: member(number), claims }
}

const BROKE: LossCause = LossCause::Disconnected;

#[test]
fn a_loss_before_the_first_step_is_waited_out() {
    let mut run = Run::new(1, 1, 1);
    run.receive(0, register(StageChoice::Auto));
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(0)], members: 2 };
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 0), waiting]);
    // The expelled incarnation is not admitted again; the next one is.
    let again = run.receive(0, register(StageChoice::Auto));
    let expelled = |message: &FromCoordinator| matches!(message, FromCoordinator::Expelled { .. });
    assert_eq!(messages(&again, expelled).len(), 1);
    let from = Member { incarnation: Incarnation(2), ..member(0) };
    let message = register(StageChoice::Auto);
    let next = run.input(CoordinatorInput::Message { from, message });
    assert!(!messages(&next, |m| matches!(m, FromCoordinator::Admitted { .. })).is_empty());
}

#[test]
fn a_lost_members_claims_are_granted_to_others_and_the_step_closes_without_it() {
    let mut run = Run::opened(2, 1);
    run.request_work(0, 1, 0);
    run.request_work(1, 2, 0);
    run.finish(0, 0, 1);
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 1)]);
    let grants = vec![(Microbatch(0), nth(3))];
    let work = FromCoordinator::Work { step: Step(0), grants };
    assert_eq!(messages(&gone, is_work), [(member(1), work)]);
    // A message of the lost member changes nothing.
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
    let members = run.coordinator.round(*round).map(|round| round.group.members.len());
    assert_eq!((*to, members), (member(1), Some(1)));
    assert_eq!(*counted, [0, 1].map(|number| (Stage(0), Microbatch(number))));
}

#[test]
fn a_loss_during_the_all_reduce_mends_it_and_earlier_results_are_dropped() {
    let mut run = Run::closed();
    assert_eq!(run.reduce(0, outcome()), []);
    // Member 1 counted nothing, so nothing is missing without it.
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    let mend = CoordinatorEvent::RoundMended { round: round(), gone: 1, changed: 0 };
    assert_eq!(events(&gone), [lost(1, BROKE), revoked(1, 0), mend]);
    let closes = messages(&gone, |message| matches!(message, FromCoordinator::Close { .. }));
    let [(_, FromCoordinator::Close { round: same, mended, .. })] = &closes[..] else {
        panic!("{closes:?}")
    };
    let (mend, changed) = (Mend(1), BTreeSet::new());
    assert_eq!((same, mended), (&round(), &Mended { mend, changed }));
    assert_eq!(run.reduce(0, outcome()), [], "a result from before");
    let (round, outcome, rates, checks) = (round(), outcome(), Vec::new(), Vec::new());
    let sums = Vec::new();
    run.receive(0, ToCoordinator::Reduced { round, mend, outcome, checks, sums, rates });
    assert!(matches!(run.logged.last(), Some(LogRecord::Commit(_))), "{:?}", run.logged);
}

#[test]
fn a_late_all_reduce_is_tried_again_and_reported_as_late() {
    let mut run = Run::closed();
    run.now = Moment(Duration::from_secs(31));
    let again = run.input(CoordinatorInput::Tick);
    let late = CoordinatorEvent::RoundsAborted { step: Step(0), rounds: 1, late: true };
    assert_eq!(events(&again), [late]);
    let closes = messages(&again, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 2, "both members take part again");
}

#[test]
fn when_a_stage_loses_its_last_replica_the_run_rewinds_in_a_new_era() {
    let mut run = Run::opened(1, 1);
    run.request_work(1, 1, 0);
    run.input(CoordinatorInput::Disconnected { member: member(1) });
    let gone = run.input(CoordinatorInput::Disconnected { member: member(0) });
    let rewound = CoordinatorEvent::Rewound { era: Era(1), version: Step(0), steps: 0 };
    let waiting = CoordinatorEvent::Waiting { stages: vec![Stage(0)], members: 0 };
    let lost_stage = CoordinatorEvent::StageLost { stages: vec![Stage(0)], version: Step(0) };
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 0), lost_stage, rewound, waiting]);
    assert!(run.logged.contains(&LogRecord::Rewind { era: Era(1), version: Step(0) }));
    // A newcomer starts from there, and the step begins again when it is ready.
    let next = run.receive(2, register(StageChoice::Auto));
    let view = run.coordinator.context.members.logged.number;
    let snapshot = FromCoordinator::Snapshot { version: Step(0), view, parts: Vec::new() };
    assert!(next.contains(&CoordinatorAction::Send { to: member(2), message: snapshot }));
    let ready = run.receive(2, ToCoordinator::Ready { version: Step(0), view: 9 });
    assert_eq!(events(&ready), [CoordinatorEvent::Opened { step: Step(0) }]);
    let grants = vec![(Microbatch(0), nth(2))];
    let work = FromCoordinator::Work { step: Step(0), grants };
    assert_eq!(messages(&run.request_work(2, 1, 0), is_work), [(member(2), work)]);
}

#[test]
fn an_archive_replaces_lost_holders_of_a_checkpoint() {
    let (mut run, _) = joined();
    run.coordinator.weights.archive_mut().keep(Step(1), vec![stored_by(&[8])], Step(0));
    run.input(CoordinatorInput::Disconnected { member: member(0) });
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    let keeps = messages(&gone, |message| matches!(message, FromCoordinator::Keep { .. }));
    assert_eq!(keeps.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [member(2)]);
    let kept = |whole| ToCoordinator::Kept { version: Step(1), stage: Stage(0), whole };
    // The listed holder may come back.
    assert_eq!(run.receive(2, kept(false)), []);
    let back = run.receive(2, kept(true));
    let rewound = CoordinatorEvent::Rewound { era: Era(1), version: Step(1), steps: 0 };
    assert!(events(&back).contains(&rewound), "{back:?}");
    assert!(back.contains(&snapshot_of(2, &[8, 2])), "{back:?}");
}

/// A run of one stage at its second step, which a newcomer starts from.
fn joined() -> (Run, Vec<CoordinatorAction>) {
    let mut run = Run::opened(1, 3);
    run.request_work(0, 1, 0);
    run.finish(0, 0, 1);
    run.reduce(0, outcome());
    run.reduce(1, outcome());
    let received = run.receive(2, register(StageChoice::Auto));
    (run, received)
}

fn stored(files: Vec<StoredFile>) -> ToCoordinator {
    ToCoordinator::Stored { version: Step(1), stage: Stage(0), files }
}

/// The message that gives a newcomer the holders of the second version of the stage.
fn snapshot_of(to: u8, holders: &[u8]) -> CoordinatorAction {
    let part = SnapshotPart { stage: Stage(0), stored: stored_by(holders) };
    let message = FromCoordinator::Snapshot { version: Step(1), view: 3, parts: vec![part] };
    CoordinatorAction::Send { to: member(to), message }
}

#[test]
fn a_newcomer_fetches_from_all_replicas_except_lost_late_and_differing_ones() {
    let store = FromCoordinator::Store { version: Step(1), stage: Stage(0) };
    let (mut run, received) = joined();
    let both = [(member(0), store.clone()), (member(1), store.clone())];
    assert_eq!(messages(&received, is_store), both);
    // An unrequested or repeated report changes nothing.
    assert_eq!(run.receive(2, stored(files())), []);
    assert_eq!(run.receive(0, stored(files())), []);
    assert_eq!(run.receive(0, stored(Vec::new())), []);
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    assert!(gone.contains(&snapshot_of(2, &[0])), "{gone:?}");

    // A writer whose disk is full.
    let (mut run, _) = joined();
    assert_eq!(run.receive(0, stored(Vec::new())), []);
    assert_eq!(run.receive(1, stored(files())), [snapshot_of(2, &[1])]);

    // A late writer is not waited for for long.
    let (mut run, _) = joined();
    assert_eq!(run.receive(1, stored(files())), []);
    run.now = run.now + Duration::from_secs(2);
    let ticked = run.input(CoordinatorInput::Tick);
    assert_eq!(messages(&ticked, is_store).len(), 1, "its message may be lost: {ticked:?}");
    run.now = run.now + Duration::from_secs(30);
    let ticked = run.input(CoordinatorInput::Tick);
    assert!(ticked.contains(&snapshot_of(2, &[1])), "{ticked:?}");
    assert_eq!(run.receive(0, stored(files())), []);
}

#[test]
fn a_snapshot_that_no_replica_could_write_is_requested_again() {
    let (mut run, _) = joined();
    assert_eq!(run.receive(0, stored(Vec::new())), []);
    assert_eq!(run.receive(1, stored(Vec::new())), []);
    for asked in 1..4 {
        run.now = run.now + Duration::from_secs(2);
        let again = messages(&run.input(CoordinatorInput::Tick), is_store);
        assert_eq!(again.len(), 2, "{asked}: {again:?}");
    }
    assert_eq!(run.receive(0, stored(files())), []);
    assert_eq!(run.receive(1, stored(files())), [snapshot_of(2, &[0, 1])]);
}

#[test]
fn a_newcomer_starts_from_a_snapshot_listens_and_serves_once_it_is_ready() {
    let (mut run, received) = joined();
    let span = StageSpan::one(Stage(0));
    let admitted = FromCoordinator::Admitted { era: Era(0), span, version: Step(1) };
    assert_eq!(
        messages(&received, |m| matches!(m, FromCoordinator::Admitted { .. })),
        [(member(2), admitted)]
    );
    for donor in [1, 0] {
        let told = run.receive(donor, stored(files()));
        let snapshots = if donor == 0 { vec![snapshot_of(2, &[0, 1])] } else { Vec::new() };
        assert_eq!(told, snapshots);
    }
    // The next step is closed without it, and it receives the result.
    run.request_work(0, 1, 1);
    let grant = nth(2);
    let key = ClaimKey { step: Step(1), ..key(0) };
    let done = ToCoordinator::Done {
        key,
        grant,
        loss: Some(FixedLoss::new(1, 1)),
        pass_times: PassTimes::default(),
        handover: Box::default(),
    };
    let closed = run.receive(0, done);
    let closes = messages(&closed, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 3);
    let FromCoordinator::Close { round, .. } = &closes[0].1 else { unreachable!("just filtered") };
    let group = &run.coordinator.round(*round).expect("it is on").group;
    assert_eq!((group.members.len(), &group.listeners[..]), (2, &[member(2)][..]));
    // It is not ready at an old version, only at the present one.
    assert_eq!(run.receive(2, ToCoordinator::Ready { version: Step(0), view: 9 }), []);
    let ready = run.receive(2, ToCoordinator::Ready { version: Step(1), view: 9 });
    let views = messages(&ready, |message| matches!(message, FromCoordinator::View(_)));
    let FromCoordinator::View(change) = &views[0].1 else { unreachable!("just filtered") };
    assert!(change.here.iter().all(|record| record.serving));
}

#[test]
fn a_ready_newcomer_listens_to_the_rounds_that_close_before_the_log_lists_it() {
    let mut run = Run::opened(1, 3);
    run.receive(2, register(StageChoice::Auto));
    run.request_work(0, 1, 0);
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
    let group = &run.coordinator.round(round()).expect("it is on").group;
    assert_eq!((group.members.len(), &group.listeners[..]), (2, &[member(2)][..]));
    let views = run.input(CoordinatorInput::Appended(view.clone()));
    assert_eq!(messages(&views, |message| matches!(message, FromCoordinator::View(_))).len(), 3);
}

#[test]
fn of_two_members_that_cannot_reach_each_other_one_is_expelled() {
    let mut run = Run::opened(1, 1);
    for newcomer in [2, 3] {
        run.receive(newcomer, register(StageChoice::Auto));
        run.receive(newcomer, ToCoordinator::Ready { version: Step(0), view: 9 });
    }
    let cannot_reach = |number| ToCoordinator::CannotReach { member: member(number) };
    // One word is not enough.
    assert_eq!(run.receive(2, cannot_reach(1)), []);
    let cut = run.receive(3, cannot_reach(1));
    assert_eq!(events(&cut)[0], lost(1, LossCause::Unreachable));
    // One that insists, alone, goes itself.
    for _ in 0..2 {
        assert_eq!(run.receive(3, cannot_reach(2)), []);
    }
    assert_eq!(events(&run.receive(3, cannot_reach(2)))[0], lost(3, LossCause::CannotReach));
    // The other one runs in the coordinator's process, which would have failed with it.
    for _ in 0..2 {
        assert_eq!(run.receive(2, ToCoordinator::CannotReach { member: member(0) }), []);
    }
    let cut = run.receive(2, ToCoordinator::CannotReach { member: member(0) });
    assert_eq!(events(&cut)[0], lost(2, LossCause::CannotReach));
}

#[test]
fn a_report_about_another_members_claim_is_refused_and_changes_nothing() {
    let mut run = Run::opened(1, 1);
    run.request_work(1, 1, 0);
    let refused = [CoordinatorEvent::ClaimRefused { member: member(0), key: key(0) }];
    assert_eq!(events(&run.finish(0, 0, 1)), refused, "it is member 1's");
    assert_eq!(
        events(&run.finish(1, 0, 2))[..],
        [CoordinatorEvent::ClaimRefused { member: member(1), key: key(0) }]
    );
    let nowhere = ClaimKey { stage: Stage(7), ..key(0) };
    let refused = [CoordinatorEvent::ClaimRefused { member: member(0), key: nowhere }];
    assert_eq!(events(&run.receive(0, ToCoordinator::Claim { key: nowhere })), refused);
    let closes =
        messages(&run.finish(1, 0, 1), |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 2, "the holder's own report counts");
}

/// The next requests for late claims.
fn next_reclaims(run: &mut Run) -> Vec<(Member, FromCoordinator)> {
    let is_reclaim = |message: &FromCoordinator| matches!(message, FromCoordinator::Reclaim { .. });
    for _ in 0..100 {
        run.now = run.coordinator.next_timeout().expect("it watches claims");
        let reclaims = messages(&run.input(CoordinatorInput::Tick), is_reclaim);
        if !reclaims.is_empty() {
            return reclaims;
        }
    }
    panic!("no claim is late");
}

#[test]
fn a_late_claim_is_reclaimed_and_granted_to_another_member() {
    let mut run = Run::opened(2, 1);
    assert_eq!(messages(&run.request_work(1, 1, 0), is_work), [work(1, &[(0, 1)])]);
    let patience = Duration::from_secs(30);
    let reclaims = next_reclaims(&mut run);
    assert_eq!(run.now, Moment::default() + patience, "no member is measured yet");
    let patience = PassTimes { forward: patience, backward: patience };
    let reclaim = FromCoordinator::Reclaim { key: key(0), grant: nth(1), patience };
    assert_eq!(reclaims, [(member(1), reclaim)]);
    let released = ToCoordinator::Released { key: key(0), grant: nth(1) };
    let actions = run.receive(1, released);
    let reclaimed = CoordinatorEvent::Reclaimed { member: member(1), key: key(0) };
    assert_eq!(events(&actions), [reclaimed]);
    // The member that released it gets other work first.
    assert_eq!(messages(&run.request_work(0, 1, 0), is_work), [work(0, &[(0, 2)])]);
    let reclaims = next_reclaims(&mut run);
    let doubled = Duration::from_secs(60);
    let patience = PassTimes { forward: doubled, backward: doubled };
    let again = FromCoordinator::Reclaim { key: key(0), grant: nth(2), patience };
    assert_eq!(reclaims, [(member(0), again)]);
}

#[test]
fn a_holder_that_does_not_answer_for_a_late_claim_is_expelled() {
    let mut run = Run::opened(2, 1);
    run.request_work(1, 1, 0);
    next_reclaims(&mut run);
    let working = ToCoordinator::Working { key: key(0), grant: nth(1) };
    run.receive(1, working);
    for _ in 0..8 {
        next_reclaims(&mut run);
    }
    run.now = run.coordinator.next_timeout().expect("it still waits");
    let actions = run.input(CoordinatorInput::Tick);
    let lost = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { member: lost, .. } if *lost == member(1));
    assert!(events(&actions).iter().any(lost), "{actions:?}");
}

/// The earlier coordinator died between the membership in which no member serves and the rewind itself, of which
/// members do not know.
#[test]
fn a_coordinator_that_takes_over_in_the_middle_of_a_rewind_completes_it() {
    let record = MemberRecord {
        serving: false,
        room: StageRoom::in_memory(2),
        ..MemberRecord::plain(member(0), StageSpan::one(Stage(0)))
    };
    let view = View { number: 1, members: vec![Arc::new(record)] };
    let mut run = Run::after(History { view, ..History::default() }, 1, 1, 1);
    run.receive(0, ToCoordinator::Held { claims: Vec::new(), part: 0, last: true });
    let back = LogRecord::Rewind { era: Era(1), version: Step(0) };
    assert!(run.logged.contains(&back), "{:?}", run.logged);
}

/// The activations that are requested again until a time.
fn replays_until(run: &mut Run, end: Duration) -> Vec<(Member, FromCoordinator)> {
    let is_replay = |message: &FromCoordinator| matches!(message, FromCoordinator::Replay { .. });
    let mut all = Vec::new();
    while let Some(next) = run.coordinator.next_timeout().filter(|at| at.0 <= end) {
        run.now = next;
        all.extend(messages(&run.input(CoordinatorInput::Tick), is_replay));
    }
    all
}

#[test]
fn unclaimed_work_is_replayed_but_not_of_a_step_without_weights() {
    let mut run = Run::new(2, 1, 2);
    run.receive(0, register(StageChoice::Auto));
    run.receive(1, register(StageChoice::Auto));
    assert_eq!(messages(&run.request_work(0, 1, 0), is_work), [work(0, &[(0, 1)])]);
    // Two checks find it, four retries apart.
    let asked = replays_until(&mut run, Duration::from_secs(17));
    assert_eq!(asked, [(member(0), FromCoordinator::Replay { keys: vec![key(0)] })]);
    let onward = ClaimKey { stage: Stage(1), ..key(0) };
    run.receive(1, ToCoordinator::Claim { key: onward });
    let done = |key, grant, loss| {
        let (pass_times, handover) = (PassTimes::default(), Box::default());
        ToCoordinator::Done { key, grant: nth(grant), loss, pass_times, handover }
    };
    run.receive(1, done(onward, 2, Some(FixedLoss::new(1, 1))));
    let ended = run.receive(0, done(key(0), 1, None));
    let next = FromCoordinator::Work { step: Step(1), grants: vec![(Microbatch(0), nth(3))] };
    assert_eq!(messages(&ended, is_work), [(member(0), next)]);
    let end = run.now.0 + Duration::from_secs(60);
    let asked = replays_until(&mut run, end);
    assert_eq!(asked, [], "its forward pass cannot run before the commit");
}

#[test]
fn the_owner_of_a_refused_piece_reduces_no_more_and_nobody_goes() {
    let refused = |owner| ToCoordinator::RoundRefused {
        round: round(),
        owner: Some(member(owner)),
        reason: "no".to_owned(),
    };
    let mut run = Run::closed();
    let forged = events(&run.receive(0, refused(1)));
    let made_again = |event: &CoordinatorEvent| match event {
        CoordinatorEvent::RoundForged { owners, .. } => *owners == [member(1)].into(),
        _ => false,
    };
    assert!(forged.iter().any(made_again), "{forged:?}");
    let goes = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { .. });
    assert!(!forged.iter().any(goes), "{forged:?}");
    // A member that names itself, or a stranger, only raises an alarm.
    for owner in [1, 7] {
        let alone = events(&Run::closed().receive(1, refused(owner)));
        assert!(
            matches!(alone[0], CoordinatorEvent::Lost { how: LossCause::Alarmed, .. }),
            "{alone:?}"
        );
    }
}
