//! What audits cost, in the simulator: `make bench-audit`. Prints the time of a step for some shares of audited steps,
//! beside that without audits.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Audit;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;
use shoal_scheduler::action::{AuditOutcome, CoordinatorEvent};
use shoal_scheduler::sim::{
    self, ComputeScenario, NetworkScenario, PeerScenario, Scenario, Seen, Watch,
};

const STAGES: u16 = 2;
const REPLICAS: usize = 3;
const MICROBATCHES: u32 = 24;
const STEPS: u64 = 300;
const FORWARD: Duration = Duration::from_millis(100);
const BACKWARD: Duration = Duration::from_millis(200);
/// One way, between any two peers.
const LATENCY: Duration = Duration::from_millis(20);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{STAGES} stages of {REPLICAS} replicas, {MICROBATCHES} microbatches, passes of {FORWARD:?} and {BACKWARD:?}, \
         {LATENCY:?} one way, {STEPS} steps"
    );
    println!("| share | time a step | beside no audits | audits | work computed twice |");
    println!("|---|---|---|---|---|");
    let mut alone = None;
    for share in [0.0, 0.03, 0.1, 1.0] {
        let mut counts = Counts::default();
        let report = sim::run_watched(&scenario(share), &mut counts)?;
        let each = report.end.0.as_secs_f64() / STEPS as f64;
        let alone: f64 = *alone.get_or_insert(each);
        let all = STEPS * REPLICAS as u64 * u64::from(STAGES);
        println!(
            "| {share} | {each:.3} s | {:.3} | {} | {:.1} % |",
            each / alone,
            counts.sound,
            100.0 * counts.sound as f64 / all as f64
        );
    }
    Ok(())
}

fn scenario(share: f64) -> Scenario {
    let mut manifest = Scenario::small_manifest(STAGES, MICROBATCHES, STEPS);
    manifest.audit = Audit { share, probation: 0 };
    let peer = |number: usize| {
        let stage = Stage((number % usize::from(STAGES)) as u16);
        let compute = ComputeScenario::passes(FORWARD, BACKWARD, 10);
        PeerScenario::plain(StageChoice::Span(StageSpan::one(stage)), STAGES, compute)
    };
    let peers = (0..REPLICAS * usize::from(STAGES)).map(peer).collect();
    Scenario::plain(manifest, peers, NetworkScenario::even(LATENCY, LATENCY / 10, None))
}

/// The audits that found what was stated.
#[derive(Debug, Default)]
struct Counts {
    sound: u64,
}

impl Watch for Counts {
    fn sees(&mut self, _now: Moment, seen: Seen<'_>) {
        let sound = AuditOutcome::Sound;
        if let Seen::Decided(CoordinatorEvent::Audited { outcome, .. }) = seen {
            self.sound += u64::from(*outcome == sound);
        }
    }
}
