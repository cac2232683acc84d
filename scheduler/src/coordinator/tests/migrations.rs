//! Who is moved for the speeds of stages: whether that pays before anybody was seen to fetch, and who is about to
//! leave.

use shoal_protocol::message::{LinkEstimate, MoveReason};
use shoal_protocol::units::Rate;

use super::*;
use crate::action::MoveObstacle;

const STEP: Duration = Duration::from_secs(10);
const STEPS: u64 = 10;

/// A run of two stages with one member at the first and these many at the second, that could all move. Steps
/// take 10 s; a stage's weights and moments weigh 300 MB, and the links carry so many bytes a second.
fn uneven(second: u8, rate: Option<u64>) -> Run {
    let mut run = Run::new(2, 1, STEPS);
    run.coordinator.context.config.load =
        Load { activations: Bytes(0), gradients: vec![Bytes(100_000_000); 2] };
    run.coordinator.context.config.wait_for = usize::from(second) + 1;
    run.coordinator.context.config.rebalance = Rebalance::every_so_often(Duration::from_secs(60));
    for number in 0..=second {
        let choice = StageChoice::One(Stage(u16::from(number > 0)));
        let ToCoordinator::Register(candidate) = register(choice) else { unreachable!("it does") };
        run.hear(number, ToCoordinator::Register(Candidate { mobile: true, ..candidate }));
        let other = member(u8::from(number == 0)).peer;
        let path = LinkEstimate { round_trip: Duration::from_millis(50), rate: rate.map(Rate) };
        run.hear(number, ToCoordinator::LinkEstimates { link_estimates: vec![(other, path)] });
    }
    for _ in 0..5 {
        run.coordinator.balance.stepped(run.now);
        run.now = run.now + STEP;
    }
    run
}

impl Run {
    /// What comes of so much time.
    fn later(&mut self, seconds: u64) -> Vec<CoordinatorEvent> {
        self.now = self.now + Duration::from_secs(seconds);
        events(&self.input(CoordinatorInput::Tick))
    }

    /// Those who were sent to another stage in so much time.
    fn sent(&mut self, seconds: u64) -> Vec<(Member, Stage, MoveReason)> {
        let begun = self.later(seconds).into_iter().filter_map(|event| match event {
            CoordinatorEvent::MoveBegun { member, to, reason, .. } => Some((member, to, reason)),
            _ => None,
        });
        begun.collect()
    }
}

fn to_first(number: u8, reason: MoveReason) -> Vec<(Member, Stage, MoveReason)> {
    vec![(member(number), Stage(0), reason)]
}

#[test]
fn the_first_move_is_made_where_links_are_fast_enough_for_what_is_left() {
    // Twice as fast for the 100 s that are left, against three seconds, or three hundred.
    let first = to_first(1, MoveReason::Uneven);
    assert_eq!(uneven(3, Some(100_000_000)).sent(60), first);
    assert_eq!(uneven(3, Some(1_000_000)).sent(60), []);
    // What nobody measured is no reason to wait.
    assert_eq!(uneven(3, None).sent(60), first);
}

#[test]
fn how_long_others_fetched_says_more_than_links_do() {
    let mut run = uneven(3, Some(1_000_000));
    run.coordinator.balance.fetched(Duration::from_secs(5));
    assert_eq!(run.sent(60), to_first(1, MoveReason::Uneven));
    let mut run = uneven(3, Some(100_000_000));
    run.coordinator.balance.fetched(Duration::from_secs(500));
    assert_eq!(run.sent(60), []);
}

#[test]
fn who_is_about_to_leave_is_not_moved() {
    let mut run = uneven(4, None);
    run.hear(1, ToCoordinator::Draining);
    assert_eq!(run.sent(10), to_first(2, MoveReason::Uneven));
}

#[test]
fn who_is_about_to_leave_is_made_up_for() {
    let mut run = uneven(3, None);
    // Two at each stage.
    assert_eq!(run.sent(60), to_first(1, MoveReason::Uneven));
    let moved = Step(0);
    run.coordinator.context.members.current.end_migration(member(1), moved);
    run.coordinator.context.members.current.set_position(Era(0), moved);
    assert_eq!(run.sent(60), []);
    // The one that is left there and one of a fifth member's stage are as many as before.
    let ToCoordinator::Register(candidate) = register(StageChoice::One(Stage(1))) else {
        unreachable!("it does")
    };
    run.hear(4, ToCoordinator::Register(Candidate { mobile: true, ..candidate }));
    run.coordinator.context.members.current.begin_serving(member(4));
    assert_eq!(run.sent(60), []);
    run.hear(0, ToCoordinator::Draining);
    assert_eq!(run.sent(60), to_first(2, MoveReason::MembersGone));
    // It is missed once, whatever it says, and is not missed again once it has left.
    run.hear(0, ToCoordinator::Draining);
    run.hear(0, ToCoordinator::Leave);
    assert_eq!(run.sent(60), []);
}

#[test]
fn who_is_about_to_leave_goes_nowhere_any_more() {
    let mut run = uneven(3, None);
    assert_eq!(run.sent(60), to_first(1, MoveReason::Uneven));
    let told = events(&run.hear(1, ToCoordinator::Draining));
    let (to, reason) = (Stage(0), MoveReason::Uneven);
    let obstacle = MoveObstacle::Leaves;
    assert_eq!(told, [CoordinatorEvent::MoveCancelled { member: member(1), to, reason, obstacle }]);
    let Some(LogRecord::View(change)) = run.logged.last() else { panic!("the log has it") };
    assert!(change.here.iter().any(|record| record.member == member(1) && record.moves.is_none()));
    // It is not chosen again, nor does it go when it says that it is ready.
    let (version, view) = (Step(0), u64::MAX);
    assert_eq!(events(&run.hear(1, ToCoordinator::Ready { version, view })), []);
    assert!(run.sent(60).iter().all(|(mover, ..)| *mover != member(1)));
}

/// Who is the last to stay at a stage does not leave it for another.
#[test]
fn nobody_goes_from_where_others_are_about_to_leave() {
    let mut run = uneven(3, None);
    assert_eq!(run.sent(60), to_first(1, MoveReason::Uneven));
    run.hear(2, ToCoordinator::Draining);
    run.hear(3, ToCoordinator::Draining);
    let view = run.coordinator.context.members.logged.number;
    let told = events(&run.hear(1, ToCoordinator::Ready { version: Step(0), view }));
    let (to, reason) = (Stage(0), MoveReason::Uneven);
    let obstacle = MoveObstacle::Needed;
    assert_eq!(told, [CoordinatorEvent::MoveCancelled { member: member(1), to, reason, obstacle }]);
}

/// Who waits for its turn to go elsewhere lacks what is its own: it cannot stay.
#[test]
fn who_lacks_its_own_result_goes_though_it_is_to_move() {
    for (there, goes) in [(true, false), (false, true)] {
        let mut run = uneven(3, None);
        assert_eq!(run.sent(60), to_first(1, MoveReason::Uneven));
        run.coordinator.weights.newcomers_mut().forget(member(1));
        run.coordinator.weights.newcomers_mut().queue(member(1));
        let told = events(&run.hear(1, ToCoordinator::Stale { there }));
        let lost = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { .. });
        assert_eq!(told.iter().any(lost), goes);
    }
}

/// Nothing else may happen for long, and others show who is where.
#[test]
fn who_has_moved_is_listed_where_it_is_at_once() {
    let mut run = Run::closed();
    run.coordinator.context.members.current.begin_migration(
        member(1),
        Stage(1),
        MoveReason::Uneven,
    );
    run.coordinator.context.members.current.end_migration(member(1), Step(1));
    run.reduce(0, outcome());
    run.reduce(1, outcome());
    let mut views = run.logged.iter().rev().filter_map(|record| match record {
        LogRecord::View(change) => Some(change),
        _ => None,
    });
    let last = views.next().expect("it is told of");
    let listed = last.here.iter().find(|record| record.member == member(1)).expect("it is here");
    assert_eq!((listed.span, listed.moves), (StageSpan::one(Stage(1)), None));
}
