//! Peers that are of more use at another stage go there, and the model comes out bit for bit the same.

use shoal_tests::process::Process;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

/// Waits in each pass, so that all peers are about equally fast, whatever else the machine does.
const SLOW: &[&str] = &["--slow-down", "25"];

/// The stage that each peer hosts, in the order of their start.
fn stages(swarm: &mut Swarm) -> Vec<u64> {
    swarm.peers.iter_mut().map(Process::joined_stage).collect()
}

#[test]
fn a_stage_that_deaths_left_to_one_peer_gets_another_from_where_there_are_more() {
    let run = Run::of_two_stages(60, 0);
    let mut swarm =
        Swarm::start(&run.config(), &[&["--wait-for", "6", "--rebalance", "1"], SLOW].concat());
    for _ in 1..6 {
        swarm.join(SLOW);
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
    assert_eq!((&moves["to"], &moves["reason"]), (&starved.into(), &"members_gone".into()));
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["counted"], 60 * 6 * 2);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.report["moves"], 1);
    assert_eq!(trained.hash(), run.local("alone").hash());
}

/// Waits in each pass of two peers of six, four times as long as in those of the others.
const SLOWER: &[&str] = &["--slow-down", "100"];

#[test]
fn two_slowed_peers_of_six_are_no_stage_of_their_own_and_the_bits_are_the_same() {
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
    assert_eq!(trained.hash(), run.local("alone").hash());
}

/// Nine in three stages, of which deaths leave three, one and two: the one that is too many goes where
/// one is, and all stages have two, which is the most that six can get through.
#[test]
fn what_deaths_leave_comes_to_the_best_placement() {
    let run = Run::tiny(&[
        ("training.steps", toml::Value::from(50)),
        ("training.microbatches", toml::Value::from(12)),
    ]);
    let mut swarm =
        Swarm::start(&run.config(), &[&["--wait-for", "9", "--rebalance", "1"], SLOW].concat());
    for _ in 1..9 {
        swarm.join(SLOW);
    }
    let stages = stages(&mut swarm);
    let hosts = |stage: u64| (1..9).filter(|peer| stages[*peer] == stage).collect::<Vec<_>>();
    // The first peer keeps the run, and stays.
    let [starved, other, full] = [1, 2, 0].map(|further| (stages[0] + further) % 3);
    assert_eq!((hosts(starved).len(), hosts(other).len()), (3, 3), "{stages:?}");
    while swarm.peers[0].event("committed")["step"] != 4 {}
    let mut victims = [&hosts(starved)[1..], &hosts(other)[2..]].concat();
    victims.sort_unstable();
    for victim in victims.into_iter().rev() {
        swarm.peers.remove(victim).kill();
    }

    let moves = swarm.peers[0].event("moves");
    assert_eq!((&moves["from"][0], &moves["to"]), (&full.into(), &starved.into()), "{moves}");
    assert_eq!(moves["reason"], "members_gone");
    let trained = swarm.finish();
    // Nobody moved besides: (2, 2, 2).
    assert_eq!(trained.report["moves"], 1);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.local("alone").hash());
}
