//! One stage at each peer (SWARM), and all stages swapped through each (ATOM), for GPT-3's shapes on links of
//! different speeds: prints the table of docs/benchmarks/swarms.md. With an argument it writes the figure there.

mod figure;

use std::time::Duration;

use shoal_protocol::codec::{Codec, SumCodec};
use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Codecs;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Rate};
use shoal_scheduler::planner::{Cut, Link, Tier, Work, advise_span};
use shoal_scheduler::sim::{
    self, ComputeScenario, ElementBytes, NetworkScenario, PeerScenario, Scenario, TierScenario,
};

/// Peers, and stages of the model.
const PEERS: u16 = 8;
/// Operations that a device computes in a second, and bytes of its memory.
const SPEED: f64 = 100e12;
const MEMORY: f64 = 80e9;
/// Tokens of a sample, and samples of a microbatch in the simulator.
const CONTEXT: u32 = 2048;
const SAMPLES: u32 = 4;
/// One-way latency between peers.
const LATENCY: Duration = Duration::from_millis(25);
/// Bytes per second of a device's host link, and bits per second of a peer's network.
const HOST_LINKS: [f64; 2] = [12e9, 50e9];
const NETWORKS: [f64; 4] = [1e7, 1e8, 1e9, 1e10];

/// A shape of GPT-3 (Brown et al. 2020, table 2.1): parameters, width, tokens of a step, and devices of a
/// peer, which must hold a stage.
struct Shape {
    name: &'static str,
    parameters: f64,
    hidden: u32,
    tokens: u32,
    devices: f64,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "1.3B", parameters: 1.3e9, hidden: 2048, tokens: 1_000_000, devices: 1.0 },
    Shape { name: "6.7B", parameters: 6.7e9, hidden: 4096, tokens: 2_000_000, devices: 1.0 },
    Shape { name: "13B", parameters: 13e9, hidden: 5140, tokens: 2_000_000, devices: 1.0 },
    Shape { name: "175B", parameters: 175e9, hidden: 12288, tokens: 3_200_000, devices: 8.0 },
];

/// Seconds of a step's passes, and of the whole step.
#[derive(Debug, Clone, Copy)]
struct Time {
    passes: f64,
    step: f64,
}

/// One line of the table.
pub(crate) struct Row {
    pub(crate) shape: &'static str,
    pub(crate) host_link: f64,
    pub(crate) network: f64,
    /// Times that ATOM is faster, in the simulator: passes alone, and whole steps.
    pub(crate) passes: f64,
    pub(crate) step: f64,
}

impl Shape {
    fn microbatches(&self) -> u32 {
        self.tokens / CONTEXT / SAMPLES
    }

    fn work(&self) -> Work {
        let forward = 2.0 * self.parameters / SPEED / self.devices;
        Work {
            tokens: u64::from(self.microbatches() * SAMPLES * CONTEXT),
            least: u64::from(CONTEXT),
            forward,
            backward: 2.0 * forward,
            overhead: 0.0,
            activation: f64::from(self.hidden) * 2.0,
            state: 14.0 * self.parameters,
            // The pipeline gets room for all that it keeps.
            kept: 0.0,
            memory: Some(MEMORY * self.devices),
        }
    }

    /// Both ways in the cost model. The all-reduce sends two bytes per weight in each of its two phases, at
    /// the rate of a peer; without one the update follows the passes.
    fn modelled(&self, host_link: f64, network: f64) -> [Time; 2] {
        let (work, stages) = (self.work(), usize::from(PEERS));
        let tier = Tier {
            rate: host_link * self.devices,
            weights: 2.0 * self.parameters,
            sums: 8.0 * self.parameters,
        };
        // An activation to the next peer and a gradient to the one before share a peer's rate.
        let link = Link { delay: LATENCY, rate: Rate((network / 16.0) as u64) };
        let time = |span, replicas, link, all_reduce| {
            let advice = advise_span(&work, Some(&tier), Cut { stages, span }, replicas, link);
            let passes = advice.expect("it fits").advice.passes.as_secs_f64();
            Time { passes, step: passes + all_reduce }
        };
        let share = f64::from(PEERS - 1) / f64::from(PEERS);
        let all_reduce = 2.0 * share * 2.0 * self.parameters * 8.0 / network;
        [time(1, 1, Some(link), 0.0), time(stages, stages, None, all_reduce)]
    }

    /// A run of the simulator: `atom` hosts all stages at each peer.
    fn simulated(&self, host_link: f64, network: f64, atom: bool) -> Time {
        let mut manifest = Scenario::small_manifest(PEERS, self.microbatches(), STEPS);
        manifest.model.hidden = self.hidden;
        manifest.model.context = CONTEXT;
        manifest.training.microbatch_size = SAMPLES;
        manifest.codec = Codecs::all(Codec::Bf16);
        manifest.codec.all_reduce = SumCodec::Rounded(Codec::Bf16);
        let of_stage = self.work().forward / f64::from(PEERS) * f64::from(SAMPLES * CONTEXT);
        let forward = Duration::from_secs_f64(of_stage);
        // Swapped stages keep no graphs and compute forward passes again.
        let backward = forward * if atom { 3 } else { 2 };
        let compute = ComputeScenario::passes(forward, backward, 0);
        let tiers = TierScenario {
            memory: Bytes((MEMORY * self.devices) as u64),
            rate: Rate((host_link * self.devices) as u64),
            element: ElementBytes { weights: 2, moments: 12, sums: 8 },
        };
        // What waits in a queue of transfers is not repeated.
        let transfer = manifest.activation_bytes().0 as f64 * 8.0 / network;
        let retry = Duration::from_secs_f64(QUEUE * transfer);
        let peer = |stage| {
            let span = StageSpan::one(Stage(stage));
            let choice = if atom { StageChoice::All } else { StageChoice::Span(span) };
            let mut peer = PeerScenario::plain(choice, PEERS, compute.clone());
            peer.limits.resident = if atom { 0 } else { usize::MAX };
            peer.limits.in_flight = Bytes(1 << 50);
            peer.limits.retry = retry;
            peer.tiers = atom.then(|| tiers.clone());
            peer
        };
        let rate = (network / 8.0) as u64;
        let even = NetworkScenario::even(LATENCY, Duration::ZERO, Some(rate));
        let network = NetworkScenario { uplink: Some(rate), ..even };
        let mut scenario = Scenario::plain(manifest, (0..PEERS).map(peer).collect(), network);
        scenario.weigh_stages((self.parameters / f64::from(PEERS)) as u64);
        scenario.patience = Duration::from_secs(1 << 24);
        let report = sim::run(&scenario).expect("no oracle objects");
        let ends: Vec<_> = report.steps.values().map(|step| (step.first, step.last)).collect();
        let [.., before, last] = ends.as_slice() else { unreachable!("there are several steps") };
        Time {
            passes: last.1.since(last.0).as_secs_f64(),
            step: last.1.since(before.1).as_secs_f64(),
        }
    }
}

/// Transfers of an activation after which an unanswered message is repeated.
const QUEUE: f64 = 200.0;

/// Steps of a simulation; the last one is measured.
const STEPS: u64 = 3;

fn main() -> std::io::Result<()> {
    println!(
        "{PEERS} peers and stages. Times are seconds of a step, in the simulator and (in the cost model)."
    );
    println!(
        "model  host GB/s  network Mb/s  SWARM passes         ATOM passes          ATOM step            faster: passes, step"
    );
    let mut rows = Vec::new();
    for shape in &SHAPES {
        for network in NETWORKS {
            let swarm = shape.simulated(HOST_LINKS[0], network, false);
            for host_link in HOST_LINKS {
                let atom = shape.simulated(host_link, network, true);
                let modelled = shape.modelled(host_link, network);
                let row = Row {
                    shape: shape.name,
                    host_link,
                    network,
                    passes: swarm.passes / atom.passes,
                    step: swarm.step / atom.step,
                };
                println!(
                    "{:5}  {:9.0}  {:12.0}  {:9.1} ({:8.1})  {:9.1} ({:8.1})  {:9.1} ({:8.1})  {:6.2} ({:6.2}), {:5.2} ({:5.2})",
                    shape.name,
                    host_link / 1e9,
                    network / 1e6,
                    swarm.passes,
                    modelled[0].passes,
                    atom.passes,
                    modelled[1].passes,
                    atom.step,
                    modelled[1].step,
                    row.passes,
                    modelled[0].passes / modelled[1].passes,
                    row.step,
                    modelled[0].step / modelled[1].step
                );
                rows.push(row);
            }
        }
    }
    std::env::args_os().nth(1).map_or(Ok(()), |path| std::fs::write(path, figure::draw(&rows)))
}
