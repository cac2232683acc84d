//! The order of samples, and the index that it follows from.

use std::collections::BTreeSet;

use proptest::prelude::*;
use shoal_data::order::{Order, RowPlace};
use shoal_data::pack::Packing;
use shoal_data::prepared::{Documents, FORMAT, Index, IndexError, Layout, ShardEntry, Totals};
use shoal_protocol::ids::ContentHash;

/// A list of shards with `rows` rows.
fn shards(rows: u64, rows_per_shard: u64, context: u64) -> Vec<ShardEntry> {
    let shard = |start: u64| {
        let rows = rows_per_shard.min(rows - start);
        let hash = ContentHash::of(&start.to_le_bytes());
        ShardEntry { hash, rows, targets: rows * context - 1, masked: 1, padded: 0 }
    };
    (0..rows).step_by(rows_per_shard as usize).map(shard).collect()
}

fn index(rows: u64, held_out: u64, rows_per_shard: u64) -> Index {
    let (train, held_out) = (shards(rows, rows_per_shard, 8), shards(held_out, rows_per_shard, 8));
    Index {
        format: FORMAT,
        context: 8,
        token_width: Layout::width_of(300),
        vocabulary: 300,
        tokenizer: ContentHash::of(b"tokenizer"),
        eos: Some(256),
        pad: 257,
        packing: Packing::BestFit,
        rows_per_shard,
        train_totals: Totals::of(&train),
        held_out_totals: Totals::of(&held_out),
        train,
        held_out,
        chat_template: None,
        reference: None,
        stream: None,
        documents: Documents { train: 1, ..Documents::default() },
    }
}

proptest! {
    #[test]
    fn every_row_is_taken_once_an_epoch(
        seed: u64, rows in 1u64..600, rows_per_shard in 1u64..50, epoch in 0u64..5,
    ) {
        let order = Order::new(seed, &index(rows, 0, rows_per_shard));
        let places: BTreeSet<RowPlace> =
            (0..rows).map(|place| order.training(epoch * rows + place)).collect();
        let expected = (0..rows).map(|row| RowPlace {
            shard: (row / rows_per_shard) as usize,
            row: row % rows_per_shard,
        });
        prop_assert!(places.into_iter().eq(expected));
    }

    #[test]
    fn few_shards_are_read_at_a_time(
        seed: u64, shards in 1u64..40, first: u16, count in 1u64..30, missing in 0u64..29,
    ) {
        let rows = shards * 30 - missing;
        let order = Order::new(seed, &index(rows, 0, 30));
        let first = u64::from(first);
        let mut used = Vec::new();
        for sample in first..first + count {
            let shard = order.training(sample).shard;
            if !used.contains(&shard) {
                used.push(shard);
            }
        }
        // A short last group, of few rows, can lie between two others.
        prop_assert!(used.len() <= 12);
        prop_assert_eq!(order.shards_ahead(first, count), used);
    }

    #[test]
    fn all_shards_are_ahead_of_an_epoch(
        seed: u64, rows in 1u64..2000, rows_per_shard in 1u64..60, first: u32,
    ) {
        let index = index(rows, 0, rows_per_shard);
        let order = Order::new(seed, &index);
        let ahead = order.shards_ahead(first.into(), 2 * rows);
        prop_assert_eq!(ahead.len(), index.train.len());
        prop_assert!(ahead.iter().collect::<BTreeSet<_>>().len() == ahead.len());
    }

    #[test]
    fn an_index_survives(rows in 1u64..600, held_out in 0u64..100, rows_per_shard in 1u64..50) {
        let index = index(rows, held_out, rows_per_shard);
        prop_assert_eq!(Index::parse(&index.bytes()).expect("valid"), index);
    }

    #[test]
    fn foreign_bytes_are_no_index(mut bytes: Vec<u8>, place: usize, byte: u8) {
        prop_assert!(Index::parse(&bytes).is_err());
        bytes = index(90, 20, 30).bytes();
        let place = place % bytes.len();
        bytes[place] = byte;
        if let Ok(index) = Index::parse(&bytes) {
            prop_assert_eq!(&index.bytes(), &bytes);
        }
        bytes.truncate(place);
        prop_assert!(Index::parse(&bytes).is_err());
    }
}

#[test]
fn samples_are_shuffled_by_seed_and_epoch() {
    let index = index(200, 0, 10);
    let order = |seed, epoch: u64| -> Vec<_> {
        let order = Order::new(seed, &index);
        (0..200).map(|place| order.training(epoch * 200 + place)).collect()
    };
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
    assert_eq!(order(1, 0), order(1, 0));
    let mut sorted = order(1, 0);
    sorted.sort_unstable();
    assert_ne!(order(1, 0), sorted);
}

/// A change of the order would change the results of runs.
#[test]
fn the_order_is_fixed() {
    let order = Order::new(7, &index(200, 0, 10));
    let places: Vec<_> = (198..203).map(|sample| order.training(sample)).collect();
    let places: Vec<_> = places.into_iter().map(|place| (place.shard, place.row)).collect();
    assert_eq!(places, FIXED);
}

const FIXED: [(usize, u64); 5] = [(18, 9), (3, 7), (5, 0), (14, 6), (14, 5)];

#[test]
fn held_out_rows_come_in_order_again_and_again() {
    let order = Order::new(1, &index(10, 25, 10));
    assert_eq!(order.held_out(0), Some(RowPlace { shard: 0, row: 0 }));
    assert_eq!(order.held_out(24), Some(RowPlace { shard: 2, row: 4 }));
    assert_eq!(order.held_out(25), Some(RowPlace { shard: 0, row: 0 }));
    assert_eq!(Order::new(1, &index(10, 0, 10)).held_out(0), None);
}

#[test]
fn contradictions_in_an_index_are_named() {
    let refused = |change: &dyn Fn(&mut Index)| {
        let mut index = index(90, 20, 30);
        change(&mut index);
        Index::parse(&index.bytes()).expect_err("it is refused").to_string()
    };
    assert!(refused(&|index| index.format = 2).contains("format 2"));
    assert!(refused(&|index| index.context = 0).contains("context"));
    assert!(refused(&|index| index.context = u32::MAX).contains("context"));
    assert!(refused(&|index| index.vocabulary = 70_000).contains("another width"));
    assert!(refused(&|index| index.pad = 300).contains("token 300"));
    assert!(refused(&|index| index.eos = Some(300)).contains("token 300"));
    assert!(refused(&|index| index.rows_per_shard = 29).contains("more than rows_per_shard"));
    assert!(refused(&|index| index.rows_per_shard = 31).contains("fewer rows"));
    assert!(refused(&|index| index.rows_per_shard = u64::MAX).contains("rows_per_shard"));
    assert!(refused(&|index| index.train[1].masked = 2).contains("shard 1"));
    assert!(refused(&|index| index.train[1].targets = u64::MAX).contains("shard 1"));
    assert!(refused(&|index| index.train.clear()).contains("training shards"));
    assert!(refused(&|index| index.held_out_totals.rows = 1).contains("totals"));
    let spaced = [index(9, 0, 3).bytes(), b" ".to_vec()].concat();
    assert!(matches!(Index::parse(&spaced), Err(IndexError::Invalid(_))));
    let large = vec![b' '; (64 << 20) + 1];
    assert!(matches!(Index::parse(&large), Err(IndexError::TooLarge)));
}
