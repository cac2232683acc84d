//! Work that is computed again: what a peer gets wrong is found, and the run takes it back.

use serde_json::Value;
use shoal_tests::program::shoal;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

const COMPUTED: &str = "came to something else than most like replicas did from the same inputs";

/// A run of two stages, in which each peer's work of this share of the steps is audited.
fn audited(share: f64) -> Run {
    Run::tiny(&[
        ("training.steps", 8.into()),
        ("training.stages", 2.into()),
        ("checkpoint.every", 2.into()),
        ("audit.share", share.into()),
    ])
}

/// Three replicas of each stage, of which the last of a stage does something wrong, with what the run says of it. Returns
/// the hashes of the swarm and of one process.
fn hashes_with(error: &str, stage: &str, share: f64, charge: &str, basis: &str) -> [String; 2] {
    let run = audited(share);
    let at = |stage| ["--stage", stage];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "6"], &at("0")[..]].concat());
    for stage in ["0", "1", "1"] {
        swarm.join(&at(stage));
    }
    swarm.join(&at(if stage == "0" { "1" } else { "0" }));
    swarm.join_to_err(error, &at(stage));
    let convicted = swarm.peers[0].event("convicted");
    assert_eq!(convicted["peer"], swarm.peer_id(5), "{error}");
    assert_eq!(convicted["charge"], charge, "{error}");
    let ended = swarm.peers.remove(5).end();
    let said = ended.failure(3);
    assert!(said.contains(charge), "{error}: {said}");
    let peer = swarm.peer_id(5);
    let log = swarm.data_dir(0);
    let finished = swarm.finish();
    let checked = shoal(["audit", "--json", "--data-dir"]).arg(&log).output();
    let checked: Value = serde_json::from_slice(&checked.expect("it runs").stdout).expect("JSON");
    assert_eq!(checked[0]["peer"], peer, "{checked}");
    assert!(checked[0]["basis"].as_str().is_some_and(|found| found.contains(basis)), "{checked}");
    [finished.hash(), run.alone().hash()]
}

#[test]
fn a_gradient_that_is_left_out_is_found_and_the_model_is_that_without_the_peer() {
    let [swarm, alone] = hashes_with("gradient:2", "1", 1.0, COMPUTED, "2 of 3 voices");
    assert_eq!(swarm, alone);
}

#[test]
fn an_activation_that_is_off_by_a_bit_is_found_and_what_came_of_it_is_taken_back() {
    let [swarm, alone] = hashes_with("activation:1", "0", 0.5, COMPUTED, "2 of 3 voices");
    assert_eq!(swarm, alone);
}

#[test]
fn an_activation_that_is_not_the_stated_one_is_found_and_what_came_of_it_is_taken_back() {
    let charge = "signed two different contents of one tensor that it handed over";
    let [swarm, alone] = hashes_with("sent:2", "0", 0.03, charge, "two signatures");
    assert_eq!(swarm, alone);
}

#[test]
fn audits_of_sound_work_change_nothing_whoever_dies() {
    let run = audited(1.0);
    let slow = ["--slow-down", "15"];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "3"], &slow[..]].concat());
    swarm.join(&slow);
    swarm.join(&slow);
    swarm.reach(2);
    swarm.peers.remove(2).kill();
    swarm.join(&slow);
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}
