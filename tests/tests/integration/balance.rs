//! Peers move to stages with too little throughput, and the model is bit-identical.

use shoal_tests::process::Process;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

/// A wait in each pass, which makes all peers about equally fast under any load of the machine, and one stage at each.
const SLOW: &[&str] = &["--slow-down", "25", "--stage", "auto:1"];

/// The stage of each peer, in the order of their start.
fn stages(swarm: &mut Swarm) -> Vec<u64> {
    swarm.peers.iter_mut().map(Process::joined_stage).collect()
}

/// A longer one, for runs that go on for the seconds until deaths are noticed and others move: fewer steps, less work.
const SLOW_STEPS: &[&str] = &["--slow-down", "60", "--stage", "auto:1"];

#[test]
fn a_stage_with_one_peer_left_gets_another_from_a_larger_stage() {
    let run = Run::of_two_stages(28, 0);
    let mut swarm = Swarm::start(
        &run.config(),
        &[&["--wait-for", "6", "--rebalance", "1"], SLOW_STEPS].concat(),
    );
    for _ in 1..6 {
        swarm.join(SLOW_STEPS);
    }
    let stages = stages(&mut swarm);
    let starved = 1 - stages[0];
    let hosts: Vec<usize> = (0..6).filter(|peer| stages[*peer] == starved).collect();
    assert_eq!(hosts.len(), 3, "{stages:?}");
    while swarm.peers[0].event("committed")["step"] != 4 {}
    for victim in hosts[1..].iter().rev() {
        swarm.peers.remove(*victim).kill();
    }

    let moves = swarm.peers[0].event("moves");
    assert_eq!((&moves["to"][0], &moves["reason"]), (&starved.into(), &"members_gone".into()));
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["counted"], 28 * 6 * 2);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.report["moves"], 1);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// The wait in each pass of two of six peers: four times that of the others.
const SLOWER: &[&str] = &["--slow-down", "100", "--stage", "auto:1"];

#[test]
fn two_slow_peers_do_not_share_a_stage() {
    let run = Run::tiny(&[
        ("training.steps", toml::Value::from(12)),
        ("training.microbatches", toml::Value::from(24)),
    ]);
    let mut swarm =
        Swarm::start(&run.config(), &[&["--wait-for", "6", "--rebalance", "1"], SLOWER].concat());
    for index in 1..6 {
        swarm.join(if index == 3 { SLOWER } else { SLOW });
    }
    let at_first = stages(&mut swarm);
    let peers = swarm.peers.iter_mut().zip(&at_first);
    let placed: Vec<u64> = peers.map(|(peer, stage)| peer.last_stage(*stage)).collect();
    assert_ne!(placed[0], placed[3], "the slowed two together from {at_first:?}: {placed:?}");
    for stage in 0..3 {
        assert!(placed.contains(&stage), "{at_first:?}: {placed:?}");
    }
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["counted"], 12 * 24 * 3);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// Of nine peers in three stages deaths leave three, one and two. One peer moves, and every stage has two, which is
/// the placement with the most throughput.
#[test]
fn survivors_reach_the_best_placement() {
    let run = Run::tiny(&[
        ("training.steps", toml::Value::from(20)),
        ("training.microbatches", toml::Value::from(12)),
    ]);
    let mut swarm = Swarm::start(
        &run.config(),
        &[&["--wait-for", "9", "--rebalance", "1"], SLOW_STEPS].concat(),
    );
    for _ in 1..9 {
        swarm.join(SLOW_STEPS);
    }
    let stages = stages(&mut swarm);
    let hosts = |stage: u64| (1..9).filter(|peer| stages[*peer] == stage).collect::<Vec<_>>();
    // The first peer is the coordinator and does not die.
    let [starved, other, full] = [1, 2, 0].map(|further| (stages[0] + further) % 3);
    assert_eq!((hosts(starved).len(), hosts(other).len()), (3, 3), "{stages:?}");
    while swarm.peers[0].event("committed")["step"] != 4 {}
    let mut victims = [&hosts(starved)[1..], &hosts(other)[2..]].concat();
    victims.sort_unstable();
    for victim in victims.into_iter().rev() {
        swarm.peers.remove(victim).kill();
    }

    let moves = swarm.peers[0].event("moves");
    assert_eq!((&moves["from"][0], &moves["to"][0]), (&full.into(), &starved.into()), "{moves}");
    assert_eq!(moves["reason"], "members_gone");
    let trained = swarm.finish();
    // No other peer moved: (2, 2, 2).
    assert_eq!(trained.report["moves"], 1);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}
