//! Properties of rows.

use proptest::prelude::*;
use shoal_data::Class;
use shoal_data::document::Document;
use shoal_data::pack::{Packer, Packing, Row};

const PAD: u32 = 999;

/// Documents whose tokens are all different, with some tokens masked.
fn documents(lengths: &[usize]) -> Vec<Document> {
    let mut next = 1000;
    let mut document = |length: &usize| {
        let tokens: Vec<u32> = (next..next + *length as u32).collect();
        next += *length as u32;
        let class =
            |token: &u32| if token.is_multiple_of(3) { Class::Masked } else { Class::Target };
        let mut classes: Vec<_> = tokens.iter().map(class).collect();
        classes[0] = Class::First;
        Document { tokens, classes }
    };
    lengths.iter().map(&mut document).collect()
}

/// Packs documents; the state is saved and restored between each two.
fn pack(packing: Packing, context: u32, documents: &[Document]) -> Vec<Row> {
    let mut packer = Packer::new(packing, context, PAD);
    let mut rows = Vec::new();
    for document in documents {
        packer.push(document, &mut rows);
        let saved = serde_json::to_vec(&packer).expect("it can be saved");
        packer = serde_json::from_slice(&saved).expect("it can be restored");
    }
    packer.finish(&mut rows);
    rows
}

/// The labels of all rows that are not padding, with their classes.
fn labels(rows: &[Row]) -> Vec<(u32, Class)> {
    let all =
        rows.iter().flat_map(|row| row.tokens.iter().copied().zip(row.classes.clone()).skip(1));
    all.filter(|(_, class)| *class != Class::Padding).collect()
}

proptest! {
    #[test]
    fn a_stream_is_cut_with_one_token_in_common(
        lengths in prop::collection::vec(1usize..40, 1..30),
        context in 1u32..20,
    ) {
        let documents = documents(&lengths);
        let rows = pack(Packing::Concat, context, &documents);
        let stream: Vec<_> = documents
            .iter()
            .flat_map(|document| document.tokens.iter().copied().zip(document.classes.clone()))
            .collect();
        prop_assert_eq!(rows.len(), (stream.len() - 1).div_ceil(context as usize));
        for (number, row) in rows.iter().enumerate() {
            prop_assert_eq!(row.tokens.len(), context as usize + 1);
            let start = number * context as usize;
            for (at, token) in row.tokens.iter().enumerate() {
                let (expected, class) =
                    stream.get(start + at).copied().unwrap_or((PAD, Class::Padding));
                prop_assert_eq!((*token, row.classes[at]), (expected, class));
            }
        }
        prop_assert_eq!(labels(&rows), &stream[1..]);
    }

    #[test]
    fn best_fit_keeps_documents_whole(
        lengths in prop::collection::vec(1usize..60, 1..60),
        context in 1u32..30,
    ) {
        let documents = documents(&lengths);
        let rows = pack(Packing::BestFit, context, &documents);
        let length = context as usize + 1;
        // Every token but the first of each document is a label once, and with its class.
        let mut found: Vec<_> =
            labels(&rows).into_iter().filter(|(_, class)| *class != Class::First).collect();
        found.sort_unstable();
        let expected: Vec<_> = documents
            .iter()
            .flat_map(|document| document.tokens.iter().copied().zip(document.classes.clone()).skip(1))
            .collect();
        prop_assert_eq!(found, expected);
        for row in &rows {
            prop_assert_eq!(row.tokens.len(), length);
            prop_assert_eq!(row.classes[0], Class::First);
            // Each token follows its predecessor, or begins a document or piece.
            for at in 1..length {
                if matches!(row.classes[at], Class::Target | Class::Masked) {
                    prop_assert_eq!(row.tokens[at], row.tokens[at - 1] + 1);
                }
            }
        }
        // A document that fits is in one row.
        for document in documents.iter().filter(|document| (2..=length).contains(&document.tokens.len())) {
            let has = |row: &&Row| row.tokens.windows(document.tokens.len()).any(|part| part == document.tokens);
            prop_assert_eq!(rows.iter().filter(has).count(), 1);
        }
        // No two rows of a window could be one; with a context of 8, all documents are in one.
        let used = |row: &Row| row.classes.iter().filter(|class| **class != Class::Padding).count();
        let mut sizes: Vec<_> = rows.iter().map(used).collect();
        sizes.sort_unstable();
        prop_assert!(context < 8 || sizes.len() < 2 || sizes[0] + sizes[1] > length);
    }
}

#[test]
fn best_fit_fills_the_least_room_that_is_enough() {
    let rows = pack(Packing::BestFit, 9, &documents(&[4, 6, 3, 5, 2]));
    let starts: Vec<Vec<u32>> = rows
        .iter()
        .map(|row| {
            let tokens = row.tokens.iter().zip(&row.classes);
            tokens.filter(|(_, class)| **class == Class::First).map(|(token, _)| *token).collect()
        })
        .collect();
    // 6 + 4, then 5 + 3 + 2.
    assert_eq!(starts, [vec![1004, 1000], vec![1013, 1010, 1018]]);
    assert!(rows.iter().all(|row| row.counts().padded == 0));
}

#[test]
fn best_fit_packs_a_window_at_a_time() {
    let mut packer = Packer::new(Packing::BestFit, 99, PAD);
    let documents = documents(&[70; 1000]);
    let (mut rows, mut most) = (Vec::new(), 0);
    for document in &documents {
        let before = rows.len();
        packer.push(document, &mut rows);
        most = most.max(rows.len() - before);
    }
    assert!((512..1000).contains(&most), "{most}");
    packer.finish(&mut rows);
    assert_eq!(rows.len(), 1000);
}
