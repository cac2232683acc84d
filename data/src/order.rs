//! The order in which a run reads the rows of prepared data.

use std::collections::BTreeSet;

use shoal_protocol::permutation::Permutation;

use crate::prepared::Index;

/// Shards whose rows are shuffled together, unless they are made as they are read.
const GROUP: u64 = 4;

/// The place of a row: a shard of the training or held-out list, and a row of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowPlace {
    /// Position of the shard in its list.
    pub shard: usize,
    /// Row of the shard.
    pub row: u64,
}

/// The order of samples: a pure function of the run's seed and the shape of the data.
///
/// An epoch takes every training row once. In each epoch
/// 1. a keyed permutation shuffles the shards,
/// 2. each four shards that follow one another form a group; of streamed data, each shard is one,
/// 3. a keyed permutation shuffles the rows of each group,
///
/// and the groups are read one after another. So samples that follow one another read four shards,
/// or eight at the border of two groups, and later shards can be fetched while these are read.
///
/// Keys are BLAKE3 derivations (context `shoal order of rows v1`) of the seed, the epoch and the
/// group, each as a little-endian u64; the shards' permutation has the group `u64::MAX`.
#[derive(Debug, Clone)]
pub struct Order {
    seed: u64,
    shards: u64,
    rows_per_shard: u64,
    rows: u64,
    held_out_rows: u64,
    /// Shards of a group.
    group: u64,
}

/// One group of shards in one epoch.
struct Group {
    /// The shards, in the order in which their rows are numbered.
    shards: Vec<u64>,
    /// First place of the group in the epoch.
    start: u64,
    /// Rows of all its shards.
    rows: u64,
    order: Permutation,
}

impl Order {
    /// The order of the samples of a run with this seed.
    #[must_use]
    pub fn new(seed: u64, index: &Index) -> Self {
        Self {
            seed,
            shards: index.train.len() as u64,
            rows_per_shard: index.rows_per_shard,
            // An index that was parsed has at least one row.
            rows: index.train_totals.rows.max(1),
            held_out_rows: index.held_out_totals.rows,
            group: if index.stream.is_some() { 1 } else { GROUP },
        }
    }

    /// Training rows: the samples of one epoch.
    #[must_use]
    pub const fn epoch_rows(&self) -> u64 {
        self.rows
    }

    /// Held-out rows.
    #[must_use]
    pub const fn held_out_rows(&self) -> u64 {
        self.held_out_rows
    }

    /// The row of sample number `sample` of the run.
    #[must_use]
    pub fn training(&self, sample: u64) -> RowPlace {
        let (epoch, place) = (sample / self.rows, sample % self.rows);
        let group = self.group_of(epoch, place);
        self.row_in(&group, place)
    }

    /// The row of held-out sample number `number`: the held-out rows in order, from
    /// the start again after the last.
    /// `None` if the data holds nothing out.
    #[must_use]
    pub const fn held_out(&self, number: u64) -> Option<RowPlace> {
        if self.held_out_rows == 0 {
            return None;
        }
        let place = number % self.held_out_rows;
        let shard = (place / self.rows_per_shard) as usize;
        Some(RowPlace { shard, row: place % self.rows_per_shard })
    }

    /// The training shards that `count` samples from `first_sample` on read, each once, in the
    /// order of first use.
    #[must_use]
    pub fn shards_ahead(&self, first_sample: u64, count: u64) -> Vec<usize> {
        let mut shards = Vec::new();
        let mut seen = BTreeSet::new();
        let end = first_sample.saturating_add(count);
        let mut sample = first_sample;
        while sample < end && seen.len() as u64 != self.shards {
            let (epoch, place) = (sample / self.rows, sample % self.rows);
            let group = self.group_of(epoch, place);
            let group_end = group.start + group.rows;
            let last = (group_end - place).min(end - sample) + place;
            for place in place..last {
                let shard = self.row_in(&group, place).shard;
                if seen.insert(shard) {
                    shards.push(shard);
                }
                if group.shards.iter().all(|shard| seen.contains(&(*shard as usize))) {
                    break;
                }
            }
            sample = sample.saturating_add(group_end - place);
        }
        shards
    }

    fn key(&self, epoch: u64, group: u64) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("shoal order of rows v1");
        for number in [self.seed, epoch, group] {
            hasher.update(&number.to_le_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// Rows that the last shard of the list lacks.
    const fn missing(&self) -> u64 {
        self.shards * self.rows_per_shard - self.rows
    }

    /// The group with the row at `place` of an epoch.
    fn group_of(&self, epoch: u64, place: u64) -> Group {
        let shard_order = Permutation::new(self.key(epoch, u64::MAX), self.shards);
        let short_group = shard_order.place_of(self.shards - 1) / self.group;
        let full = self.group * self.rows_per_shard;
        // Groups after the one with the last shard of the list start earlier by its missing rows.
        let start =
            |group: u64| group * full - if group > short_group { self.missing() } else { 0 };
        let mut number = place / full;
        if place >= start(number + 1) {
            number += 1;
        }
        let shards: Vec<u64> = (number * self.group..self.shards.min((number + 1) * self.group))
            .map(|place| shard_order.at(place))
            .collect();
        let rows = shards.iter().map(|shard| self.rows_of(*shard)).sum();
        let order = Permutation::new(self.key(epoch, number), rows);
        Group { shards, start: start(number), rows, order }
    }

    const fn rows_of(&self, shard: u64) -> u64 {
        self.rows_per_shard - if shard + 1 == self.shards { self.missing() } else { 0 }
    }

    fn row_in(&self, group: &Group, place: u64) -> RowPlace {
        let mut row = group.order.at(place - group.start);
        for shard in &group.shards {
            let rows = self.rows_of(*shard);
            if row < rows {
                return RowPlace { shard: *shard as usize, row };
            }
            row -= rows;
        }
        // The permutation's values are below the number of the group's rows.
        RowPlace { shard: 0, row: 0 }
    }
}
