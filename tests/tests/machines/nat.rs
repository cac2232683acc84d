//! Peers in homes, behind routers that drop unsolicited packets.

use serde_json::Value;
use shoal_tests::nat::{Homes, Nat, PORT};
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained};
use shoal_tests::skip;
use shoal_tests::swarm::{join_command, start_command};

/// The homes; `None` where the machine cannot have any.
fn homes(nats: &[Nat]) -> Option<Homes> {
    match Homes::new(nats) {
        Ok(homes) => Some(homes),
        Err(reason) => {
            skip(&format!("homes behind routers: {reason}"));
            None
        }
    }
}

/// Trains a run with two peers in homes and a first peer outside, which hosts no stage: all tensors go from home to
/// home. Gives the bytes that the first peer relayed, and the bytes of tensors that the two sent; `None` where the
/// machine cannot have homes.
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
    assert_eq!(trained.report["microbatches"]["replayed"], 0, "no peer was expelled");
    assert_eq!(trained.hash(), run.alone().hash());
    let bytes = |sent: &Value, kind: &str| sent.get(kind).and_then(Value::as_u64).unwrap_or(0);
    Some((bytes(&sent[0], "relay"), bytes(&sent[1], "tensor") + bytes(&sent[2], "tensor")))
}

#[test]
fn peers_behind_symmetric_nats_train_through_a_relay() {
    let Some((relayed, tensors)) = train([Nat::Symmetric, Nat::Symmetric]) else { return };
    assert!(relayed >= tensors, "{relayed} of {tensors} bytes");
}

#[test]
fn peers_behind_restricted_nats_connect_directly() {
    let Some((relayed, tensors)) = train([Nat::Restricted, Nat::Restricted]) else { return };
    assert!(relayed < tensors / 2, "{relayed} of {tensors} bytes");
}

#[test]
fn a_peer_behind_a_full_cone_is_reachable_from_behind_a_symmetric_nat() {
    let Some((relayed, tensors)) = train([Nat::FullCone, Nat::Symmetric]) else { return };
    assert!(relayed < tensors / 2, "{relayed} of {tensors} bytes");
}

#[test]
fn peers_join_a_first_peer_at_home_through_the_port_that_its_router_opens() {
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
    // One joiner is outside, the other behind a router that opens no port.
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
    assert_eq!(Trained::read(&out).hash(), run.alone().hash());
    assert!(!homes.has_open_ports(), "the peer closed its port when it left");
}

/// A waiting first peer outside and a second one, with their addresses.
fn outside(homes: &Homes, run: &Run) -> ([Process; 2], [String; 2]) {
    let mut start = start_command(&run.config(), &run.path("peer-0"), &run.path("out"));
    start.args(["--listen", &format!("0.0.0.0:{PORT}"), "--wait-for", "9"]);
    let mut first = Process::start("peer-0", homes.outside(&start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    let mut join = join_command(&address, &run.path("peer-1"));
    join.args(["--listen", &format!("0.0.0.0:{}", PORT + 1), "--no-mdns"]);
    let file = run.path("address");
    join.arg("--address-file").arg(&file);
    let mut second = Process::start("peer-1", homes.outside(&join));
    second.event("joined");
    let other = std::fs::read_to_string(file).expect("the peer joined").trim().to_owned();
    ([first, second], [address, other])
}

#[test]
fn a_peer_learns_from_others_whether_its_port_is_reachable() {
    let kinds = [
        (Nat::Open, "open"),
        (Nat::Firewall, "firewall"),
        (Nat::FullCone, "open"),
        (Nat::Restricted, "router"),
        (Nat::Symmetric, "router"),
    ];
    let Some(homes) = homes(&kinds.map(|(nat, _)| nat)) else { return };
    let run = Run::tiny(&[("training.steps", toml::Value::from(1_000_000))]);
    let (_peers, addresses) = outside(&homes, &run);
    let doctors = kinds.iter().enumerate().map(|(home, (nat, _))| {
        let mut doctor = shoal(["doctor", "--json", "--device", "cpu", "--listen"]);
        doctor.arg(format!("0.0.0.0:{PORT}")).args(&addresses);
        doctor.arg("--data-dir").arg(run.path(&format!("doctor-{home}")));
        (nat, Process::start(&format!("doctor {nat:?}"), homes.within(home, &doctor)))
    });
    for (nat, doctor) in doctors.collect::<Vec<_>>() {
        let printed = doctor.end().success();
        let findings: Vec<Value> = serde_json::from_str(&printed).expect("it is JSON");
        let own = findings.iter().find(|finding| finding["about"] == "own port, UDP");
        let own = own.unwrap_or_else(|| panic!("{nat:?}: {printed}"));
        let (says, fix) = (own["says"].as_str().expect("text"), own["fix"].as_str());
        let (state, part, wanted) = match nat {
            Nat::Open | Nat::FullCone => ("well", "open: others dial in at", None),
            Nat::Firewall => ("note", "closed: no peer", Some("open UDP port 7411")),
            Nat::Restricted => {
                ("note", "only peers that it has sent to", Some("forward port 7411"))
            }
            _ => ("note", "symmetric NAT", Some("forward port 7411")),
        };
        assert_eq!(own["state"], state, "{nat:?}: {own}");
        assert!(says.contains(part), "{nat:?}: {own}");
        assert_eq!(fix.is_some(), wanted.is_some(), "{nat:?}: {own}");
        assert!(fix.zip(wanted).is_none_or(|(fix, wanted)| fix.contains(wanted)), "{own}");
    }
    // A running peer finds out by itself.
    let peers = kinds.iter().enumerate().map(|(home, (nat, state))| {
        let mut join = join_command(&addresses[0], &run.path(&format!("home-{home}")));
        join.args(["--listen", &format!("0.0.0.0:{PORT}"), "--no-mdns", "--observer"]);
        (state, nat, Process::start(&format!("{nat:?}"), homes.within(home, &join)))
    });
    for (state, nat, mut peer) in peers.collect::<Vec<_>>() {
        assert_eq!(peer.event("own_port")["state"], **state, "{nat:?}");
    }
}

#[test]
fn a_peer_that_could_not_join_closes_its_port_at_the_router() {
    let Some(homes) = homes(&[Nat::Opening]) else { return };
    let run = Run::tiny(&[]);
    let id = Process::start("id", {
        let mut id = shoal(["id", "--data-dir"]);
        id.arg(run.path("nobody"));
        id
    });
    let nobody = format!("/ip4/{}/tcp/7499/p2p/{}", Homes::outer(0), id.end().success().trim());
    let mut join = join_command(&nobody, &run.path("peer"));
    join.args(["--listen", &format!("0.0.0.0:{PORT}"), "--no-mdns", "--wait", "0"]);
    let peer = Process::start("peer", homes.within(0, &join));
    let deadline = std::time::Instant::now() + shoal_tests::PATIENCE;
    while !homes.has_open_ports() {
        assert!(std::time::Instant::now() < deadline, "the peer does not open a port");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let _ = peer.end().failure(3);
    assert!(!homes.has_open_ports());
}
