//! The metrics of a training peer, as Prometheus scrapes them.

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use shoal_tests::http::page;
use shoal_tests::prometheus::value;
use shoal_tests::run::Run;
use shoal_tests::skip;
use shoal_tests::swarm::{Swarm, own_address};
use toml::Value;

/// The text of a scrape.
fn scrape(address: SocketAddr) -> String {
    page(address, "/metrics")
}

/// Bytes of a device's tensors of a kind.
fn taken(text: &str, kind: &str, device: usize) -> f64 {
    value(text, &format!(r#"shoal_tensor_memory_bytes{{device="{device}",kind="{kind}""#))
}

#[test]
fn peers_export_their_progress() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let addresses = [own_address(), own_address()];
    let listen = addresses.map(|address| address.to_string());
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3", "--metrics", &listen[0]]);
    swarm.join(&["--metrics", &listen[1], "--device", "cpu:2"]);
    swarm.join(&[]);
    for (place, address) in addresses.into_iter().enumerate() {
        for peer in &mut swarm.peers {
            peer.event("committed");
        }
        let text = scrape(address);
        assert!(value(&text, "shoal_steps_total") >= 1.0, "{text}");
        // 6 microbatches of 2 samples of 32 tokens.
        assert!(value(&text, "shoal_tokens_total") >= 384.0, "{text}");
        assert!(value(&text, "shoal_peers") == 3.0, "{text}");
        assert!((1.0..8.0).contains(&value(&text, "shoal_training_loss")), "{text}");
        assert!(value(&text, r#"shoal_node_state{state="serving""#) == 1.0, "{text}");
        assert!(value(&text, "shoal_stage_hosted") >= 1.0, "{text}");
        assert!(value(&text, "shoal_flops_total") > 1e6, "{text}");
        assert!(value(&text, "shoal_peak_flops_per_second") > 1e8, "{text}");
        assert!(
            value(&text, r#"shoal_phase_duration_seconds_count{phase="backward""#) >= 1.0,
            "{text}"
        );
        check(&text);
        // Links are sampled every second, which is a few steps, and tensors after each update.
        let sampled = (0..200).any(|_| {
            swarm.peers[0].event("committed");
            let text = scrape(address);
            value(&text, "shoal_link_rtt_seconds_count") >= 1.0 && taken(&text, "sums", 0) > 0.0
        });
        let text = scrape(address);
        assert!(sampled, "{text}");
        // Devices of one peer have the same weights, and what the optimizer keeps for a share of them each.
        let devices = 0..=place;
        let of_shares: f64 = devices.map(|device| taken(&text, "optimizer", device)).sum();
        assert!(of_shares == 2.0 * taken(&text, "weights", 0), "{text}");
        assert!(value(&text, "shoal_link_packets_total") > 0.0, "{text}");
        assert!(value(&text, "shoal_link_congestion_window_bytes_sum") > 1e4, "{text}");
    }
}

#[test]
fn a_restarted_peer_exports_the_progress_of_the_run() {
    let run = Run::of_two_stages(1_000_000, 2);
    let homes = tempfile::tempdir().expect("room for a folder");
    let first = ["--stage", "0", "--wait-for", "2"];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &first);
    swarm.join(&["--stage", "1"]);
    let checkpoint = swarm.peers[0].event("checkpoint");
    let version = checkpoint["version"].as_u64().expect("a version") as f64;
    drop(swarm);
    let address = own_address();
    // No peer hosts the other stage, so no step is committed.
    let flags = ["--stage", "0", "--metrics", &address.to_string()];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &flags);
    swarm.peers[0].event("became_coordinator");
    let text = scrape(address);
    assert!(value(&text, "shoal_step") >= version, "{text}");
    assert!(value(&text, "shoal_checkpoint_step") >= version, "{text}");
    assert_eq!(value(&text, "shoal_steps_total"), 0.0, "{text}");
}

#[test]
fn a_damaged_checkpoint_is_refused_and_counted() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let folder = run.path("archive");
    let checkpoint = folder.join("checkpoints/version-4");
    fs::create_dir_all(&checkpoint).expect("room for a folder");
    fs::write(checkpoint.join("shoal.json"), "{").expect("room for a file");
    let archive = folder.to_str().expect("a plain path");
    let address = own_address();
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "2", "--stage", "all"]);
    swarm.join(&["--archive", archive, "--metrics", &address.to_string()]);
    swarm.peers[1].event("committed");
    let text = scrape(address);
    let refused = r#"shoal_refused_total{reason="checkpoint""#;
    assert_eq!(value(&text, refused), 1.0, "{text}");
    assert!(checkpoint.is_dir(), "the damaged checkpoint remains");
}

/// Checks the text with promtool, where it is installed.
fn check(text: &str) {
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else { return skip("promtool is not installed") };
    let mut input = promtool.stdin.take().expect("it is piped");
    input.write_all(text.as_bytes()).expect("it reads");
    drop(input);
    let output = promtool.wait_with_output().expect("it ends");
    let found =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success() && found.concat().is_empty(), "{found:?}\n{text}");
}
