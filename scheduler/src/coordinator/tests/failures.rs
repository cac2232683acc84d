//! What the coordinator does when members are gone, late or new, or the one before it is.

use std::collections::BTreeSet;

use shoal_protocol::message::{MemberRecord, Mended, View};

use super::*;

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
    let members = run.coordinator.round(*round).map(|round| round.group.members.len());
    assert_eq!((*to, members), (member(1), Some(1)));
    assert_eq!(*counted, [Microbatch(0), Microbatch(1)]);
}

#[test]
fn a_loss_during_the_all_reduce_mends_it_and_results_from_before_are_not_heard() {
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
    let (round, outcome, rates) = (round(), outcome(), Vec::new());
    run.hear(0, ToCoordinator::Reduced { round, mend, outcome, rates });
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
    let lost_stage = CoordinatorEvent::StageLost { stages: vec![Stage(0)], version: Step(0) };
    assert_eq!(events(&gone), [lost(0, BROKE), revoked(0, 0), lost_stage, rewound, waiting]);
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
fn an_archive_has_what_those_who_are_gone_were_to_have() {
    let (mut run, _) = joined();
    run.coordinator.weights.archive_mut().keep(Step(1), vec![stored_by(&[8])], Step(0));
    run.input(CoordinatorInput::Disconnected { member: member(0) });
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    let keeps = messages(&gone, |message| matches!(message, FromCoordinator::Keep { .. }));
    assert_eq!(keeps.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [member(2)]);
    let kept = |whole| ToCoordinator::Kept { version: Step(1), stage: Stage(0), whole };
    // Who was said to have it may come back.
    assert_eq!(run.hear(2, kept(false)), []);
    let back = run.hear(2, kept(true));
    let rewound = CoordinatorEvent::Rewound { era: Era(1), version: Step(1), steps: 0 };
    assert!(events(&back).contains(&rewound), "{back:?}");
    assert!(back.contains(&snapshot_of(2, &[8, 2])), "{back:?}");
}

/// A run of one stage at its second step, which a newcomer begins from.
fn joined() -> (Run, Vec<CoordinatorAction>) {
    let mut run = Run::opened(1, 3);
    run.want(0, 1, 0);
    run.finish(0, 0, 1);
    run.reduce(0, outcome());
    run.reduce(1, outcome());
    let received = run.hear(2, register(StageChoice::Auto));
    (run, received)
}

fn stored(files: Vec<StoredFile>) -> ToCoordinator {
    ToCoordinator::Stored { version: Step(1), stage: Stage(0), files }
}

/// A newcomer is told who has the second version of the stage.
fn snapshot_of(to: u8, holders: &[u8]) -> CoordinatorAction {
    let part = SnapshotPart { stage: Stage(0), stored: stored_by(holders) };
    let message = FromCoordinator::Snapshot { version: Step(1), parts: vec![part] };
    CoordinatorAction::Send { to: member(to), message }
}

fn is_store(message: &FromCoordinator) -> bool {
    matches!(message, FromCoordinator::Store { .. })
}

#[test]
fn a_newcomer_fetches_from_all_replicas_but_for_those_that_are_gone_late_or_have_something_else() {
    let store = FromCoordinator::Store { version: Step(1), stage: Stage(0) };
    let (mut run, received) = joined();
    let both = [(member(0), store.clone()), (member(1), store.clone())];
    assert_eq!(messages(&received, is_store), both);
    // What comes unasked, or again, changes nothing.
    assert_eq!(run.hear(2, stored(files())), []);
    assert_eq!(run.hear(0, stored(files())), []);
    assert_eq!(run.hear(0, stored(Vec::new())), []);
    let gone = run.input(CoordinatorInput::Disconnected { member: member(1) });
    assert!(gone.contains(&snapshot_of(2, &[0])), "{gone:?}");

    // Whose disk is full.
    let (mut run, _) = joined();
    assert_eq!(run.hear(0, stored(Vec::new())), []);
    assert_eq!(run.hear(1, stored(files())), [snapshot_of(2, &[1])]);

    // What is not the same is of no use together.
    let (mut run, _) = joined();
    let mut others = files();
    others[0].hash = ContentHash([9; 32]);
    assert_eq!(run.hear(0, stored(files())), []);
    assert_eq!(run.hear(1, stored(others)), [snapshot_of(2, &[0])]);

    // Who answers late is not waited for.
    let (mut run, _) = joined();
    assert_eq!(run.hear(1, stored(files())), []);
    run.now = run.now + Duration::from_secs(2);
    let ticked = run.input(CoordinatorInput::Tick);
    assert!(ticked.contains(&snapshot_of(2, &[1])), "{ticked:?}");
    assert_eq!(run.hear(0, stored(files())), []);
}

#[test]
fn what_no_replica_could_write_is_asked_for_again_and_so_is_who_does_not_answer() {
    let (mut run, _) = joined();
    assert_eq!(run.hear(0, stored(Vec::new())), []);
    assert_eq!(run.hear(1, stored(Vec::new())), []);
    for asked in 1..4 {
        run.now = run.now + Duration::from_secs(2);
        let again = messages(&run.input(CoordinatorInput::Tick), is_store);
        assert_eq!(again.len(), 2, "{asked}: {again:?}");
    }
    assert_eq!(run.hear(0, stored(files())), []);
    assert_eq!(run.hear(1, stored(files())), [snapshot_of(2, &[0, 1])]);
}

#[test]
fn a_newcomer_begins_from_a_snapshot_hears_rounds_and_serves_once_it_is_ready() {
    let (mut run, received) = joined();
    let span = StageSpan::one(Stage(0));
    let admitted = FromCoordinator::Admitted { era: Era(0), span, version: Step(1) };
    assert_eq!(
        messages(&received, |m| matches!(m, FromCoordinator::Admitted { .. })),
        [(member(2), admitted)]
    );
    for donor in [1, 0] {
        let told = run.hear(donor, stored(files()));
        let snapshots = if donor == 0 { vec![snapshot_of(2, &[0, 1])] } else { Vec::new() };
        assert_eq!(told, snapshots);
    }
    // The next step is closed without it, and it hears the result.
    run.want(0, 1, 1);
    let grant = nth(2);
    let key = ClaimKey { step: Step(1), ..key(0) };
    let done = ToCoordinator::Done {
        key,
        grant,
        loss: Some(FixedLoss(1)),
        pass_times: PassTimes::default(),
    };
    let closed = run.hear(0, done);
    let closes = messages(&closed, |message| matches!(message, FromCoordinator::Close { .. }));
    assert_eq!(closes.len(), 3);
    let FromCoordinator::Close { round, .. } = &closes[0].1 else { unreachable!("just filtered") };
    let group = &run.coordinator.round(*round).expect("it is on").group;
    assert_eq!((group.members.len(), &group.listeners[..]), (2, &[member(2)][..]));
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
    let group = &run.coordinator.round(round()).expect("it is on").group;
    assert_eq!((group.members.len(), &group.listeners[..]), (2, &[member(2)][..]));
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
fn next_reclaim(run: &mut Run) -> Vec<(Member, FromCoordinator)> {
    let is_reclaim = |message: &FromCoordinator| matches!(message, FromCoordinator::Reclaim { .. });
    for _ in 0..100 {
        run.now = run.coordinator.next_timeout().expect("it looks after claims");
        let reclaims = messages(&run.input(CoordinatorInput::Tick), is_reclaim);
        if !reclaims.is_empty() {
            return reclaims;
        }
    }
    panic!("nothing is asked back");
}

#[test]
fn a_late_claim_is_asked_back_and_what_is_let_go_of_goes_to_another() {
    let mut run = Run::opened(2, 1);
    assert_eq!(messages(&run.want(1, 1, 0), is_work), [work(1, &[(0, 1)])]);
    let patience = Duration::from_secs(30);
    let reclaims = next_reclaim(&mut run);
    assert_eq!(run.now, Moment::default() + patience, "nobody is measured yet");
    let patience = PassTimes { forward: patience, backward: patience };
    let reclaim = FromCoordinator::Reclaim { key: key(0), grant: nth(1), patience };
    assert_eq!(reclaims, [(member(1), reclaim)]);
    let released = ToCoordinator::Released { key: key(0), grant: nth(1) };
    let actions = run.hear(1, released);
    let reclaimed = CoordinatorEvent::Reclaimed { member: member(1), key: key(0) };
    assert_eq!(events(&actions), [reclaimed]);
    // Who let go of it gets other work first.
    assert_eq!(messages(&run.want(0, 1, 0), is_work), [work(0, &[(0, 2)])]);
    let reclaims = next_reclaim(&mut run);
    let doubled = Duration::from_secs(60);
    let patience = PassTimes { forward: doubled, backward: doubled };
    let again = FromCoordinator::Reclaim { key: key(0), grant: nth(2), patience };
    assert_eq!(reclaims, [(member(0), again)]);
}

#[test]
fn who_never_answers_when_work_is_asked_back_is_expelled() {
    let mut run = Run::opened(2, 1);
    run.want(1, 1, 0);
    next_reclaim(&mut run);
    let working = ToCoordinator::Working { key: key(0), grant: nth(1) };
    run.hear(1, working);
    for _ in 0..8 {
        next_reclaim(&mut run);
    }
    run.now = run.coordinator.next_timeout().expect("it still waits");
    let actions = run.input(CoordinatorInput::Tick);
    let lost = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { member: who, .. } if *who == member(1));
    assert!(events(&actions).iter().any(lost), "{actions:?}");
}

/// The one before was lost between the membership in which nobody serves and the return itself, of which its
/// members know nothing.
#[test]
fn who_takes_over_in_the_middle_of_a_return_goes_back() {
    let record = MemberRecord {
        member: member(0),
        span: StageSpan::one(Stage(0)),
        addresses: Vec::new(),
        serving: false,
        duties: Duties::default(),
        mobile: true,
        moves: None,
    };
    let view = View { number: 1, members: vec![Arc::new(record)] };
    let mut run = Run::after(History { view, ..History::default() }, 1, 1, 1);
    run.hear(0, ToCoordinator::Held { claims: Vec::new(), part: 0, last: true });
    let back = LogRecord::Rewind { era: Era(1), version: Step(0) };
    assert!(run.logged.contains(&back), "{:?}", run.logged);
}

/// Whose activations are asked for again until then.
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
fn what_nobody_claims_is_asked_for_again_but_not_of_a_step_whose_weights_are_yet_to_come() {
    let mut run = Run::new(2, 1, 2);
    run.hear(0, register(StageChoice::Auto));
    run.hear(1, register(StageChoice::Auto));
    assert_eq!(messages(&run.want(0, 1, 0), is_work), [work(0, &[(0, 1)])]);
    // Two looks that find it, four retries apart.
    let asked = replays_until(&mut run, Duration::from_secs(17));
    assert_eq!(asked, [(member(0), FromCoordinator::Replay { keys: vec![key(0)] })]);
    let onward = ClaimKey { stage: Stage(1), ..key(0) };
    run.hear(1, ToCoordinator::Claim { key: onward });
    let done = |key, grant, loss| {
        let pass_times = PassTimes::default();
        ToCoordinator::Done { key, grant: nth(grant), loss, pass_times }
    };
    run.hear(1, done(onward, 2, Some(FixedLoss(1))));
    let ended = run.hear(0, done(key(0), 1, None));
    let next = FromCoordinator::Work { step: Step(1), grants: vec![(Microbatch(0), nth(3))] };
    assert_eq!(messages(&ended, is_work), [(member(0), next)]);
    let end = run.now.0 + Duration::from_secs(60);
    let asked = replays_until(&mut run, end);
    assert_eq!(asked, [], "its forward pass cannot run before the commit");
}
