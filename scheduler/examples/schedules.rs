//! Utilisation of engines in a pipeline over slow links: prints the tables of docs/benchmarks/swarms.md.

use std::time::Duration;

use shoal_scheduler::schedule::{Pipeline, Schedule, run_table, settle};

/// Round trips in milliseconds at which SWARM's authors measured.
const ROUND_TRIPS: [u64; 5] = [0, 10, 50, 100, 200];

/// Percent of a V100's time at 500 Mb/s and these round trips (Ryabinin et al. 2023, arXiv
/// 2301.11913).
const PUBLISHED: [(&str, [f64; 5]); 4] = [
    ("base", [18.0, 11.8, 4.9, 2.8, 1.5]),
    ("xxlarge", [32.1, 28.9, 20.1, 14.9, 10.1]),
    ("GPT-3", [82.1, 79.3, 70.3, 60.2, 48.5]),
    ("shared weights", [89.5, 87.2, 79.5, 71.5, 59.2]),
];

const STAGES: usize = 4;
const MICROBATCHES: usize = 64;

fn main() {
    println!(
        "Percent of engines' time: {STAGES} stages, {MICROBATCHES} microbatches a step, 500 Mb/s each way."
    );
    println!(
        "The layers' times are those that the published figures (SWARM, arXiv 2301.11913) imply."
    );
    for (name, published) in PUBLISHED {
        print_layer(name, published);
    }
}

/// Published figures follow `1 / u = 1 + (transfer + round trip) / compute`: one microbatch at a
/// time.
fn implied(published: [f64; 5]) -> (f64, f64) {
    let [first, .., last] = published.map(|percent| 100.0 / percent);
    let compute = ROUND_TRIPS[4] as f64 / (last - first);
    (compute, compute * (first - 1.0))
}

fn print_layer(name: &str, published: [f64; 5]) {
    let (compute, transfer) = implied(published);
    println!(
        "\n{name}: computes {compute:.1} ms a microbatch, activation and gradient are {transfer:.1} ms on a link"
    );
    println!(
        "  RTT ms  published  implied   GPipe    1F1B   eager   Shoal   bound   peak of GPipe, Shoal"
    );
    for (round_trip, percent) in ROUND_TRIPS.into_iter().zip(published) {
        let milliseconds = |time: f64| Duration::from_secs_f64(time / 1e3);
        let pipeline = Pipeline {
            stages: STAGES,
            microbatches: MICROBATCHES,
            forward: milliseconds(compute / 3.0),
            backward: milliseconds(compute * 2.0 / 3.0),
            delay: milliseconds(round_trip as f64 / 2.0),
            transfer: milliseconds(transfer / 2.0),
        };
        let tables = Schedule::ALL.map(|schedule| run_table(&pipeline, schedule));
        let [gpipe, plain, eager] = tables.each_ref().map(|outcome| outcome.utilisation() * 100.0);
        let (shoal, _) = settle(&pipeline);
        let bound = milliseconds(compute).as_secs_f64() * MICROBATCHES as f64 * 100.0
            / pipeline.least().as_secs_f64();
        println!(
            "  {round_trip:6}  {percent:9.1}  {:7.1}  {gpipe:6.1}  {plain:6.1}  {eager:6.1}  {:6.1}  {bound:6.1}   {}, {}",
            100.0 / (1.0 + (transfer + round_trip as f64) / compute),
            shoal.utilisation() * 100.0,
            tables[0].peak[0],
            shoal.peak[0]
        );
    }
}
