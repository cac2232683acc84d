//! Migrations: whether they pay before any fetch was measured, and members that are about to leave.

use shoal_protocol::message::{Followed, LinkEstimate, MoveReason, StageRoom};
use shoal_protocol::units::Rate;

use super::*;
use crate::action::MoveObstacle;

const STEP: Duration = Duration::from_secs(10);
const STEPS: u64 = 10;

/// A run of two stages, whose members host these and are all mobile. Steps take 10 s; a stage's weights and moments are
/// 300 MB, and `link` is what one member measures to another.
fn hosting(stages: &[u16], link: impl Fn(u8, u8) -> LinkEstimate) -> Run {
    let mut run = Run::new(2, 1, STEPS);
    run.coordinator.context.config.load =
        Load::with_gradients(Bytes(0), vec![Bytes(100_000_000); 2]);
    run.coordinator.context.config.wait_for = stages.len();
    run.coordinator.context.config.rebalance = Rebalance::every_so_often(Duration::from_secs(60));
    for (number, stage) in (0..).zip(stages) {
        let choice = StageChoice::Span(StageSpan::one(Stage(*stage)));
        let ToCoordinator::Register(candidate) = register(choice) else { unreachable!("it does") };
        run.receive(
            number,
            ToCoordinator::Register(Candidate { room: StageRoom::in_memory(2), ..candidate }),
        );
    }
    for number in 0..stages.len() as u8 {
        run.measure(number, stages.len() as u8, &link);
    }
    for _ in 0..5 {
        run.coordinator.balance.stepped(run.now);
        run.now = run.now + STEP;
    }
    run
}

/// A run with one member at the first stage and so many at the second; links carry `rate` bytes per second.
fn uneven(second: u8, rate: Option<u64>) -> Run {
    let stages: Vec<u16> = (0..=second).map(|number| u16::from(number > 0)).collect();
    let link = LinkEstimate { round_trip: Duration::from_millis(50), rate: rate.map(Rate) };
    hosting(&stages, |_, _| link)
}

impl Run {
    /// A member reports its links to all of `members` members.
    fn measure(&mut self, number: u8, members: u8, link: &impl Fn(u8, u8) -> LinkEstimate) {
        let others = (0..members).filter(|other| *other != number);
        let link_estimates =
            others.map(|other| (member(other).peer, link(number, other))).collect();
        self.receive(number, ToCoordinator::LinkEstimates { link_estimates });
    }

    /// The events after so much time.
    fn after_seconds(&mut self, seconds: u64) -> Vec<CoordinatorEvent> {
        self.now = self.now + Duration::from_secs(seconds);
        events(&self.input(CoordinatorInput::Tick))
    }

    /// The migrations that begin after so much time.
    fn begun(&mut self, seconds: u64) -> Vec<(Member, StageSpan, MoveReason)> {
        let begun = self.after_seconds(seconds).into_iter().filter_map(|event| match event {
            CoordinatorEvent::MoveBegun { member, to, reason, .. } => Some((member, to, reason)),
            _ => None,
        });
        begun.collect()
    }
}

fn to_first(number: u8, reason: MoveReason) -> Vec<(Member, StageSpan, MoveReason)> {
    vec![(member(number), StageSpan::one(Stage(0)), reason)]
}

#[test]
fn the_first_migration_begins_only_if_links_are_fast_enough_for_the_steps_left() {
    // Twice the throughput for the 100 s that are left, against a fetch of 3 s or of 300 s.
    let first = to_first(1, MoveReason::Uneven);
    assert_eq!(uneven(3, Some(100_000_000)).begun(60), first);
    assert_eq!(uneven(3, Some(1_000_000)).begun(60), []);
    // Without a measurement the migration begins.
    assert_eq!(uneven(3, None).begun(60), first);
}

#[test]
fn measured_fetches_outweigh_links() {
    let mut run = uneven(3, Some(1_000_000));
    run.coordinator.balance.fetched(Duration::from_secs(5));
    assert_eq!(run.begun(60), to_first(1, MoveReason::Uneven));
    let mut run = uneven(3, Some(100_000_000));
    run.coordinator.balance.fetched(Duration::from_secs(500));
    assert_eq!(run.begun(60), []);
}

/// Two places have one member at each stage, so that gradients take the long link.
#[test]
fn members_exchange_stages_when_two_comparisons_find_it_worthwhile() {
    let link = |milliseconds, rate| LinkEstimate {
        round_trip: Duration::from_millis(milliseconds),
        rate: Some(Rate(rate)),
    };
    let near = link(10, 1_000_000_000);
    let apart = |one: u8, other: u8| match (one + other).is_multiple_of(2) {
        true => near,
        false => link(100, 100_000_000),
    };
    let mut run = hosting(&[0, 0, 1, 1], apart);
    assert_eq!(run.begun(60), []);
    let exchanged = run.begun(60);
    assert_eq!(exchanged.len(), 2);
    assert!(exchanged.iter().all(|(.., reason)| *reason == MoveReason::Nearer), "{exchanged:?}");

    // The links were slow for a while only.
    let mut run = hosting(&[0, 0, 1, 1], apart);
    assert_eq!(run.begun(60), []);
    for number in 0..4 {
        run.measure(number, 4, &|_, _| near);
    }
    assert_eq!(run.begun(60), []);
    for number in 0..4 {
        run.measure(number, 4, &apart);
    }
    assert_eq!(run.begun(60), []);
    assert_eq!(run.begun(60).len(), 2);
}

#[test]
fn a_draining_member_does_not_migrate() {
    let mut run = uneven(4, None);
    run.receive(1, ToCoordinator::Draining);
    assert_eq!(run.begun(10), to_first(2, MoveReason::Uneven));
}

#[test]
fn a_draining_member_is_replaced() {
    let mut run = uneven(3, None);
    // Two at each stage.
    assert_eq!(run.begun(60), to_first(1, MoveReason::Uneven));
    let moved = Step(0);
    run.coordinator.context.members.current.end_migration(member(1), moved);
    let _ = run.coordinator.context.members.current.set_position(Era(0), moved);
    assert_eq!(run.begun(60), []);
    // With a fifth member, the second stage has one more.
    let ToCoordinator::Register(candidate) = register(StageChoice::Span(StageSpan::one(Stage(1))))
    else {
        unreachable!("it does")
    };
    run.receive(
        4,
        ToCoordinator::Register(Candidate { room: StageRoom::in_memory(2), ..candidate }),
    );
    run.coordinator.context.members.current.begin_serving(member(4));
    assert_eq!(run.begun(60), []);
    run.receive(0, ToCoordinator::Draining);
    assert_eq!(run.begun(60), to_first(2, MoveReason::MembersGone));
    // It counts as missing once, whether it repeats this or leaves.
    run.receive(0, ToCoordinator::Draining);
    run.receive(0, ToCoordinator::Leave);
    assert_eq!(run.begun(60), []);
}

#[test]
fn a_drain_cancels_the_migration() {
    let mut run = uneven(3, None);
    assert_eq!(run.begun(60), to_first(1, MoveReason::Uneven));
    let reported = events(&run.receive(1, ToCoordinator::Draining));
    let (to, reason) = (StageSpan::one(Stage(0)), MoveReason::Uneven);
    let obstacle = MoveObstacle::Leaves;
    assert_eq!(
        reported,
        [CoordinatorEvent::MoveCancelled { member: member(1), to, reason, obstacle }]
    );
    let Some(LogRecord::View(change)) = run.logged.last() else { panic!("the change is logged") };
    assert!(change.here.iter().any(|record| record.member == member(1) && record.moves.is_none()));
    // It is not chosen again, nor does it change over when it reports that it is ready.
    let (version, view) = (Step(0), u64::MAX);
    assert_eq!(events(&run.receive(1, ToCoordinator::Ready { version, view })), []);
    assert!(run.begun(60).iter().all(|(mover, ..)| *mover != member(1)));
}

#[test]
fn the_last_member_that_stays_at_a_stage_does_not_change_over() {
    let mut run = uneven(3, None);
    assert_eq!(run.begun(60), to_first(1, MoveReason::Uneven));
    run.receive(2, ToCoordinator::Draining);
    run.receive(3, ToCoordinator::Draining);
    let view = run.coordinator.context.members.logged.number;
    let reported = events(&run.receive(1, ToCoordinator::Ready { version: Step(0), view }));
    let (to, reason) = (StageSpan::one(Stage(0)), MoveReason::Uneven);
    let obstacle = MoveObstacle::Needed;
    assert_eq!(
        reported,
        [CoordinatorEvent::MoveCancelled { member: member(1), to, reason, obstacle }]
    );
}

#[test]
fn a_member_that_lacks_a_result_of_its_own_stage_is_expelled_although_it_migrates() {
    for (of, goes) in [(Followed::Destination, false), (Followed::Own, true)] {
        let mut run = uneven(3, None);
        assert_eq!(run.begun(60), to_first(1, MoveReason::Uneven));
        run.coordinator.weights.newcomers_mut().forget(member(1));
        run.coordinator.weights.newcomers_mut().queue(member(1));
        let reported = events(&run.receive(1, ToCoordinator::Behind(of)));
        let lost = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { .. });
        assert_eq!(reported.iter().any(lost), goes);
    }
}

/// Routers of other members use the listed stages, and the next change may be far away.
#[test]
fn a_member_that_has_changed_over_is_listed_at_its_new_stage_at_once() {
    let mut run = Run::closed();
    run.coordinator.context.members.current.begin_migration(
        member(1),
        StageSpan::one(Stage(1)),
        MoveReason::Uneven,
    );
    run.coordinator.context.members.current.end_migration(member(1), Step(1));
    run.reduce(0, outcome());
    run.reduce(1, outcome());
    let mut views = run.logged.iter().rev().filter_map(|record| match record {
        LogRecord::View(change) => Some(change),
        _ => None,
    });
    let last = views.next().expect("a change is logged");
    let listed = last.here.iter().find(|record| record.member == member(1)).expect("it is listed");
    assert_eq!((listed.span, listed.moves), (StageSpan::one(Stage(1)), None));
}
