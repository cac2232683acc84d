//! Peers in homes, whose routers let in nobody who was not asked.

use serde_json::Value;
use shoal_tests::nat::{Homes, Nat, PORT};
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained};
use shoal_tests::skip;
use shoal_tests::swarm::{join_command, start_command};

/// None where this machine cannot.
fn homes(nats: &[Nat]) -> Option<Homes> {
    match Homes::new(nats) {
        Ok(homes) => Some(homes),
        Err(reason) => {
            skip(&format!("no homes here: {reason}"));
            None
        }
    }
}

/// Two peers in homes train through a first one outside, which hosts nothing: whatever is computed goes from
/// home to home. Gives the bytes that it passed on for them, and those of tensors that they sent; none
/// where this machine cannot.
fn train(nats: [Nat; 2]) -> Option<(u64, u64)> {
    let homes = homes(&nats)?;
    let run = Run::of_two_stages(40, 0);
    let out = run.path("out");
    let mut start = start_command(&run.config(), &run.path("peer-0"), &out);
    let everywhere = format!("0.0.0.0:{PORT}");
    start.args(["--listen", &everywhere, "--wait-for", "3", "--stage", "none"]);
    let mut first = Process::start("peer-0", homes.outside(&start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    let mut peers: Vec<Process> = (0..nats.len())
        .map(|home| {
            let name = format!("peer-{}", home + 1);
            let mut join = join_command(&address, &run.path(&name));
            join.args(["--listen", &everywhere, "--stage", &home.to_string()]);
            join.args(["--slow-down", "20"]);
            Process::start(&name, homes.within(home, &join))
        })
        .collect();
    peers.insert(0, first);
    let sent: Vec<Value> =
        peers.iter_mut().map(|peer| peer.event("finished")["sent"].clone()).collect();
    for peer in peers {
        let _ = peer.end().success();
    }
    let trained = Trained::read(&out);
    assert_eq!(trained.report["microbatches"]["replayed"], 0, "nobody was expelled");
    assert_eq!(trained.hash(), run.local("alone").hash());
    let bytes = |sent: &Value, kind: &str| sent.get(kind).and_then(Value::as_u64).unwrap_or(0);
    Some((bytes(&sent[0], "relay"), bytes(&sent[1], "tensor") + bytes(&sent[2], "tensor")))
}

#[test]
fn peers_behind_symmetric_nats_train_through_a_third() {
    let Some((relayed, tensors)) = train([Nat::Symmetric, Nat::Symmetric]) else { return };
    assert!(relayed >= tensors, "{relayed} of {tensors} bytes");
}

#[test]
fn peers_behind_restricted_nats_find_a_direct_way() {
    let Some((relayed, tensors)) = train([Nat::Restricted, Nat::Restricted]) else { return };
    assert!(relayed < tensors / 2, "{relayed} of {tensors} bytes");
}

#[test]
fn a_peer_behind_a_full_cone_is_reached_from_behind_a_symmetric_nat() {
    let Some((relayed, tensors)) = train([Nat::FullCone, Nat::Symmetric]) else { return };
    assert!(relayed < tensors / 2, "{relayed} of {tensors} bytes");
}

#[test]
fn a_first_peer_at_home_is_joined_by_the_port_that_its_router_opens() {
    let Some(homes) = homes(&[Nat::Opening, Nat::Symmetric]) else { return };
    let run = Run::of_two_stages(20, 0);
    let out = run.path("out");
    let mut start = start_command(&run.config(), &run.path("peer-0"), &out);
    let everywhere = format!("0.0.0.0:{PORT}");
    start.args(["--listen", &everywhere, "--wait-for", "3", "--stage", "0"]);
    let mut first = Process::start("peer-0", homes.within(0, &start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    assert!(address.starts_with(&format!("/ip4/{}/tcp/{PORT}/", Homes::outer(0))), "{address}");
    assert!(homes.has_open_ports());
    // One of them is anywhere, the other behind a router that opens nothing.
    let join = |name: &str| {
        let mut join = join_command(&address, &run.path(name));
        join.args(["--listen", &everywhere, "--stage", "1"]);
        join
    };
    let outside = Process::start("peer-1", homes.outside(&join("peer-1")));
    let other = Process::start("peer-2", homes.within(1, &join("peer-2")));
    first.event("finished");
    for peer in [first, outside, other] {
        let _ = peer.end().success();
    }
    assert_eq!(Trained::read(&out).hash(), run.local("alone").hash());
    assert!(!homes.has_open_ports(), "the peer closed it when it left");
}
