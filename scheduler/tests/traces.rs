//! A few traces of the simulator, with the product's limits, which unit tests make smaller.

use shoal_scheduler::sim::{self, Scenario};

/// Traces of swarms without faults and with them, as the example `traces` prints them.
const TRACES: &str = include_str!("traces.txt");

/// A change that is meant to change no decision passes this test; another one writes the file anew:
/// `cargo run -p shoal-scheduler --example traces -- 20 > scheduler/tests/traces.txt`.
#[test]
fn few_traces_are_those_of_before() {
    for line in TRACES.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [kind, seed, trace] = words[..] else { panic!("{line}") };
        let seed = seed.parse().expect("a seed");
        let scenario = match kind {
            "quiet" => Scenario::from_seed(seed),
            _ => Scenario::faulty(seed),
        };
        let report = sim::run(&scenario).expect("every oracle holds");
        assert_eq!(format!("{:016x}", report.trace), trace, "{kind} {seed}");
    }
}
