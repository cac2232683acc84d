//! Optimizers whose state has other shapes than weights train the bits of one process through deaths. How each updates is
//! tested in the engine.

use shoal_tests::run::{Run, Trained};
use shoal_tests::swarm::{SLOW, Swarm};
use toml::Value;

/// A run of two stages and ten steps with this optimizer, and a checkpoint after every second step.
fn run_of(rule: &str) -> Run {
    let common =
        "learning_rate = 0.01\nwarmup_steps = 2\nweight_decay = 0.01\ngradient_clip = 1.0\n";
    Run::with_optimizer(
        &format!("{common}{rule}"),
        &[
            ("training.steps", Value::from(10)),
            ("training.stages", Value::from(2)),
            ("checkpoint.every", Value::from(2)),
        ],
    )
}

/// Checks the bits of a swarm's result, and that the loss fell.
fn assert_as_alone(trained: &Trained, run: &Run) {
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
    let losses = alone.losses();
    assert!(losses[9] < losses[0], "{losses:?}");
}

/// One of two replicas of a stage is killed, and a newcomer takes its place with a snapshot.
fn assert_survives_a_death(rule: &str) {
    let run = run_of(rule);
    let mut swarm = Swarm::slow_at(&run.config(), 4, 2);
    swarm.peers.remove(3).kill();
    swarm.join(SLOW);
    assert_as_alone(&swarm.finish(), &run);
}

#[test]
fn muon_survives_a_death() {
    assert_survives_a_death(
        "kind = \"muon\"\nrest_learning_rate = 3e-3\nfinal_learning_rate = 1e-3",
    );
}

/// The only replica of a stage is killed, and the stage is restored from a checkpoint, with what the optimizer
/// keeps.
fn assert_restored_from_a_checkpoint(rule: &str) {
    let run = run_of(rule);
    let mut swarm = Swarm::slow_at(&run.config(), 2, 4);
    swarm.peers.remove(1).kill();
    swarm.join(SLOW);
    let rewound = swarm.peers[0].event("rewound");
    assert!(rewound["version"].as_u64().expect("a number") >= 2, "{rewound}");
    assert_as_alone(&swarm.finish(), &run);
}

#[test]
fn adafactor_is_restored_from_a_checkpoint() {
    assert_restored_from_a_checkpoint("kind = \"adafactor\"\nschedule = \"constant\"");
}
