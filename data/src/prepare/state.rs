//! The state of an unfinished preparation, saved at the borders of shards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::ContentHash;

use super::PrepareError;
use super::pipeline::MOST_ROLES;
use crate::document::OddRole;
use crate::pack::Packer;
use crate::prepared::{Documents, ListState, WriteError, rename};

/// Name of the state in the folder of unfinished work.
const STATE_FILE: &str = "state";

/// The place in the sources behind the last row that was taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// Number of the file.
    pub(super) file: usize,
    /// Lines, rows or blocks of the file that were read.
    pub(super) rows: u64,
    /// Documents before, empty ones included.
    pub(super) documents: u64,
}

/// What is worth a word about prepared data, besides its numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// Documents with more tokens than a row, which are cut.
    pub cut: u64,
    /// Messages whose text the chat template leaves out, by role; of eight roles at most.
    pub left_out: BTreeMap<String, u64>,
    /// Messages of roles that neither models nor the chat template know, by role; of eight at most.
    pub unknown: BTreeMap<String, u64>,
    /// Roles of chats without a target; eight at most.
    pub untaught: BTreeSet<String>,
    /// Pairs that are left out.
    #[serde(default)]
    pub pairs: LeftOut,
}

/// Pairs that are left out, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Their two sequences are longer than a row.
    pub long: u64,
    /// Both completions have the same tokens.
    pub same: u64,
    /// A completion has no target.
    pub without_target: u64,
}

impl Notes {
    pub(super) fn add(&mut self, OddRole { role, is_left_out }: OddRole) {
        let counts = if is_left_out { &mut self.left_out } else { &mut self.unknown };
        if counts.len() < MOST_ROLES || counts.contains_key(&role) {
            *counts.entry(role).or_default() += 1;
        }
    }
}

/// The rows and documents of one list.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedList {
    pub(super) shards: ListState,
    pub(super) packer: Packer,
}

/// Everything that a later run needs to go on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Saved {
    /// Options and inputs that determine the result.
    pub(super) arguments: BTreeMap<String, String>,
    pub(super) place: Place,
    pub(super) documents: Documents,
    pub(super) tokens: u64,
    #[serde(default)]
    pub(super) notes: Notes,
    pub(super) train: SavedList,
    pub(super) held_out: SavedList,
}

impl Saved {
    /// Replaces the state on disk. The file has a line with the BLAKE3 hash of the rest.
    pub(super) fn write(&self, unfinished: &Path) -> Result<(), WriteError> {
        let path = unfinished.join(STATE_FILE);
        let temporary = unfinished.join("state.new");
        let error = || WriteError::at(&temporary);
        let json = serde_json::to_vec(self).map_err(std::io::Error::from).map_err(error())?;
        let mut file = File::create(&temporary).map_err(error())?;
        file.write_all(format!("{}\n", ContentHash::of(&json)).as_bytes()).map_err(error())?;
        file.write_all(&json).and_then(|()| file.sync_all()).map_err(error())?;
        rename(&temporary, &path)
    }

    /// Reads the state of an interrupted run; `None` if there is none.
    pub(super) fn read(unfinished: &Path) -> Result<Option<Self>, PrepareError> {
        let path = unfinished.join(STATE_FILE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(PrepareError::Read { path, source }),
        };
        let damaged = || PrepareError::Damaged { folder: unfinished.to_owned() };
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(damaged)?;
        let (hash, json) = (&bytes[..end], &bytes[end + 1..]);
        if hash != ContentHash::of(json).to_string().as_bytes() {
            return Err(damaged());
        }
        serde_json::from_slice(json).map(Some).map_err(|_| damaged())
    }

    /// Refuses other arguments than those that the run began with.
    pub(super) fn check(
        &self,
        arguments: &BTreeMap<String, String>,
        unfinished: &Path,
    ) -> Result<(), PrepareError> {
        let names = self.arguments.keys().chain(arguments.keys());
        let value = |of: &BTreeMap<String, String>, name: &String| {
            of.get(name).cloned().unwrap_or_else(|| "absent".to_owned())
        };
        for name in names {
            let (before, now) = (value(&self.arguments, name), value(arguments, name));
            if before != now {
                let folder = unfinished.to_owned();
                return Err(PrepareError::Differs { name: name.clone(), before, now, folder });
            }
        }
        Ok(())
    }
}
