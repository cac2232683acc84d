//! The coordinator chooses spans of several stages, and the model is bit-identical.

use shoal_tests::process::Process;
use shoal_tests::run::Run;
use shoal_tests::swarm::{SLOW, Swarm};
use toml::Value;

/// The stages of each peer, in the order of their start.
fn spans(swarm: &mut Swarm) -> Vec<Vec<u64>> {
    let stages = |peer: &mut Process| {
        let joined = peer.event("joined");
        let span = joined["span"].as_array().expect("a list");
        span.iter().map(|stage| stage.as_u64().expect("a stage")).collect()
    };
    swarm.peers.iter_mut().map(stages).collect()
}

/// A run of six stages of one layer.
fn six_stages(steps: i64) -> Run {
    Run::tiny(&[
        ("model.layers", Value::from(6)),
        ("training.stages", Value::from(6)),
        ("training.steps", Value::from(steps)),
        ("checkpoint.every", Value::from(2)),
    ])
}

#[test]
fn two_peers_share_six_stages_and_one_dies() {
    let run = six_stages(12);
    let flags = &[&["--wait-for", "2", "--rebalance", "0"], SLOW].concat();
    let mut swarm = Swarm::start(&run.config(), flags);
    swarm.join(SLOW);
    assert_eq!(spans(&mut swarm), [[0, 1, 2], [3, 4, 5]]);
    swarm.reach(4);
    swarm.peers.remove(1).kill();
    swarm.join(SLOW);
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_peer_that_waits_for_no_other_begins_alone_with_all_stages() {
    let run = six_stages(12);
    let mut swarm = Swarm::start(&run.config(), &[&["--rebalance", "0"], SLOW].concat());
    assert_eq!(spans(&mut swarm), [[0, 1, 2, 3, 4, 5]]);
    swarm.reach(2);
    swarm.join(SLOW);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

/// Two peers at one place begin with a stage each. With both stages at each no pipeline has to be filled.
#[test]
fn peers_get_longer_spans_where_steps_get_shorter() {
    let run = Run::of_two_stages(40, 0);
    let flags = &[&["--wait-for", "2", "--rebalance", "1"], SLOW].concat();
    let mut swarm = Swarm::start(&run.config(), flags);
    swarm.join(SLOW);
    assert_eq!(spans(&mut swarm), [[0], [1]]);
    for _ in 0..2 {
        let moves = swarm.peers[0].event("moves");
        assert_eq!((&moves["to"], &moves["reason"]), (&serde_json::json!([0, 1]), &"span".into()));
    }
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// A run of six stages of which the peers' memory holds two at once.
fn for_small_peers(steps: i64) -> Run {
    Run::of_stages(6, 192, steps)
}

/// Memory for two of its stages.
const SMALL: &[&str] = &["--memory", "40MiB", "--rebalance", "2"];

#[test]
fn a_peer_takes_the_stages_of_one_that_died_and_swaps_them() {
    let run = for_small_peers(8);
    let first = &[&["--wait-for", "3", "--extend-after", "1"], SMALL, SLOW].concat();
    let others = &[SMALL, SLOW].concat();
    let mut swarm = Swarm::start(&run.config(), first);
    swarm.join(others);
    swarm.join(others);
    let mut begins = spans(&mut swarm);
    begins.sort();
    assert_eq!(begins, [[0, 1], [2, 3], [4, 5]]);
    swarm.reach(2);
    swarm.peers.remove(1).kill();
    swarm.peers.remove(1).kill();
    let moves = swarm.peers[0].event("moves");
    let all = serde_json::json!([0, 1, 2, 3, 4, 5]);
    assert_eq!((&moves["to"], &moves["reason"]), (&all, &"stage_lost".into()));
    let finished = swarm.peers[0].event("finished");
    assert!(finished["swapped"]["read"].as_u64() > Some(0), "{finished}");
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_lone_small_peer_begins_and_others_come() {
    let run = for_small_peers(12);
    let first = &[&["--extend-after", "1"], SMALL, SLOW].concat();
    let mut swarm = Swarm::start(&run.config(), first);
    assert_eq!(spans(&mut swarm), [[0, 1]]);
    swarm.reach(2);
    swarm.join(&[SMALL, SLOW].concat());
    swarm.join(&[SMALL, SLOW].concat());
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}
