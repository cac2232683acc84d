//! The trace of 600 seeds, with and without faults, as it was before the state machines were divided
//! into components: whatever moves code must leave every event of every run where it was.

use super::tests::on_all;
use super::{Report, Scenario, run};

/// Seeds whose traces one hash joins.
const BLOCK: u64 = 50;

/// The joined hash of each block of seeds.
fn hashes(scenario: fn(u64) -> Scenario) -> Vec<u64> {
    let trace_of =
        |seed| -> (u64, Report) { (seed, run(&scenario(seed)).expect("every promise holds")) };
    let mut reports = on_all(0..600, trace_of);
    reports.sort_by_key(|(seed, _)| *seed);
    let traces: Vec<u64> = reports.iter().map(|(_, report)| report.trace).collect();
    let join = |block: &[u64]| {
        block.iter().fold(0u64, |hash, trace| hash.rotate_left(7).wrapping_mul(31) ^ trace)
    };
    traces.chunks(BLOCK as usize).map(join).collect()
}

#[test]
fn traces_without_faults_are_as_recorded() {
    let recorded: [u64; 12] = [
        0xbabe8a618da54353,
        0xba12745847839539,
        0xc9dea6e342c95dde,
        0xfceff206114336bb,
        0x4e7dced2ecd81940,
        0x82dbc623f5bf6c7f,
        0xa13a6a18838543e4,
        0xdfe693b873663153,
        0x1c2f800d5cc3ae22,
        0xcfe1089731b58a9d,
        0x7efd267ed4f2f8b4,
        0xf99bf89c02c7d5e9,
    ];
    assert_eq!(hashes(Scenario::from_seed), recorded);
}

#[test]
fn traces_with_faults_are_as_recorded() {
    let recorded: [u64; 12] = [
        0x884edc91b4f1e024,
        0x91fdb829225e6bc3,
        0xf8b0d823dd7a3e90,
        0x59bd95518ccadf49,
        0x287a4d36bce905cb,
        0x3d162e2a42024c55,
        0x9655a54abbe18a4f,
        0xd3c80e8a44add259,
        0x1885164e6117ed72,
        0x0dffed987f5d71f8,
        0x8cfc47419553222f,
        0xe90d597539d01868,
    ];
    assert_eq!(hashes(Scenario::faulty), recorded);
}
