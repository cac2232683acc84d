//! Rows with a chosen and a rejected completion, and a base's log-probabilities beside them.

use std::convert::Infallible;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};
use shoal_data::pack::{Packing, PairLogProbs, Row};
use shoal_data::prepare::LeftOut;
use shoal_data::prepare_noting;
use shoal_data::prepared::Index;
use shoal_data::reference::{ReferenceError, add_reference};
use shoal_data::{Class, PrepareError};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{Dtype, Pairs};

use crate::common::{EOS, PAD, base, options, rows, run, write};

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// Prepares rows with room for so many tokens.
fn prepare(folder: &Path, pairs: &[Value], context: u32) -> Result<Index, PrepareError> {
    let source = write(folder, "pairs.jsonl", lines(pairs));
    run(&options(&base(folder), &source, context), &folder.join("data"))
}

/// The sequences of a row as text, with targets in parentheses.
fn shown(row: &Row) -> [String; 2] {
    row.pair().expect("a pair").map(|tokens| {
        let marked = tokens.map(|place| {
            let text = match row.tokens[place] {
                EOS => "$".to_owned(),
                byte => char::from(u8::try_from(byte).expect("a byte")).to_string(),
            };
            match row.classes[place] {
                Class::Target => format!("({text})"),
                _ => text,
            }
        });
        marked.collect::<String>().replace(")(", "")
    })
}

fn prepared(pairs: &[Value]) -> Vec<[String; 2]> {
    let folder = tempfile::tempdir().expect("writable");
    let index = prepare(folder.path(), pairs, 99).expect("it works");
    assert_eq!(index.packing, Packing::Pairs);
    assert_eq!(index.prepared().pairs, Some(Pairs { reference: None }));
    let rows = rows(&folder.path().join("data"), &index, &index.train);
    for row in &rows {
        assert_eq!(row.tokens.len(), 100);
        let [_, rejected] = row.pair().expect("a pair");
        assert!(row.tokens[rejected.end..].iter().all(|token| *token == PAD));
    }
    rows.iter().map(shown).collect()
}

#[test]
fn texts_with_and_without_a_prompt_are_pairs() {
    let found = prepared(&[
        json!({"prompt": "Sky? ", "chosen": "blue", "rejected": "red", "score": 3}),
        json!({"chosen": "The sky is blue.", "rejected": "The sky is black."}),
        json!({"prompt": "", "chosen": "yes", "rejected": ""}),
    ]);
    let expected = [
        ["Sky? (blue$)", "Sky? (red$)"],
        ["The sky is( blue.$)", "The sky is( black.$)"],
        // A document's first token is never a target.
        ["y(es$)", "$"],
    ];
    // The last row has no target in its rejected completion.
    assert_eq!(found, expected[..2].iter().map(|row| row.map(str::to_owned)).collect::<Vec<_>>());
}

#[test]
fn chats_with_and_without_a_prompt_are_pairs() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let (ask, good, bad) =
        (message("user", "Hi"), message("assistant", "Yes"), message("assistant", "No"));
    let whole = |answer: &Value| json!([ask, answer]);
    let found = prepared(&[
        json!({"prompt": [ask], "chosen": [good], "rejected": [bad]}),
        json!({"chosen": whole(&good), "rejected": whole(&bad)}),
        // A prompt that is a text beside chats is not read.
        json!({"prompt": "Hi", "chosen": whole(&good), "rejected": whole(&bad)}),
    ]);
    assert_eq!(found.len(), 3);
    for pair in found {
        assert_eq!(pair[0].replace("$", ""), "<user>Hi(<assistant>Yes)");
        assert_eq!(pair[1].replace("$", ""), "<user>Hi(<assistant>No)");
    }
}

#[test]
fn pairs_that_fit_no_row_or_teach_nothing_are_left_out_and_counted() {
    let folder = tempfile::tempdir().expect("writable");
    let pair = |chosen: &str, rejected: &str| json!({"prompt": "ab", "chosen": chosen, "rejected": rejected});
    // Two sequences of the prompt, the completion and the end.
    let rows = [pair("abc", "def"), pair("z", "z"), pair("abcd", "def"), pair("x", "y")];
    let source = write(folder.path(), "pairs.jsonl", lines(&rows));
    let options = options(&base(folder.path()), &source, 11);
    let out = folder.path().join("data");
    let (index, notes) =
        prepare_noting(&options, &out, |_| ControlFlow::Continue(())).expect("it works");
    assert_eq!(notes.pairs, LeftOut { long: 1, same: 1, without_target: 0 });
    assert_eq!((index.documents.train, index.train_totals.rows), (2, 2));
    let folder = tempfile::tempdir().expect("writable");
    let error = prepare(folder.path(), &rows[..1], 10).expect_err("no room").to_string();
    assert!(error.starts_with("no pair is left: 1 are longer than a row of 10 tokens"), "{error}");
}

#[test]
fn rows_that_are_no_pairs_are_named() {
    let message = json!([{"role": "user", "content": "Hi"}]);
    for (row, expected) in [
        (json!({"chosen": "a"}), "row 2: no `rejected`"),
        (json!({"chosen": "a", "rejected": 3}), "row 2: `rejected` must be a text"),
        (json!({"chosen": message, "rejected": "a"}), "row 2: `rejected` must be a list"),
        (json!({"prompt": 7, "chosen": "a", "rejected": "b"}), "row 2: `prompt` must be a text"),
        (
            json!({"prompt": message, "chosen": [], "rejected": message}),
            "row 2: `chosen` must be a",
        ),
    ] {
        let folder = tempfile::tempdir().expect("writable");
        let first = json!({"prompt": "p", "chosen": "a", "rejected": "b"});
        let error = prepare(folder.path(), &[first, row], 50).expect_err("refused").to_string();
        assert!(error.contains(expected) && error.contains("pairs.jsonl"), "{error}");
    }
    let folder = tempfile::tempdir().expect("writable");
    let rows = lines(&[json!({"prompt": "p", "chosen": "a", "rejected": "b"})]);
    let source = write(folder.path(), "pairs.jsonl", rows);
    let mut options = options(&base(folder.path()), &source, 50);
    options.train_on = shoal_data::document::TrainOn::All;
    let error = run(&options, &folder.path().join("data")).expect_err("refused").to_string();
    assert!(error.starts_with("--train-on all"), "{error}");
}

/// Numbers that follow from the row alone.
fn log_probs(row: &Row) -> Result<[f64; 2], Infallible> {
    let [chosen, rejected] = row.pair().expect("a pair");
    Ok([chosen, rejected].map(|tokens| -(row.tokens[tokens].iter().sum::<u32>() as f64) / 64.0))
}

#[test]
fn a_reference_is_beside_each_pair_and_in_the_index() {
    let folder = tempfile::tempdir().expect("writable");
    let pair =
        |number: usize| json!({"prompt": "p ", "chosen": format!("a{number}"), "rejected": "b"});
    let pairs: Vec<Value> = (0..300).map(pair).collect();
    let source = write(folder.path(), "pairs.jsonl", lines(&pairs));
    let mut options = options(&base(folder.path()), &source, 40);
    (options.held_out, options.shard_bytes) = (0.1, 5000);
    let (data, out) = (folder.path().join("data"), folder.path().join("out"));
    let plain = run(&options, &data).expect("it works");
    assert!(plain.train.len() > 2 && plain.held_out_totals.rows > 5);
    let base = (ContentHash([7; 32]), Dtype::Bf16);
    let index = add_reference(&data, &out, base, &mut log_probs).expect("it works");
    assert_eq!(Index::read(&out).expect("valid"), index);
    assert_eq!(index.prepared().pairs, Some(Pairs { reference: Some(base.0) }));
    let reference = index.reference.expect("it has one");
    assert_eq!((reference.data, reference.dtype), (plain.hash(), Dtype::Bf16));
    for (own, before) in [(&index.train, &plain.train), (&index.held_out, &plain.held_out)] {
        let before = rows(&data, &plain, before);
        let own = rows(&out, &index, own);
        assert_eq!(own.len(), before.len());
        for (own, before) in own.into_iter().zip(before) {
            let numbers = log_probs(&before).expect("numbers").map(|number| number as f32);
            assert_eq!(own.reference, PairLogProbs::new(numbers));
            assert_eq!(Row { reference: None, ..own }, before);
        }
    }
    let again = add_reference(&out, &folder.path().join("more"), base, &mut log_probs);
    assert!(matches!(again, Err(ReferenceError::HasReference { .. })), "{again:?}");
    let twice = add_reference(&data, &out, base, &mut log_probs);
    assert!(matches!(twice, Err(ReferenceError::Exists { .. })), "{twice:?}");
    let mut broken = |_: &Row| Ok::<_, Infallible>([f64::NAN, -1.0]);
    let broken = add_reference(&data, &folder.path().join("broken"), base, &mut broken);
    assert!(matches!(broken, Err(ReferenceError::NotFinite { row: 0, .. })), "{broken:?}");
    let texts = write(folder.path(), "texts.jsonl", "{\"text\": \"some text\"}\n");
    let (plain, none) = (folder.path().join("plain"), folder.path().join("none"));
    run(&crate::common::options(&options.base, &texts, 8), &plain).expect("it works");
    let refused = add_reference(&plain, &none, base, &mut log_probs);
    assert!(matches!(refused, Err(ReferenceError::NoPairs { .. })), "{refused:?}");
    assert!(!none.exists() && fs::exists(out.join("shards")).expect("readable"));
}
