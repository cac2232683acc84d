//! Tests of the router: claimed, observed and attempted service times.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use shoal_protocol::ids::{Incarnation, PeerId};

use super::*;

fn member(number: u8) -> Member {
    Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
}

fn router(service_times: &[u64]) -> Router {
    let mut router = Router::new(7);
    router.set_candidates((0..service_times.len()).map(|number| member(number as u8)));
    for (number, service_time) in service_times.iter().enumerate() {
        router.measured(member(number as u8), *service_time);
    }
    router
}

/// Distribution of the last half of `count` microbatches over these replicas, if the first of them
/// claims to be `exaggeration` times as fast as it is. Several are in flight at a time, and each
/// replica answers them one after the other.
fn last_go_to(service_times: &[u64], exaggeration: u64, count: usize) -> Vec<usize> {
    let mut router = router(&[]);
    router.set_candidates((0..service_times.len()).map(|number| member(number as u8)));
    for (number, service_time) in service_times.iter().enumerate() {
        let claims = if number == 0 { service_time / exaggeration } else { *service_time };
        router.measured(member(number as u8), claims);
    }
    let moment = |nanoseconds: u64| Moment(Duration::from_nanos(nanoseconds));
    let (mut free, mut coming) = (vec![0; service_times.len()], BTreeSet::new());
    let mut counts = vec![0; service_times.len()];
    let mut now = 0;
    for number in 0..count {
        let to = router.choose().expect("none is busy");
        let place = usize::from(to.peer.0[0]);
        counts[place] += usize::from(number >= count / 2);
        free[place] = now.max(free[place]) + service_times[place];
        coming.insert((free[place], to, now));
        if number >= 4 * service_times.len() {
            let (at, from, sent) = coming.pop_first().expect("some are in flight");
            now = at;
            router.answered(from, moment(sent), moment(now));
        }
    }
    counts
}

fn chosen(router: &mut Router, times: usize, of: usize) -> Vec<usize> {
    let mut counts = vec![0; of];
    for _ in 0..times {
        counts[usize::from(router.choose().expect("one is free").peer.0[0])] += 1;
    }
    counts
}

#[test]
fn work_is_in_proportion_to_speed_and_interleaved() {
    let mut router = router(&[1000, 2000, 4000]);
    assert_eq!(chosen(&mut router, 7, 3), [4, 2, 1]);
    let fast: Vec<bool> = (0..14).map(|_| router.choose() == Some(member(0))).collect();
    assert!(fast.windows(3).all(|three| three.contains(&true)), "{fast:?}");
}

#[test]
fn newcomers_are_tried_early_and_get_an_equal_share_afterwards() {
    let mut router = router(&[1000, 1000]);
    chosen(&mut router, 100, 2);
    router.set_candidates((0..3).map(member));
    router.measured(member(2), 1000);
    assert_eq!(chosen(&mut router, 30, 3), [10, 10, 10]);
}

#[test]
fn busy_candidates_are_skipped_and_do_not_catch_up() {
    let mut router = router(&[1000, 1000]);
    router.set_busy(member(0));
    assert_eq!(chosen(&mut router, 50, 2), [0, 50]);
    assert!(router.set_free(member(0)));
    assert!(!router.set_free(member(0)));
    let counts = chosen(&mut router, 20, 2);
    assert!(counts[0] <= 11, "{counts:?}");
    router.set_busy(member(0));
    router.set_busy(member(1));
    assert_eq!(router.choose(), None);
}

#[test]
fn a_refund_undoes_a_choice() {
    let mut router = router(&[1000, 3000]);
    let first = router.choose().expect("one is free");
    router.refund(first);
    assert_eq!(router.choose(), Some(first));
}

#[test]
fn distant_candidates_get_no_work_at_the_end_of_a_step() {
    let mut router = router(&[1000, 1000]);
    let path = |member: &Member| u64::from(member.peer.0[0]) * 3000;
    router.set_link_estimates(|member| Some(Duration::from_nanos(path(member))));
    let mut last = vec![Vec::new(); 2];
    for following in (0..20).rev() {
        let to =
            router.choose_in_time(Step(0), (following, false), |_| true).expect("none is busy");
        last[usize::from(to.peer.0[0])].push(following);
    }
    // 2 pieces per 1000 ns: an answer that takes 3000 ns longer needs 6 pieces after it.
    assert_eq!(last[1].last(), Some(&6), "{last:?}");
    // Before that both get an equal share.
    assert!(last[0].len().abs_diff(last[1].len()) <= 7, "{last:?}");
}

#[test]
fn the_last_work_of_a_step_goes_to_candidates_that_finish_it_in_time() {
    let all = |_: &Member| true;
    let mut router = router(&[1000, 2000, 4000]);
    let mut last = vec![Vec::new(); 3];
    for following in (0..21).rev() {
        let to = router.choose_in_time(Step(0), (following, false), all).expect("none is busy");
        last[usize::from(to.peer.0[0])].push(following);
    }
    // 7 pieces per 4000 ns: one that takes 3000 ns longer than the fastest needs 5.25 after it.
    assert!(last[2].iter().all(|following| *following >= 6), "{last:?}");
    assert!(last[1].iter().all(|following| *following >= 2), "{last:?}");
    // If only slow ones are eligible, they get it.
    let slow = |candidate: &Member| *candidate == member(2);
    assert_eq!(router.choose_in_time(Step(0), (0, false), slow), Some(member(2)));
}

/// The steps in which a replica gets work although it would be late with all of it.
fn tried_in(router: &mut Router, steps: std::ops::Range<u64>) -> Vec<u64> {
    let mut tried = Vec::new();
    for step in steps {
        for following in (0..8).rev() {
            let rest = (following, is_early(following as usize + 1, 8));
            let to = router.choose_in_time(Step(step), rest, |_| true);
            tried.extend((to == Some(member(1))).then_some(step));
        }
    }
    tried
}

#[test]
fn a_skipped_candidate_is_tried_less_often_and_recovers_its_share_when_fast() {
    let mut router = router(&[1000, 20_000, 1000]);
    let tried = tried_in(&mut router, 0..200);
    // The others do two per 1000 ns, so it needs five steps for one. Its first attempt was
    // immediate.
    let gaps: Vec<u64> = tried.windows(2).map(|two| two[1] - two[0]).collect();
    let wanted = [10, 20, 40, 40, 40];
    let near = |(gap, wanted): (&u64, &u64)| (*wanted..wanted + 5).contains(gap);
    assert!(gaps.len() >= 5 && gaps.iter().zip(&wanted).all(near), "{tried:?}");
    // An answer faster than claimed leads to another attempt at once.
    let moment = |microseconds| Moment(Duration::from_micros(microseconds));
    router.answered(member(1), moment(0), moment(4));
    assert_eq!(tried_in(&mut router, 200..202), [200]);
    router.measured(member(1), 1000);
    let part = tried_in(&mut router, 202..212).len();
    assert!((15..=30).contains(&part), "{part} of 80");
}

#[test]
fn one_late_answer_does_not_change_the_service_time() {
    let mut router = router(&[1000, 1000, 1000]);
    let moment = |nanoseconds: u64| Moment(Duration::from_nanos(nanoseconds));
    for answer in 1..100 {
        for number in 0..3 {
            let late = if (number, answer) == (1, 90) { 300_000 } else { 0 };
            let sent = moment(answer * 1_000_000);
            let at = moment(answer * 1_000_000 + 1000 + late);
            router.answered(member(number), sent, at);
        }
    }
    assert_eq!(router.believed(member(1)), Some(1000));
}

proptest! {
    /// Whatever a replica claims, its observed speed counts in the end.
    #[test]
    fn a_replica_that_exaggerates_its_speed_gets_a_fair_share(
        service_times in prop::collection::vec(1_000u64..8_000, 3..8),
        exaggeration in 1u64..100,
    ) {
        let speed: f64 = service_times.iter().map(|service_time| 1.0 / *service_time as f64).sum();
        let part = 1.0 / service_times[0] as f64 / speed;
        let counts = last_go_to(&service_times, exaggeration, 4_000);
        prop_assert!(counts[0] as f64 <= 2.2 * part * 2_000.0 + 10.0, "{counts:?} {part}");
    }

    #[test]
    fn counts_are_proportional_to_speed(
        service_times in prop::collection::vec(1_000u64..100_000, 1..12),
        rounds in 200usize..2000,
    ) {
        let mut router = router(&service_times);
        let counts = chosen(&mut router, rounds, service_times.len());
        let speed: f64 = service_times.iter().map(|service_time| 1.0 / *service_time as f64).sum();
        for (count, service_time) in counts.iter().zip(&service_times) {
            let expected = rounds as f64 / *service_time as f64 / speed;
            // No candidate is more than one piece of work ahead of its virtual time.
            prop_assert!((*count as f64 - expected).abs() <= service_times.len() as f64 + 1.0);
        }
    }
}
