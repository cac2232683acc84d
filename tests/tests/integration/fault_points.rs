//! A process dies at each of the moments that could lose work or count it twice. Only debug builds have
//! these fault points.

use std::path::Path;

use shoal_tests::run::{Run, Trained};
use shoal_tests::swarm::{Swarm, own_address};

/// The steps of these runs, and the versions between two checkpoints.
const STEPS: i64 = 8;
const EVERY: i64 = 2;

/// Waits for the last peer of a swarm to die by a signal.
fn see_it_die(swarm: &mut Swarm) {
    let doomed = swarm.peers.pop().expect("it joined");
    assert_eq!(doomed.end().code, None, "the peer dies at its fault point");
}

/// Trains a run in which a peer dies at a moment, at a stage with another replica.
fn trained_through_a_death(run: &Run, moment: &str, stage: &str) -> Trained {
    trained_through_a_slow_death(run, moment, stage, "0")
}

/// The same, where the passes of the peer take so many milliseconds longer.
fn trained_through_a_slow_death(run: &Run, moment: &str, stage: &str, slow: &str) -> Trained {
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "4", "--stage", "0"]);
    swarm.join(&["--stage", "1"]);
    swarm.join(&["--stage", if stage == "0" { "1" } else { "0" }]);
    swarm.join_to_die(moment, &["--stage", stage, "--slow-down", slow]);
    see_it_die(&mut swarm);
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0, "{moment}");
    assert_eq!(trained.report["rewinds"], 0, "{moment}");
    trained
}

fn dies_beside_a_replica(moment: &str, stage: &str) {
    let run = Run::of_two_stages(STEPS, EVERY);
    let trained = trained_through_a_death(&run, moment, stage);
    assert_eq!(trained.hash(), run.alone().hash(), "{moment}");
}

/// With rounded sums a failed attempt does not change the next one. A dead replica takes along only its own rounding
/// error of the step before. A commit shows that both replicas of a stage hold the same result.
#[test]
fn during_an_all_reduce_of_rounded_sums() {
    let exact = Run::of_two_stages(STEPS, EVERY).alone();
    for (moment, stage) in [("reducing:3", "0"), ("reduced:2", "1")] {
        let run = Run::tiny(&[
            ("training.steps", toml::Value::from(STEPS)),
            ("training.stages", toml::Value::from(2)),
            ("checkpoint.every", toml::Value::from(EVERY)),
            ("codec.all_reduce", toml::Value::from("int8:32")),
        ]);
        let trained = trained_through_a_death(&run, moment, stage);
        assert_eq!(trained.losses().len(), STEPS as usize, "{moment}");
        for (loss, expected) in trained.losses().iter().zip(exact.losses()) {
            assert!((loss - expected).abs() < 0.02, "{moment}: {loss} instead of {expected}");
        }
    }
}

#[test]
fn after_an_activation_was_sent() {
    dies_beside_a_replica("forward-sent:4", "0");
}

#[test]
fn before_a_gradient_was_sent() {
    dies_beside_a_replica("gradient-unsent:4", "1");
}

/// The other stage has the gradient, and nobody that of the weights.
#[test]
fn after_a_gradient_was_sent_and_before_those_of_weights_are_there() {
    let run = Run::of_two_stages(STEPS, EVERY);
    let trained = trained_through_a_slow_death(&run, "adding:4", "1", "60");
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn during_an_all_reduce() {
    dies_beside_a_replica("reducing:3", "0");
}

#[test]
fn between_the_result_of_an_all_reduce_and_the_commit() {
    dies_beside_a_replica("reduced:2", "1");
}

#[test]
fn while_a_checkpoint_is_written() {
    let run = Run::of_two_stages(STEPS, EVERY);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "2", "--stage", "0"]);
    swarm.join_to_die("storing:2", &["--stage", "1"]);
    see_it_die(&mut swarm);
    swarm.join(&["--stage", "1"]);
    let trained = swarm.finish();
    // The only replica of its stage died, so the run rewinds to the checkpoint before.
    assert_eq!(trained.report["rewinds"], 1);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// The coordinator dies at a moment and is started again.
fn the_coordinator_dies(moment: &str) {
    let run = Run::of_two_stages(STEPS, EVERY);
    let homes = tempfile::tempdir().expect("room for a folder");
    let address = own_address().to_string();
    let flags = ["--listen", &address, "--wait-for", "3"];
    let mut swarm = Swarm::start_to_die(homes.path(), &run.config(), moment, &flags);
    swarm.join(&[]);
    swarm.join(&[]);
    let doomed = swarm.peers.remove(0);
    assert_eq!(doomed.end().code, None, "the coordinator dies at {moment}");
    let mut again = start_again(homes.path(), &run, &address);
    again.peers.append(&mut swarm.peers);
    let trained = again.finish();
    assert_eq!(trained.hash(), run.alone().hash(), "{moment}");
}

fn start_again(homes: &Path, run: &Run, address: &str) -> Swarm {
    Swarm::start_in(homes, &run.config(), &["--listen", address])
}

#[test]
fn the_coordinator_before_the_log_has_its_commit() {
    the_coordinator_dies("committing:3");
}

#[test]
fn the_coordinator_after_the_log_has_its_commit_and_before_it_is_sent() {
    the_coordinator_dies("committed:3");
}
