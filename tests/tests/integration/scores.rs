//! Scores of checkpoints: what a command prints about each is shown, and changes nothing.

use serde_json::json;
use shoal_tests::http::get;
use shoal_tests::run::Run;
use shoal_tests::swarm::{SLOW, Swarm, own_address};

/// Counts the files of weights and moments of a checkpoint; of the last one once a file `GATE` is there, so that the
/// observer is asked while it runs.
const COUNT: &str = r#"test "$SHOAL_VERSION" != 8 || until test -e 'GATE'; do sleep 0.05; done
    ls "$1" | grep -c 'safetensors$' | sed 's/.*/{"tensor_files": &}/'"#;

#[test]
fn an_observer_scores_checkpoints_and_the_model_stays_the_same() {
    let run = Run::of_two_stages(8, 2);
    let alone = run.local("alone");
    let last_only = r#"test "$SHOAL_VERSION" = 8 && echo '{"last": 1}'"#;
    let flags = ["--wait-for", "3", "--on-checkpoint", last_only];
    let mut swarm = Swarm::start(&run.config(), &[&flags[..], SLOW].concat());
    let http = own_address();
    let folder = tempfile::tempdir().expect("a folder");
    let gate = folder.path().join("gate");
    let count = COUNT.replace("GATE", gate.to_str().expect("UTF-8"));
    swarm.join(&["--observer", "--on-checkpoint", &count, "--http", &http.to_string()]);
    swarm.join(SLOW);
    let first = swarm.peers[1].event("scored");
    assert_eq!(first["scores"], json!({"tensor_files": 4.0}), "{first}");
    let (code, metrics) = get(http, "/metrics");
    let value = metrics.lines().find(|line| line.starts_with("shoal_checkpoint_score{"));
    assert_eq!(code, 200);
    assert!(
        value.is_some_and(|line| line.contains(r#"name="tensor_files""#) && line.ends_with(" 4")),
        "{metrics}"
    );
    let status = swarm.status(1);
    assert_eq!(status["scored"]["scores"], first["scores"], "{status:#}");
    assert!(swarm.ask(1, &["status"]).success().contains("tensor_files 4.0000"));
    assert!(
        swarm.peers[0].event("score_failed")["reason"]
            .as_str()
            .is_some_and(|reason| { reason.contains("it ended with exit code 1") })
    );
    // The last checkpoint is scored before its peers end.
    std::fs::write(gate, "").expect("a gate");
    while swarm.peers[1].event("scored")["version"] != 8 {}
    let trained = swarm.finish();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.report["scores"], json!({"8": {"last": 1.0}}));
}
