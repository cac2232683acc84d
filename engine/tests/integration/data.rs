//! Text, token files and samples.

use crate::common;
use std::collections::BTreeMap;
use std::fs;

use shoal_engine::{DataError, TokenFile, data};
use shoal_protocol::ids::{Microbatch, Step};
use shoal_protocol::manifest::Tokenizer;

#[test]
fn each_epoch_takes_every_window_once_and_none_that_is_held_out() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = common::manifest();
    let text = &common::text()[..2000];
    let samples = common::samples(&mut manifest, folder.path(), text);
    let trained = 2000 - manifest.held_out_tokens();
    let windows = (trained - 1) / 16;
    let mut seen: Vec<u64> = Vec::new();
    for step in 0.. {
        for microbatch in 0..manifest.training.microbatches {
            for row in 0..u64::from(manifest.training.microbatch_size) {
                seen.push(samples.start(Step(step), Microbatch(microbatch), row));
            }
        }
        if seen.len() as u64 >= 2 * windows {
            break;
        }
    }
    let mut epochs = seen.chunks_exact(windows as usize);
    let (first, second) = (epochs.next().expect("two"), epochs.next().expect("two"));
    assert_ne!(first, second);
    for epoch in [first, second] {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq((0..windows).map(|window| window * 16)));
        // Input and label of the last window's last token.
        assert!(sorted.last().expect("windows") + 17 <= trained);
    }
    let mut held_out = BTreeMap::new();
    for step in [0, 5] {
        for microbatch in [3, 4] {
            for row in 0..2 {
                let start = samples.start(Step(step), Microbatch(microbatch), row);
                assert!(start >= trained && start + 17 <= 2000);
                let before = held_out.insert((microbatch, row), start);
                assert!(before.is_none_or(|before| before == start));
            }
        }
    }
}

#[test]
fn labels_are_the_inputs_shifted_by_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = common::manifest();
    let text = common::text();
    let samples = common::samples(&mut manifest, folder.path(), &text);
    let batch = samples.batch(Step(3), Microbatch(1));
    let tokens = |bytes: &[u8]| -> Vec<u8> { bytes.chunks_exact(4).map(|word| word[0]).collect() };
    let (inputs, labels) = (tokens(&batch.inputs), tokens(&batch.labels));
    for row in 0..2 {
        let start = samples.start(Step(3), Microbatch(1), row as u64) as usize;
        assert_eq!(inputs[16 * row..16 * (row + 1)], text[start..start + 16]);
        assert_eq!(labels[16 * row..16 * (row + 1)], text[start + 1..start + 17]);
    }
    assert_eq!(batch, samples.batch(Step(3), Microbatch(1)));
    assert_ne!(batch, samples.batch(Step(3), Microbatch(0)));
}

#[test]
fn a_link_out_of_a_folder_is_no_text() {
    let folder = tempfile::tempdir().expect("writable");
    let text = folder.path().join("text");
    std::fs::create_dir(&text).expect("writable");
    std::fs::write(text.join("a.txt"), "a").expect("writable");
    std::fs::write(folder.path().join("secret"), "key").expect("writable");
    std::os::unix::fs::symlink("a.txt", text.join("b.txt")).expect("a link");
    assert_eq!(data::read_text(&text).expect("a link inside"), b"a\na");
    std::os::unix::fs::symlink("../secret", text.join("c.txt")).expect("a link");
    let error = data::read_text(&text).expect_err("a link outside").to_string();
    assert!(error.contains("c.txt is a link to ") && error.contains("secret"), "{error}");
    // The link is the user's own choice here.
    assert_eq!(data::read_text(&text.join("c.txt")).expect("a text"), b"key");
}

#[test]
fn a_folder_is_read_in_the_order_of_its_paths() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::create_dir(folder.path().join("b")).expect("writable");
    for (name, text) in [("c.txt", "three"), ("a.txt", "one"), ("b/x.txt", "two"), (".no", "no")] {
        fs::write(folder.path().join(name), text).expect("writable");
    }
    assert_eq!(data::read_text(folder.path()).expect("text"), b"one\ntwo\nthree");
}

#[test]
fn missing_text_is_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("missing.txt");
    assert!(matches!(data::read_text(&missing), Err(DataError::Io { .. })));
    assert!(matches!(data::read_text(folder.path()), Err(DataError::Empty { .. })));
    let blank = folder.path().join("blank.txt");
    fs::write(&blank, " \n\n").expect("writable");
    assert!(matches!(data::read_text(&blank), Err(DataError::Empty { .. })));
}

#[test]
fn only_the_named_token_file_is_opened() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tokens");
    let tokens = data::write_tokens(b"some text", Tokenizer::Bytes, &path).expect("writable");
    assert_eq!(TokenFile::describe(&path).expect("written beside"), tokens);
    assert_eq!(TokenFile::open(&path, &tokens).expect("whole").bytes(), b"some text");
    for bytes in [&b"some tex"[..], b"Some text", b""] {
        fs::write(&path, bytes).expect("writable");
        assert!(matches!(TokenFile::open(&path, &tokens), Err(DataError::WrongFile { .. })));
    }
}
