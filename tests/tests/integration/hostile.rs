//! Strangers in an open run: nothing that they send stops, changes, fills or freezes it.

use std::net::UdpSocket;
use std::time::Duration;

use shoal_tests::hostile::Stranger;
use shoal_tests::process::Process;
use shoal_tests::run::Run;
use shoal_tests::swarm::{SLOW, Swarm, own_address};

/// The memory that a process has in use, in bytes.
fn resident(process: &Process) -> u64 {
    let path = format!("/proc/{}/statm", process.id());
    let pages = std::fs::read_to_string(path).expect("the process runs");
    let resident = pages.split(' ').nth(1).expect("the second number");
    resident.parse::<u64>().expect("pages") * 4096
}

#[test]
fn a_stranger_neither_stops_nor_changes_nor_fills_a_run() {
    const MOST: u64 = 64 << 20;
    let run = Run::of_two_stages(30, 10);
    let flags = [&["--wait-for", "3"], SLOW].concat();
    let mut swarm = Swarm::start(&run.config(), &flags);
    let mut targets = vec![swarm.address.clone()];
    for index in 1..3 {
        let at = own_address();
        let listen = at.to_string();
        let flags = [&["--listen", &listen], SLOW].concat();
        let mut peer = swarm.newcomer(&swarm.address, index, &flags);
        peer.event("joined");
        swarm.peers.push(peer);
        let id = swarm.peer_id(index);
        targets.push(format!("/ip4/{}/tcp/{}/p2p/{id}", at.ip(), at.port()));
    }
    swarm.reach(3);
    let before: Vec<u64> = swarm.peers.iter().map(resident).collect();
    let victim = UdpSocket::bind("127.0.0.1:0").expect("a port");
    victim.set_nonblocking(true).expect("a socket");
    let at = victim.local_addr().expect("bound");
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().expect("threads");
    runtime.block_on(async {
        for target in &targets {
            let mut stranger = Stranger::connect(target).await;
            stranger.usurp(&[at; 8]);
            stranger.settle().await;
            stranger.leave().await;
            let mut stranger = Stranger::connect(target).await;
            for value in [0.001, f32::NAN] {
                stranger.flood(3..12, value).await;
            }
            stranger.settle().await;
            stranger.leave().await;
            let mut stranger = Stranger::connect(target).await;
            stranger.meddle(3..12);
            assert!(stranger.settle().await, "one that goes on is disconnected");
            stranger.leave().await;
        }
    });
    for (peer, before) in swarm.peers.iter().zip(before) {
        let grown = resident(peer).saturating_sub(before);
        assert!(grown <= MOST, "{grown} bytes more than before");
    }
    let sent = victim.recv_from(&mut [0; 2048]);
    assert!(sent.is_err(), "a packet to a third party: {sent:?}");
    runtime.shutdown_timeout(Duration::from_secs(10));
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}
