//! From files to shards and back.

use std::fs;
use std::ops::ControlFlow;

use crate::common::{EOS, PAD, base, options, rows, run, texts, write};
use shoal_data::prepared::Index;
use shoal_data::{Class, prepare};

#[test]
fn texts_become_rows_of_a_stream() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let source = write(folder.path(), "a.jsonl", texts(["abc", "", "de", "fghi"]));
    let out = folder.path().join("out");
    let index = run(&options(&base, &source, 4), &out).expect("it works");
    assert_eq!((index.documents.train, index.documents.empty), (3, 1));
    let [a, b, c, d, e, f, g, h, i] = std::array::from_fn(|at| u32::from(b'a') + at as u32);
    let rows = rows(&out, &index, &index.train);
    let tokens: Vec<_> = rows.iter().map(|row| row.tokens.clone()).collect();
    assert_eq!(tokens, [[a, b, c, EOS, d], [d, e, EOS, f, g], [g, h, i, EOS, PAD]]);
    let (first, target) = (Class::First, Class::Target);
    assert_eq!(rows[0].classes, [first, target, target, target, first]);
    assert_eq!(rows[1].classes, [first, target, target, first, target]);
    assert_eq!(rows[2].classes, [target, target, target, target, Class::Padding]);
    let totals = index.train_totals;
    assert_eq!((totals.rows, totals.targets, totals.masked, totals.padded), (3, 9, 2, 1));
    let bytes = fs::read(out.join("index.json")).expect("it exists");
    assert_eq!(Index::parse(&bytes).expect("valid"), index);
    assert_eq!(blake3::hash(&bytes).to_hex().as_str(), index.hash().to_string());
    assert!(!out.join("unfinished").exists());
}

#[test]
fn progress_ends_with_all_bytes() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let source = write(folder.path(), "a.jsonl", texts(vec!["some text"; 5000]));
    let mut options = options(&base, &source, 100);
    options.shard_bytes = 10_000;
    let mut seen = Vec::new();
    let index = prepare(&options, &folder.path().join("out"), |progress| {
        seen.push(progress);
        ControlFlow::Continue(())
    });
    let index = index.expect("it works");
    assert!(seen.len() > 5);
    assert!(seen.windows(2).all(|pair| pair[0].bytes_read <= pair[1].bytes_read));
    assert!(seen.windows(2).all(|pair| pair[0].shards <= pair[1].shards));
    let last = seen.last().expect("there is progress");
    assert_eq!(last.bytes_total, fs::metadata(&source).expect("it exists").len());
    assert_eq!(last.bytes_read, last.bytes_total);
    assert_eq!((last.documents, last.tokens), (5000, 50_000));
    assert_eq!(index.documents.train, 5000);
    assert_eq!(index.train_totals.targets + index.train_totals.masked, 49_999);
}
