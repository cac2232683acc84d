//! TensorBoard reads the event files of a run, with the numbers of its report.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::{Run, Trained};
use shoal_tests::swarm::Swarm;

/// The curves of scalars by name: each a value by step.
type Curves = BTreeMap<String, BTreeMap<u64, f32>>;

/// The curves that TensorBoard reads in a folder. No step may be there twice.
fn read(folder: &Path) -> Curves {
    let read = python(Path::new("tests/python/scalars.py"), [folder]);
    let mut curves = Curves::new();
    for (tag, points) in read.as_object().expect("an object") {
        let curve = curves.entry(tag.clone()).or_default();
        for point in points.as_array().expect("a list") {
            let (step, value) = (point[0].as_u64(), point[1].as_f64());
            let step = step.expect("a step");
            let before = curve.insert(step, value.expect("a number") as f32);
            assert_eq!(before, None, "{tag} has step {step} twice");
        }
    }
    curves
}

/// Adds a step of a report, or of an event, to the curves that TensorBoard is expected to read.
fn expect(curves: &mut Curves, step: &Value) {
    let at = step["step"].as_u64().expect("a step");
    let number = |name: &str| step[name].as_f64();
    let rate = number("tokens").zip(number("seconds")).map(|(tokens, seconds)| tokens / seconds);
    for (tag, value) in [
        ("train/loss", number("loss")),
        ("train/learning_rate", number("learning_rate")),
        ("train/gradient_norm", number("gradient_norm")),
        ("throughput/tokens_per_second", rate),
        ("held_out/loss", number("held_out_loss")),
    ] {
        if let Some(value) = value {
            curves.entry(tag.to_owned()).or_default().insert(at, value as f32);
        }
    }
}

fn steps(trained: &Trained) -> &[Value] {
    trained.report["steps"].as_array().expect("a list")
}

#[test]
fn the_scalars_of_a_local_run_are_those_of_its_report() {
    let run = Run::tiny(&[]);
    let (out, board) = (run.path("out"), run.path("board"));
    let mut command =
        shoal(["local".as_ref(), run.config().as_os_str(), "--out".as_ref(), out.as_os_str()]);
    command.args(["--threads", "1", "--device", "cpu", "--tensorboard"]).arg(&board);
    let _ = Process::start("local", command).end().success();
    let trained = Trained::read(&out);
    let mut expected = Curves::new();
    steps(&trained).iter().for_each(|step| expect(&mut expected, step));
    let curves = read(&board);
    assert_eq!(curves, expected);
    assert_eq!(curves["train/loss"].len(), 4);
    assert_eq!(curves["held_out/loss"].len(), 2);
}

#[test]
fn the_scalars_go_on_after_a_kill_and_have_each_step_once() {
    let run = Run::tiny(&[("training.steps", 10.into()), ("checkpoint.every", 2.into())]);
    let board = run.path("board");
    let folder = board.to_str().expect("plain");
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = ["--stage", "all", "--slow-down", "15", "--tensorboard", folder];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &flags);
    // A step after a checkpoint, so that it is computed again.
    while swarm.peers[0].event("committed")["step"] != 5 {}
    let mut killed = swarm.peers.remove(0);
    killed.kill();
    let mut expected = Curves::new();
    for line in killed.end().stdout.lines() {
        let event: Value = serde_json::from_str(line).unwrap_or_default();
        if event["event"] == "committed" {
            expect(&mut expected, &event);
        }
    }
    tear_last_record(&board);

    let trained = Swarm::start_in(homes.path(), &run.config(), &flags).finish();
    let first = steps(&trained)[0]["step"].as_u64().expect("a step");
    let before = expected["train/loss"].len() as u64;
    assert!((1..=before).contains(&first), "it continues from a checkpoint: {first}");
    expected.values_mut().for_each(|curve| curve.retain(|step, _| *step < first));
    steps(&trained).iter().for_each(|step| expect(&mut expected, step));
    let curves = read(&board);
    assert_eq!(curves, expected);
    assert!(curves["train/loss"].keys().copied().eq(0..10));
}

/// Appends the beginning of a record, as a kill during a write leaves it.
fn tear_last_record(board: &Path) {
    let files: Vec<PathBuf> =
        fs::read_dir(board).expect("a folder").map(|entry| entry.expect("a file").path()).collect();
    let [file] = &files[..] else { panic!("one file of one process: {files:?}") };
    let mut file = OpenOptions::new().append(true).open(file).expect("it is there");
    file.write_all(&[90, 0, 0, 0, 0, 0, 0, 0, 1, 2]).expect("room");
}

#[test]
fn a_folder_that_cannot_be_written_ends_the_start_with_an_error() {
    let run = Run::tiny(&[]);
    let (out, board) = (run.path("out"), run.config().join("board"));
    let mut command =
        shoal(["local".as_ref(), run.config().as_os_str(), "--out".as_ref(), out.as_os_str()]);
    command.arg("--tensorboard").arg(&board);
    let reason = Process::start("local", command).end().failure(1);
    assert!(reason.contains("--tensorboard: the folder"), "{reason}");
}
