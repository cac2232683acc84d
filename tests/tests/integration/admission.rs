//! Admission to a run: tickets, permits, lists and bans, with whole processes.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Command;

use serde_json::Value as Json;
use shoal_tests::PATIENCE;
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained};
use shoal_tests::swarm::{SLOW, Swarm, own_address, start_command};
use toml::Value;

/// The exit code where no peer can be reached, or none admits the newcomer.
const NOT_ADMITTED: i32 = 3;

/// The exit code for unusable arguments.
const USAGE: i32 = 2;

const OWN_PORT: [&str; 2] = ["--listen", "127.0.0.1:0"];

fn run(mode: &str, steps: i64) -> Run {
    Run::tiny(&[("admission.mode", Value::from(mode)), ("training.steps", Value::from(steps))])
}

/// A command of the issuer of tickets, whose data directory is the first peer's.
fn issuer(swarm: &Swarm, words: &[&str]) -> Command {
    let mut command = shoal(words);
    command.arg("--data-dir").arg(swarm.data_dir(0));
    command
}

fn printed(swarm: &Swarm, words: &[&str]) -> String {
    Process::start("issuer", issuer(swarm, words)).end().success().trim().to_owned()
}

fn listed(swarm: &Swarm) -> Json {
    serde_json::from_str(&printed(swarm, &["invite", "ls", "--json"])).expect("it is JSON")
}

/// The reason why peer number `index` is refused.
fn refusal(swarm: &Swarm, address: &str, index: usize) -> String {
    swarm.newcomer(address, index, &OWN_PORT).end().failure(NOT_ADMITTED)
}

#[test]
fn a_ticket_admits_as_many_peers_as_it_has_uses() {
    let run = run("invite", 6);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "4"]);
    // Without a ticket.
    let reason = refusal(&swarm, &swarm.address, 7);
    assert!(reason.contains("ask its operator for one (`shoal invite new`)"), "{reason}");
    let turned = swarm.peers[0].event("connection_refused");
    assert_eq!(turned["reason"], "no_certificate");
    assert_eq!(turned["peer"], swarm.peer_id(7));
    // A ticket for two peers, and no third.
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    for index in [1, 2] {
        let mut peer = swarm.newcomer(&ticket, index, &OWN_PORT);
        peer.event("joined");
        swarm.peers.push(peer);
    }
    let reason = refusal(&swarm, &ticket, 3);
    assert!(reason.contains("all 2 uses of ticket 2 are used up"), "{reason}");
    let listed = listed(&swarm);
    assert_eq!(listed["tickets"][1]["state"], "used_up");
    let redeemed = listed["tickets"][1]["redeemed_by"].as_array().expect("a list").clone();
    assert_eq!(redeemed, [swarm.peer_id(1), swarm.peer_id(2)]);
    let another = printed(&swarm, &["invite", "new"]);
    swarm.peers.push(swarm.newcomer(&another, 3, &OWN_PORT));
    // The model has the same bits.
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

#[test]
fn a_certificate_outlives_its_process_and_every_peer_accepts_it() {
    let run = run("invite", 1_000_000);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "9"]);
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    for index in [1, 2] {
        let file = swarm.data_dir(index).with_extension("address");
        let file = file.to_str().expect("a path of this test").to_owned();
        let flags = [&OWN_PORT[..], &["--address-file", &file]].concat();
        let mut peer = swarm.newcomer(&ticket, index, &flags);
        peer.event("joined");
        swarm.peers.push(peer);
    }
    // The second life of peer 1 has only the address of peer 2. The ticket is used up.
    swarm.peers[1].kill();
    let elsewhere = format!("@{}", swarm.data_dir(2).with_extension("address").display());
    let mut again = swarm.newcomer(&elsewhere, 1, &OWN_PORT);
    again.event("joined");
    // The same peer with the same ticket is the same use.
    again.kill();
    drop(again);
    let mut again = swarm.newcomer(&ticket, 1, &OWN_PORT);
    again.event("joined");
    // A certificate is not valid for another peer.
    let run_folder =
        std::fs::read_dir(swarm.data_dir(1).join("runs")).expect("it took part in one");
    let name = run_folder.flatten().next().expect("it took part in one").file_name();
    let certificate =
        |index: usize| swarm.data_dir(index).join("runs").join(&name).join("admission");
    std::fs::create_dir_all(certificate(3)).expect("room for a folder");
    std::fs::copy(certificate(1).join("certificate"), certificate(3).join("certificate"))
        .expect("it has one");
    let reason = refusal(&swarm, &swarm.address, 3);
    assert!(
        reason.contains(&format!("the certificate is peer {}'s", swarm.peer_id(1))),
        "{reason}"
    );
}

#[test]
fn a_revoked_or_damaged_ticket_is_refused() {
    let run = run("invite", 1_000_000);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "9"]);
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    let mut peer = swarm.newcomer(&ticket, 1, &OWN_PORT);
    peer.event("joined");
    printed(&swarm, &["invite", "revoke", "2"]);
    // The connections of the peer end, with the reason.
    let reason = peer.end().failure(NOT_ADMITTED);
    assert!(reason.contains("ticket 2 was revoked"), "{reason}");
    let access_list = swarm.peers[0].event("access_list");
    assert_eq!(access_list["revoked"], 1);
    let reason = refusal(&swarm, &ticket, 2);
    assert!(reason.contains("ticket 2 was revoked"), "{reason}");
    // A ticket that was not copied whole.
    let reason = swarm.newcomer(&ticket[..ticket.len() - 3], 2, &OWN_PORT).end().failure(USAGE);
    assert!(reason.contains("copy all of it"), "{reason}");
}

#[test]
fn a_ban_ends_all_connections_and_the_run_continues() {
    let run = run("invite", 1_000_000);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3", "--stage", "all"]);
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    for (index, stage) in [(1, "1"), (2, "2")] {
        let flags = [&OWN_PORT[..], &["--stage", stage, "--name", "rack"]].concat();
        swarm.peers.push(swarm.newcomer(&ticket, index, &flags));
    }
    swarm.peers[2].event("committed");
    let banned = swarm.peer_id(2);
    // Names are not unique; the end of an identifier is.
    let reason = Process::start("issuer", issuer(&swarm, &["ban", "rack"])).end().failure(USAGE);
    assert!(reason.contains("rack may be any of 2 peers: rack ("), "{reason}");
    printed(&swarm, &["ban", &banned[banned.len() - 6..]]);
    let reason = swarm.peers.remove(2).end().failure(NOT_ADMITTED);
    assert!(reason.contains("banned from the run"), "{reason}");
    let lost = swarm.peers[0].event("lost");
    assert_eq!((&lost["peer"], &lost["name"]), (&banned.clone().into(), &"rack".into()));
    // The other member receives the access list as well.
    assert_eq!(swarm.peers[1].event("access_list")["banned"], 1);
    swarm.peers[1].event("committed");
    let reason = refusal(&swarm, &swarm.address, 2);
    assert!(reason.contains("banned from the run"), "{reason}");
    printed(&swarm, &["unban", &banned]);
    while swarm.peers[0].event("access_list")["banned"] != 0 {}
    let address = swarm.address.clone();
    let mut back = swarm.newcomer(&address, 2, &OWN_PORT);
    back.event("joined");
    // The command needs the issuer's data directory.
    let mut command = shoal(["ban", &banned, "--data-dir"]);
    command.arg(swarm.data_dir(1));
    let reason = Process::start("another", command).end().failure(USAGE);
    assert!(reason.contains(&swarm.peer_id(0)), "{reason}");
}

#[test]
fn an_allowlist_admits_the_peers_that_it_names() {
    let run = run("allowlist", 6);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    let reason = refusal(&swarm, &swarm.address, 1);
    assert!(reason.contains("for `shoal invite allow`"), "{reason}");
    let reason = Process::start("issuer", issuer(&swarm, &["invite", "new"])).end().failure(USAGE);
    assert!(reason.contains("shoal invite allow PEER"), "{reason}");
    printed(&swarm, &["invite", "allow", &swarm.peer_id(1), &swarm.peer_id(2)]);
    swarm.peers[0].event("access_list");
    swarm.join(&[]);
    swarm.join(&[]);
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

#[test]
fn hostile_connections_do_not_change_the_bits() {
    let run = run("invite", 12);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    let mut parts = swarm.address.split('/').skip(2);
    let (host, port) = (parts.next().expect("an address"), parts.nth(1).expect("a port"));
    let target: SocketAddr = format!("{host}:{port}").parse().expect("an address");
    // As many silent connections as this process may open, at most ten thousand.
    let silent: Vec<TcpStream> =
        (0..10_000).map_while(|_| TcpStream::connect_timeout(&target, PATIENCE).ok()).collect();
    let noise = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let mut packet = [0x5a; 1200];
    packet[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
    let send_noise = |count: u32| {
        for number in 0..count {
            let mut packet = packet;
            packet[6..10].copy_from_slice(&number.to_le_bytes());
            let _ = noise.send_to(&packet, target);
        }
    };
    send_noise(20_000);
    for index in [1, 2] {
        swarm.peers.push(swarm.newcomer(&ticket, index, &OWN_PORT));
    }
    let strangers = [5, 6, 7].map(|index| swarm.newcomer(&swarm.address, index, &OWN_PORT));
    swarm.peers[0].event("committed");
    send_noise(20_000);
    for stranger in strangers {
        let reason = stranger.end().failure(NOT_ADMITTED);
        assert!(reason.contains("peers with a ticket"), "{reason}");
    }
    drop(silent);
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

#[test]
fn where_a_majority_of_the_anchors_is_gone_the_issuer_removes_them() {
    let run = run("invite", 20);
    let homes = tempfile::tempdir().expect("room for a folder");
    let place = own_address().to_string();
    let first = ["--stage", "none", "--wait-for", "2", "--listen", &place];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &first);
    let ordinary = printed(&swarm, &["invite", "new", "--uses", "2"]);
    let flags = [&OWN_PORT[..], &["--anchor", "--stage", "none"]].concat();
    let reason = swarm.newcomer(&ordinary, 1, &flags).end().failure(NOT_ADMITTED);
    assert!(reason.contains("`shoal invite new --anchor`"), "{reason}");
    // The same peer gets more with another ticket.
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2", "--anchor"]);
    for index in [1, 2] {
        swarm.peers.push(swarm.newcomer(&ticket, index, &flags));
    }
    while swarm.peers[0].event("anchors")["count"] != 3 {}
    let worker = swarm.newcomer(&ordinary, 3, &[&OWN_PORT[..], SLOW].concat());
    swarm.peers[0].event("committed");
    swarm.peers[1].kill();
    swarm.peers[2].kill();
    swarm.peers[0].event("paused");
    swarm.peers[0].kill();
    let gone = [swarm.peer_id(1), swarm.peer_id(2)];
    printed(&swarm, &["anchor", "remove", &gone[0], &gone[1]]);
    drop(swarm);
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &first);
    assert!(
        swarm.peers[0].event("committed")["step"].as_u64() > Some(0),
        "it goes on where it was"
    );
    let reason = refusal(&swarm, &ticket, 1);
    assert!(reason.contains("banned from the run"), "{reason}");
    assert_eq!(swarm.finish().hash(), run.alone().hash());
    let _ = worker.end().success();
}

#[test]
fn any_member_goes_on_with_the_run_of_an_issuer_that_is_lost() {
    let run = run("invite", 20);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "9"]);
    let ticket = printed(&swarm, &["invite", "new", "--uses", "2"]);
    for index in [1, 2] {
        let mut peer = swarm.newcomer(&ticket, index, &OWN_PORT);
        peer.event("joined");
        peer.kill();
    }
    swarm.peers[0].kill();
    let out = tempfile::tempdir().expect("room for a folder");
    let mut command = start_command(&run.config(), &swarm.data_dir(1), out.path());
    command.args(OWN_PORT).args(["--no-mdns", "--wait-for", "2"]);
    let mut first = Process::start("peer-1", command);
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    // A certificate of the lost issuer admits it.
    let second = swarm.newcomer(&address, 2, &OWN_PORT);
    let _ = (first.end().success(), second.end().success());
    assert_eq!(Trained::read(out.path()).hash(), run.alone().hash());
}
