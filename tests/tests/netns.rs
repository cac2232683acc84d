//! Peers with addresses of their own, as on two machines.

use shoal_tests::namespace::Pair;
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained};
use shoal_tests::skip;
use shoal_tests::swarm::{join_command, start_command};

#[test]
fn peers_in_two_network_namespaces_train_together() {
    let pair = match Pair::new() {
        Ok(pair) => pair,
        Err(reason) => return skip(&format!("no network namespaces here: {reason}")),
    };
    let run = Run::tiny(&[]);
    let out = run.path("out");

    // Only the port is given: where each is reached is for them to find out.
    let mut start = start_command(&run.config(), &run.path("peer-0"), &out);
    start.args(["--listen", "0.0.0.0:7411", "--wait-for", "4"]);
    let mut first = Process::start("peer-0", pair.within(0, &start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    assert!(address.contains(Pair::ADDRESSES[0]), "{address}");

    let mut peers = vec![first];
    for (index, end) in [(1, 1), (2, 1), (3, 0)] {
        let name = format!("peer-{index}");
        let join = join_command(&address, &run.path(&name));
        peers.push(Process::start(&name, pair.within(end, &join)));
    }
    for peer in peers {
        let _ = peer.end().success();
    }
    let trained = Trained::read(&out);
    assert_eq!(trained.report["peers"], 4);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.local("alone").hash());
}
