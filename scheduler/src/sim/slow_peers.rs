//! Replicas that are slow for a while or exaggerate their speed: each soon gets the share of work
//! that matches its speed.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan, Step};
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;

use super::*;

const STAGES: u16 = 3;

/// Replicas of each stage.
const REPLICAS: usize = 3;

const MICROBATCHES: u32 = 24;

/// The slow replica: the second one of the first stage, or of the next one.
const OF_THE_FIRST: usize = STAGES as usize;
const OF_THE_MIDDLE: usize = STAGES as usize + 1;

/// Equal replicas, links with a latency of a tenth of a forward pass.
fn swarm(forward: Duration, steps: u64) -> Scenario {
    let compute = ComputeScenario::passes(forward, forward * 2, 50);
    let peers = (0..REPLICAS).flat_map(|_| 0..STAGES).map(|stage| {
        PeerScenario::plain(
            StageChoice::Span(StageSpan::one(Stage(stage))),
            STAGES,
            compute.clone(),
        )
    });
    let manifest = Scenario::small_manifest(STAGES, MICROBATCHES, steps);
    let network = NetworkScenario::even(forward / 10, Duration::ZERO, None);
    let mut scenario = Scenario::plain(manifest, peers.collect(), network);
    scenario.log_delay = Duration::ZERO;
    scenario
}

/// When each step's first and last microbatches were counted at a peer's stage, and how many that
/// peer counted.
#[derive(Debug, Default)]
struct Counts {
    peer: usize,
    steps: BTreeMap<Step, (Moment, Moment, u32)>,
}

impl Watch for Counts {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        let Seen::Counted { peer, key } = seen else { return };
        if usize::from(key.stage.0) == self.peer % usize::from(STAGES) {
            let known = self.steps.entry(key.step).or_insert((now, now, 0));
            known.1 = now;
            known.2 += u32::from(peer == self.peer);
        }
    }
}

impl Counts {
    fn of(peer: usize, scenario: &Scenario) -> Self {
        Self::with(Corruption::Nothing, peer, scenario)
    }

    fn with(corruption: Corruption, peer: usize, scenario: &Scenario) -> Self {
        let mut counts = Self { peer, ..Self::default() };
        let report = World::new(scenario, corruption, true).watched(&mut counts).run();
        let report = report.expect("no oracle objects");
        let alone = run(&scenario.alone()).expect("a peer alone");
        assert_eq!(report.checkpoint, alone.checkpoint);
        counts
    }

    /// The fraction of some steps' microbatches that the peer counted.
    fn share(&self, steps: std::ops::Range<u64>) -> f64 {
        let own: u32 = steps.clone().map(|step| self.steps[&Step(step)].2).sum();
        f64::from(own) / f64::from(MICROBATCHES) / (steps.end - steps.start) as f64
    }

    /// The duration of some steps, from the end of the step before the first.
    fn time(&self, steps: std::ops::Range<u64>) -> Duration {
        let end = |step| self.steps[&Step(step)].1;
        end(steps.end - 1).since(end(steps.start - 1))
    }

    /// When a step's first microbatch is counted.
    fn begins(&self, step: u64) -> Duration {
        self.steps[&Step(step)].0.0
    }

    /// The first step that begins at a moment or later.
    fn first_after(&self, at: Duration) -> u64 {
        let mut steps = self.steps.iter();
        let found = steps.find(|(_, (first, ..))| first.0 >= at);
        found.expect("the run continues").0.0
    }
}

/// Steps after which a replica that was slow has its share again, and the number of steps measured
/// then.
const BACK_AFTER: u64 = 12;
const MEASURED: u64 = 10;

/// A replica is twenty times slower for about `slow_steps` steps, then as fast as before.
fn recovers(peer: usize, forward: Duration, slow_steps: u32) {
    let step = forward * 3 * MICROBATCHES / REPLICAS as u32;
    let mut scenario = swarm(forward, 80);
    let since = Counts::of(peer, &scenario).begins(6);
    let time = step * slow_steps;
    let slow = Fault::SlowPeer { peer, factor: 20, time };
    scenario.faults.happen = vec![(since, slow)];
    let counts = Counts::of(peer, &scenario);
    let [from, to] = [since, since + time].map(|at| counts.first_after(at));
    println!("peer {peer}, {forward:?}, slow from {from} to {to}:");
    let own: Vec<u32> = counts.steps.values().map(|(.., own)| *own).collect();
    println!("{own:?}");
    let back = to + BACK_AFTER..to + BACK_AFTER + MEASURED;
    let (before, after) = (counts.share(1..from - 1), counts.share(back.clone()));
    let time = counts.time(1..from - 1).as_secs_f64() / (from - 2) as f64;
    let time_after = counts.time(back).as_secs_f64() / MEASURED as f64;
    println!("share {before:.3} and {after:.3}; a step takes {time:.3} and {time_after:.3}");
    assert!(after >= 0.9 * before, "{after} of {before}");
    assert!(time >= 0.9 * time_after, "{time} before, {time_after} after");
}

/// With passes so short that no claim becomes overdue, and with longer ones.
#[test]
fn the_first_stage_recovers_from_a_slow_replica() {
    recovers(OF_THE_FIRST, Duration::from_millis(5), 20);
    recovers(OF_THE_FIRST, Duration::from_millis(100), 12);
}

#[test]
fn a_middle_stage_recovers_from_a_slow_replica() {
    recovers(OF_THE_MIDDLE, Duration::from_millis(5), 20);
    recovers(OF_THE_MIDDLE, Duration::from_millis(100), 12);
}

/// One pass that takes a hundred times as long, as when a machine stalls.
#[test]
fn one_slow_pass_costs_no_replica_its_share() {
    let forward = Duration::from_millis(5);
    for peer in [OF_THE_FIRST, OF_THE_MIDDLE] {
        let mut scenario = swarm(forward, 20);
        // It takes so long that no second pass begins meanwhile.
        let slow = Fault::SlowPeer { peer, factor: 100, time: forward * 3 };
        let since = Counts::of(peer, &scenario).begins(4) + forward * 10;
        scenario.faults.happen = vec![(since, slow)];
        let counts = Counts::of(peer, &scenario);
        let share = counts.share(10..20);
        let own: Vec<u32> = counts.steps.values().map(|(.., own)| *own).collect();
        println!("peer {peer}: {share:.3} {own:?}");
        assert!(share >= 0.9 / REPLICAS as f64, "{share}");
    }
}

/// A replica of the first or a later stage that reports a tenth of its service time gets about its
/// share all the same.
#[test]
fn a_replica_that_exaggerates_its_speed_gets_a_fair_share() {
    for microbatches in [MICROBATCHES, 4 * MICROBATCHES] {
        for peer in [OF_THE_FIRST, OF_THE_MIDDLE] {
            let mut scenario = swarm(Duration::from_millis(100), 16);
            scenario.manifest = Scenario::small_manifest(STAGES, microbatches, 16).into();
            let honest = Counts::of(peer, &scenario);
            let exaggerating = Counts::with(Corruption::ExaggerateSpeed { peer }, peer, &scenario);
            let of = |counts: &Counts| {
                let time = counts.time(4..16).as_secs_f64();
                (counts.share(4..16) * f64::from(MICROBATCHES) / f64::from(microbatches), time)
            };
            let ((fair, time), (share, longer)) = (of(&honest), of(&exaggerating));
            println!("{microbatches}, peer {peer}: {fair:.3} {share:.3}, {time:.1} {longer:.1}");
            assert!(share <= 1.3 * fair, "{share}, and {fair} is fair");
            assert!(longer <= 1.15 * time, "{longer} instead of {time}");
        }
    }
}
