//! What a stage of unlike replicas keeps of their speeds together, by how senders choose between
//! them: prints the tables of docs/routing.md.

use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;
use shoal_scheduler::peer::PeerLimits;
use shoal_scheduler::router::Routing;
use shoal_scheduler::sim::{
    self, Clock, ComputeScenario, Fault, Faults, NetworkScenario, PeerScenario, Scenario, Seen,
    Watch,
};

/// How many times as long the passes of each replica of a stage take as those of the fastest.
const SLOWER: [u32; 3] = [1, 2, 4];

const STAGES: u16 = 3;
const STEPS: u64 = 6;

/// The passes of the fastest replica.
const FORWARD: Duration = Duration::from_millis(100);
const BACKWARD: Duration = Duration::from_millis(200);

/// The straggler is the fastest replica of the middle stage: from a moment on it takes ten times as
/// long.
const STRAGGLER: usize = 1;
const TENFOLD: u32 = 10;

/// Counted in a row at `SHARE` of the fluid rate or faster, so many microbatches show that what the
/// straggler did is over.
const IN_A_ROW: usize = 20;
const SHARE: f64 = 0.95;

const ROUTINGS: [(&str, Routing); 3] = [
    ("by speed", Routing::BySpeed),
    ("in turn", Routing::InTurn),
    ("at random", Routing::AtRandom),
];

fn main() -> Result<(), sim::Violation> {
    println!("{STAGES} stages of three replicas each, speeds 1 : 2 : 4");
    for microbatches in [32, 64, 128, 256, 512] {
        for (name, routing) in ROUTINGS {
            let scenario = scenario(microbatches, routing);
            let (counts, _) = counts(&scenario)?;
            println!("M {microbatches} {name}: {:.3}", share(&counts, microbatches));
            let mut scenario = scenario;
            let middle = between(&counts, microbatches, 3);
            let forever = Duration::from_secs(1 << 20);
            let slow = Fault::SlowPeer { peer: STRAGGLER, factor: TENFOLD, time: forever };
            scenario.faults.happen = vec![(middle.0, slow)];
            let (after, report) = self::counts(&scenario)?;
            let (gone, lost) = damage(&after, middle);
            if microbatches == 256 && std::env::var_os("X").is_some() {
                for c in after.windows(33).step_by(32) {
                    print!(
                        "{:.2}@{:.0} ",
                        32.0 / c[32].since(c[0]).as_secs_f64() / fluid(true),
                        c[0].0.as_secs_f64()
                    );
                }
                println!();
            }
            println!(
                "    straggler: gone after {gone:?}, lost {lost:.1}, whole {:.3}  recalled {}",
                share_after(&after, microbatches),
                report.recovery.recalled
            );
        }
    }
    Ok(())
}

fn scenario(microbatches: u32, routing: Routing) -> Scenario {
    let mut scenario = Scenario::from_seed(0);
    scenario.manifest = Scenario::small_manifest(STAGES, microbatches, STEPS).into();
    scenario.parameters = (0..STAGES).map(|stage| (Stage(stage), 16)).collect();
    scenario.network = NetworkScenario {
        latency: vec![vec![FORWARD / 10]],
        jitter: Duration::ZERO,
        bandwidth: None,
        duplicates_per_mille: 0,
        strays_per_mille: 0,
    };
    scenario.log_delay = Duration::ZERO;
    scenario.routing = routing;
    scenario.faults = Faults::default();
    let replicas = SLOWER.into_iter().flat_map(|slower| (0..STAGES).map(move |s| (slower, s)));
    scenario.peers = replicas.map(|(slower, stage)| peer(slower, Stage(stage))).collect();
    scenario
}

fn peer(slower: u32, stage: Stage) -> PeerScenario {
    PeerScenario {
        choice: StageChoice::One(stage),
        fits: [stage].into(),
        limits: PeerLimits::default(),
        start: Duration::ZERO,
        compute: ComputeScenario {
            forward: FORWARD * slower,
            backward: BACKWARD * slower,
            other: Duration::ZERO,
            jitter_per_mille: 50,
        },
        archive: false,
        region: 0,
        clock: Clock::default(),
    }
}

/// When microbatches were counted at the middle stage.
#[derive(Debug, Default)]
struct Counts(Vec<Moment>, std::collections::BTreeMap<usize, String>, u64, u64);

impl Watch for Counts {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        if std::env::var_os("Y").is_some() {
            if let Seen::Holds { peer, load } = &seen {
                self.1.insert(
                    *peer,
                    format!(
                        "{}/{}/{}",
                        load.accepted.values().next().unwrap_or(&0),
                        load.waiting.values().next().unwrap_or(&0),
                        load.window.values().next().unwrap_or(&0)
                    ),
                );
            }
            if let Seen::Counted { .. } = &seen {
                self.3 += 1;
            }
            if now.0.as_secs() / 2 != self.2 {
                self.2 = now.0.as_secs() / 2;
                println!(
                    "{} {} {:?}",
                    now.0.as_secs(),
                    self.3,
                    self.1.values().collect::<Vec<_>>()
                );
            }
        }
        if let Seen::Counted { key, .. } = seen
            && key.stage == Stage(STAGES / 2)
        {
            self.0.push(now);
        }
    }
}

fn counts(scenario: &Scenario) -> Result<(Vec<Moment>, sim::Report), sim::Violation> {
    let mut counts = Counts::default();
    let report = sim::run_watched(scenario, &mut counts)?;
    Ok((counts.0, report))
}

/// Microbatches a second that a stage gets through if work is divisible without end.
fn fluid(straggles: bool) -> f64 {
    let pass = (FORWARD + BACKWARD).as_secs_f64() * 1.025;
    let speeds = SLOWER.iter().enumerate().map(|(index, slower)| {
        let tenfold = if straggles && index == 0 { TENFOLD } else { 1 };
        1.0 / f64::from(slower * tenfold)
    });
    speeds.sum::<f64>() / pass
}

/// The part of the fluid rate from the end of the second step to that of the last.
fn share(counts: &[Moment], microbatches: u32) -> f64 {
    let step = microbatches as usize;
    let (from, to) = (counts[2 * step - 1], counts[counts.len() - 1]);
    (counts.len() - 2 * step) as f64 / to.since(from).as_secs_f64() / fluid(false)
}

fn share_after(counts: &[Moment], microbatches: u32) -> f64 {
    let step = microbatches as usize;
    let (from, to) = (counts[4 * step - 1], counts[counts.len() - 1]);
    (counts.len() - 4 * step) as f64 / to.since(from).as_secs_f64() / fluid(true)
}

/// The middle of a step.
fn between(counts: &[Moment], microbatches: u32, step: u32) -> Moment {
    counts[(step * microbatches + microbatches / 4) as usize]
}

/// After how many microbatches the damage is gone, and how many fewer were counted until then than
/// the fluid rate would have.
fn damage(counts: &[Moment], since: Moment) -> (Option<usize>, f64) {
    let after: Vec<f64> =
        counts.iter().filter(|at| **at > since).map(|at| at.since(since).as_secs_f64()).collect();
    let rate = fluid(true);
    let at = |k: usize| if k == 0 { 0.0 } else { after[k - 1] };
    let gone = (0..after.len() - IN_A_ROW)
        .find(|k| IN_A_ROW as f64 / (at(k + IN_A_ROW) - at(*k)) >= SHARE * rate);
    let lost = gone.map_or(f64::NAN, |k| at(k) * rate - k as f64);
    (gone, lost)
}
