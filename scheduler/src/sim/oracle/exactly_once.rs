//! (step, stage, microbatch) enters the committed weight gradient exactly once.

use std::collections::BTreeMap;
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, Member, Microbatch, Step};
use shoal_protocol::manifest::Manifest;

/// Who added what to its accumulator.
#[derive(Debug)]
pub(in crate::sim) struct ExactlyOnce {
    manifest: Arc<Manifest>,
    added: BTreeMap<ClaimKey, Member>,
}

impl ExactlyOnce {
    pub(super) fn new(manifest: &Arc<Manifest>) -> Self {
        Self { manifest: Arc::clone(manifest), added: BTreeMap::new() }
    }

    pub(in crate::sim) fn added(&mut self, key: ClaimKey, member: Member) -> Result<(), String> {
        match self.added.insert(key, member) {
            None => Ok(()),
            Some(other) => Err(format!("{key} was added by {other} and by {member}")),
        }
    }

    pub(in crate::sim) fn committed(&mut self, step: Step) -> Result<(), String> {
        let batch = (0..self.manifest.training.microbatches).map(Microbatch);
        for microbatch in batch {
            for stage in self.manifest.stages() {
                let key = ClaimKey { step, stage, microbatch };
                if self.added.remove(&key).is_none() {
                    return Err(format!("{key} is committed and was added by nobody"));
                }
            }
        }
        match self.added.first_key_value() {
            None => Ok(()),
            Some((key, member)) => Err(format!("{member} added {key}, which is in no batch")),
        }
    }
}
