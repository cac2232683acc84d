//! From files to shards and back.

mod common;

use std::fs;

use common::{EOS, PAD, base, options, rows, run, texts, write};
use shoal_data::Class;
use shoal_data::prepared::Index;

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
