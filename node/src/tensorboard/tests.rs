use std::fs::OpenOptions;

use proptest::prelude::*;

use super::message::{Content, SessionLog};
use super::*;

/// The whole records at the beginning of a file, and the bytes after them.
fn records(mut bytes: &[u8]) -> (Vec<Event>, usize) {
    let mut events = Vec::new();
    while let Some((length, _)) = bytes.split_first_chunk() {
        let length = usize::try_from(u64::from_le_bytes(*length)).expect("it fits");
        let Some(message) = bytes.get(12..12 + length) else { break };
        let whole = record(message);
        if !bytes.starts_with(&whole) {
            break;
        }
        events.push(Event::decode(message).expect("a message"));
        bytes = &bytes[whole.len()..];
    }
    (events, bytes.len())
}

/// The steps that a reader keeps of a folder's files, with their scalars.
fn read(folder: &Path) -> Vec<(u64, Vec<(String, f32)>)> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let mut steps: Vec<(u64, Vec<(String, f32)>)> = Vec::new();
    for path in paths {
        for event in records(&fs::read(path).expect("a file")).0 {
            let at = u64::try_from(event.step).expect("a step");
            match event.content {
                Some(Content::FileVersion(version)) => assert_eq!(version, "brain.Event:2"),
                Some(Content::SessionLog(log)) => {
                    assert_eq!(log.status, SessionLog::START);
                    steps.retain(|(step, _)| *step < at);
                }
                Some(Content::Summary(summary)) => {
                    let scalar = |value: message::Value| value.scalar.expect("a scalar");
                    let named = |value: message::Value| (value.tag.clone(), scalar(value));
                    steps.push((at, summary.values.into_iter().map(named).collect()));
                }
                None => panic!("an empty event"),
            }
        }
    }
    steps
}

fn step(step: u64, loss: f64) -> RunEvent {
    RunEvent::Committed(StepReport {
        step,
        loss,
        held_out_loss: step.is_multiple_of(2).then_some(5.5),
        learning_rate: 0.0,
        gradient_norm: 1.25,
        tokens: 1000,
        targets: 900,
        padded: 50,
        preferences: None,
        seconds: 0.5,
        cost: None,
        counted: 8,
        replayed: 0,
        all_reduce_seconds: None,
        duplicated: 0,
        peers: 1,
    })
}

/// Writes steps with one process, and returns its file.
fn write(folder: &Path, steps: &[(u64, f64)]) -> PathBuf {
    let mut board = TensorBoard::open(folder).expect("a file");
    board.note(&RunEvent::Serving { version: 0 });
    steps.iter().for_each(|(at, loss)| board.note(&step(*at, *loss)));
    board.path
}

fn losses(folder: &Path) -> Vec<(u64, f32)> {
    read(folder).into_iter().map(|(step, scalars)| (step, scalars[0].1)).collect()
}

#[test]
fn records_have_the_bytes_that_tensorboard_writes() {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let version = record(&Event::file_version(1.5).encode_to_vec());
    let scalars = Event::scalars(2.5, 7, &[("a", 0.0), ("b/c", 0.1)]);
    let scalars = record(&scalars.encode_to_vec());
    let restart = record(&Event::restart(3.5, 300).encode_to_vec());
    assert_eq!(hex(&version), GOLDEN[0]);
    assert_eq!(hex(&scalars), GOLDEN[1]);
    assert_eq!(hex(&restart), GOLDEN[2]);
}

/// Written by `RecordWriter` with the message types of Python's tensorboard 2.21.0.
const GOLDEN: [&str; 3] = [
    "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c",
    "2300000000000000b09f774309000000000000044010072a160a080a016115000000000a0a0a03622f6315cdcccc3d5820bece",
    "100000000000000095fbfe18090000000000000c4010ac023a0208011a55a2e0",
];

#[test]
fn a_step_has_its_scalars() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut board = TensorBoard::open(folder.path()).expect("a file");
    board.note(&step(0, 4.5));
    board.note(&RunEvent::Serving { version: 1 });
    board.note(&step(1, 4.25));
    let own = |scalars: &[(&str, f32)]| -> Vec<(String, f32)> {
        scalars.iter().map(|(tag, value)| ((*tag).to_owned(), *value)).collect()
    };
    let common = |loss| [(LOSS, loss), (LEARNING_RATE, 0.0), (GRADIENT_NORM, 1.25)];
    // The first came before the peer served, when intervals between commits say nothing.
    let expected = [
        (0, own(&[&common(4.5)[..], &[(HELD_OUT_LOSS, 5.5)]].concat())),
        (1, own(&[&common(4.25)[..], &[(THROUGHPUT, 2000.0)]].concat())),
    ];
    assert_eq!(read(folder.path()), expected);
}

#[test]
fn a_restart_replaces_the_steps_that_it_repeats() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = write(folder.path(), &[(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]);
    let second = write(folder.path(), &[(2, 3.5), (3, 2.5), (4, 1.5)]);
    assert!(first < second, "in the same second too: {first:?} {second:?}");
    assert_eq!(losses(folder.path()), [(0, 5.0), (1, 4.0), (2, 3.5), (3, 2.5), (4, 1.5)]);
}

#[test]
fn a_rewind_replaces_the_steps_that_it_repeats() {
    let folder = tempfile::tempdir().expect("a folder");
    let _ = write(folder.path(), &[(0, 5.0), (1, 4.0), (2, 3.0), (1, 4.5), (2, 3.5)]);
    assert_eq!(losses(folder.path()), [(0, 5.0), (1, 4.5), (2, 3.5)]);
}

#[test]
fn a_file_follows_those_of_a_clock_that_was_ahead() {
    let folder = tempfile::tempdir().expect("a folder");
    let ahead = folder.path().join("events.out.tfevents.9000000000.host.1.0");
    for name in ["events.out.tfevents.9999999999.a", "events.out.tfevents.x", "other"] {
        fs::write(folder.path().join(name), "").expect("room");
    }
    fs::write(&ahead, "").expect("room");
    assert!(write(folder.path(), &[]) > ahead);
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("room");
    let error = TensorBoard::open(&file.join("board")).expect_err("no folder");
    assert!(matches!(error, TensorBoardError::Folder { .. }));
    assert!(error.to_string().contains(&file.display().to_string()), "{error}");
}

#[test]
fn a_full_disk_ends_the_file_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut board = TensorBoard::open(folder.path()).expect("a file");
    let full = OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    board.file = Some(full);
    board.note(&step(0, 5.0));
    assert!(board.file.is_none());
    board.note(&step(1, 4.0));
    assert_eq!(losses(folder.path()), []);
}

proptest! {
    /// A process may be killed while it writes.
    #[test]
    fn a_torn_record_costs_its_own_step_only(kept in 0usize..1000) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = write(folder.path(), &[(0, 5.0), (1, 4.0), (2, 3.0)]);
        let whole = fs::read(&path).expect("a file");
        let kept = kept.min(whole.len());
        fs::write(&path, &whole[..kept]).expect("room");
        let (events, rest) = records(&whole[..kept]);
        let next = events.last().map(|event| match event.content {
            Some(Content::Summary(_)) => event.step as u64 + 1,
            _ => event.step as u64,
        });
        prop_assert!(rest < whole.len());
        let next = next.unwrap_or(0);
        let _ = write(folder.path(), &[(next, 9.0)]);
        let steps: Vec<u64> = losses(folder.path()).into_iter().map(|(step, _)| step).collect();
        prop_assert_eq!(steps, (0..=next).collect::<Vec<_>>());
    }
}
