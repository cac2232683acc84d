//! Interruptions and threads do not change the result.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::common::{self, base, options, rows, run, texts, write};
use shoal_data::pack::Packing;
use shoal_data::{PrepareError, PrepareOptions, prepare};

/// Texts of different lengths.
fn sample_texts(count: u32) -> Vec<String> {
    let text = |number: u32| {
        let length = number.wrapping_mul(2_654_435_761) >> 24;
        format!("{number}: ").repeat(1 + length as usize / 4)
    };
    (0..count).map(text).collect()
}

/// The options of a job with several shards in both lists, and several batches.
fn job(folder: &Path) -> PrepareOptions {
    let base = base(folder);
    let texts: Vec<_> = [sample_texts(1600), vec![String::new(); 3], sample_texts(500)].concat();
    write(folder, "sources/a.jsonl", common::texts(&texts[..1300]));
    write(folder, "sources/b/c.jsonl", common::texts(&texts[1300..]));
    write(folder, "more/long.txt", "a line of a long text\n".repeat(50_000));
    let source = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    let mut options = options(&base, &source("sources"), 63);
    options.sources.push(source("more"));
    options.held_out = 0.1;
    options.shard_bytes = 90_000;
    options.threads = NonZero::new(2);
    options
}

/// All files of a folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            let content = fs::read(&path).expect("readable");
            files.insert(path, content);
        }
    }
    let relative = |(path, content): (PathBuf, Vec<u8>)| {
        (path.strip_prefix(folder).map_or(path.clone(), Path::to_owned), content)
    };
    files.into_iter().map(relative).collect()
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let folder = tempfile::tempdir().expect("writable");
    for pack in [Packing::Concat, Packing::BestFit] {
        let mut options = job(folder.path());
        options.pack = pack;
        let results: Vec<_> = [1, 2, 3, 8]
            .into_iter()
            .map(|threads| {
                options.threads = NonZero::new(threads);
                let out = folder.path().join(format!("{pack}-{threads}"));
                let index = run(&options, &out).expect("it works");
                assert!(index.train.len() > 3 && !index.held_out.is_empty());
                assert_eq!(rows(&out, &index, &index.train).len() as u64, index.train_totals.rows);
                files(&out)
            })
            .collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn an_interruption_at_every_shard_gives_the_same_data() {
    let folder = tempfile::tempdir().expect("writable");
    for pack in [Packing::Concat, Packing::BestFit] {
        let mut options = job(folder.path());
        options.pack = pack;
        let whole = folder.path().join(format!("{pack}-whole"));
        run(&options, &whole).expect("it works");
        let out = folder.path().join(format!("{pack}-parts"));
        let mut interruptions = 0;
        let mut shards = 0;
        loop {
            let result = prepare(&options, &out, |progress| match progress.shards > shards {
                true => {
                    shards = progress.shards;
                    ControlFlow::Break(())
                }
                false => ControlFlow::Continue(()),
            });
            match result {
                Ok(_) => break,
                Err(PrepareError::Interrupted) => interruptions += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(interruptions > 8, "{interruptions}");
        assert_eq!(files(&out), files(&whole));
    }
}

#[test]
fn an_interruption_at_every_batch_ends_and_leaves_what_is_complete() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let whole = run(&options, &folder.path().join("whole")).expect("it works");
    let out = folder.path().join("out");
    for allowed in 0..40 {
        let mut calls = 0;
        let result = prepare(&options, &out, |_| {
            calls += 1;
            if calls > allowed { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        match result {
            Err(PrepareError::Interrupted) => {}
            Ok(index) => {
                assert_eq!(index, whole);
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("it does not end");
}

/// The state right before and right after the shards are moved: a crash between the two.
#[test]
fn a_crash_before_shards_are_moved_loses_nothing() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let whole = run(&options, &folder.path().join("whole")).expect("it works");
    let out = folder.path().join("out");
    let stop = |out: &Path, shards| {
        let result = prepare(&options, out, |progress| match progress.shards >= shards {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        assert!(matches!(result, Err(PrepareError::Interrupted)));
    };
    stop(&out, 2);
    // The shard of the state goes back to the name under which it grew.
    let entry = &whole.train[0];
    let name = format!("shards/{}.shard", entry.hash);
    fs::rename(out.join(&name), out.join("unfinished/train-000000.partial")).expect("it exists");
    // Rows behind the state are cut off.
    let growing = fs::read_dir(out.join("unfinished")).expect("readable");
    for path in growing.map(|entry| entry.expect("readable").path()) {
        if path.to_string_lossy().contains(".partial") && !path.ends_with("train-000000.partial") {
            let mut content = fs::read(&path).expect("readable");
            content.extend([9; 5000]);
            fs::write(&path, content).expect("writable");
        }
    }
    assert_eq!(run(&options, &out).expect("it goes on"), whole);
    let complete: BTreeMap<_, _> = files(&folder.path().join("whole"));
    assert_eq!(files(&out), complete);
}

#[test]
fn other_arguments_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let out = folder.path().join("out");
    let interrupted = prepare(&options, &out, |progress| match progress.shards > 0 {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(interrupted, Err(PrepareError::Interrupted)));
    let differs = |change: &dyn Fn(&mut PrepareOptions)| {
        let mut options = options.clone();
        change(&mut options);
        match run(&options, &out) {
            Err(PrepareError::Differs { name, .. }) => name,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(differs(&|options| options.context = 64), "context");
    assert_eq!(differs(&|options| options.pack = Packing::BestFit), "pack");
    assert_eq!(differs(&|options| options.held_out = 0.2), "held-out");
    assert_eq!(differs(&|options| drop(options.sources.pop())), "sources");
    // The number of threads may change.
    let mut other = options.clone();
    other.threads = NonZero::new(5);
    run(&other, &out).expect("it goes on");
    let again = run(&options, &out);
    assert!(matches!(again, Err(PrepareError::Exists { .. })), "{again:?}");
}

#[test]
fn a_damaged_state_is_an_error() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let out = folder.path().join("out");
    let interrupted = prepare(&options, &out, |progress| match progress.shards > 0 {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(interrupted, Err(PrepareError::Interrupted)));
    let state = out.join("unfinished/state");
    let mut bytes = fs::read(&state).expect("it exists");
    let place = bytes.len() / 2;
    bytes[place] ^= 1;
    fs::write(&state, bytes).expect("writable");
    assert!(matches!(run(&options, &out), Err(PrepareError::Damaged { .. })));
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let source = write(folder.path(), "a.jsonl", texts(["abc"]));
    let file = write(folder.path(), "file", "");
    let error = run(&options(&base, &source, 4), &Path::new(&file).join("out"));
    let error = error.expect_err("a file is no folder");
    assert!(matches!(error, PrepareError::Write(_)), "{error}");
    assert!(error.to_string().contains("file/out"), "{error}");
}

#[test]
fn a_full_disk_leaves_what_is_complete() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let whole = run(&options, &folder.path().join("whole")).expect("it works");
    let out = folder.path().join("out");
    // The third shard is on a device without room.
    let full = out.join("unfinished/train-000002.partial");
    fs::create_dir_all(out.join("unfinished")).expect("writable");
    std::os::unix::fs::symlink("/dev/full", &full).expect("writable");
    let error = run(&options, &out).expect_err("there is no room").to_string();
    assert!(error.contains("train-000002.partial: No space left"), "{error}");
    for entry in &whole.train[..1] {
        assert!(out.join(format!("shards/{}.shard", entry.hash)).exists());
    }
    assert!(!out.join("index.json").exists());
    fs::remove_file(&full).expect("it exists");
    let mut shards = None;
    let index = prepare(&options, &out, |progress| {
        shards.get_or_insert(progress.shards);
        ControlFlow::Continue(())
    });
    assert_eq!(index.expect("it goes on"), whole);
    assert!(shards >= Some(1));
}

#[test]
fn a_folder_is_used_by_one_process_at_a_time() {
    let folder = tempfile::tempdir().expect("writable");
    let options = job(folder.path());
    let out = folder.path().join("out");
    let mut second = None;
    let first = prepare(&options, &out, |_| {
        second.get_or_insert_with(|| run(&options, &out));
        ControlFlow::Continue(())
    });
    assert!(first.is_ok(), "{first:?}");
    assert!(matches!(second, Some(Err(PrepareError::Busy { .. }))), "{second:?}");
}
