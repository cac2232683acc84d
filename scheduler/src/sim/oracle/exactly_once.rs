//! (step, stage, microbatch) enters the committed weight gradient exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, Member, Mend, Microbatch, Stage, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{CommitRecord, Round, RoundId};

/// The accumulators' contents, and the accumulators that every round sums.
#[derive(Debug)]
pub(in crate::sim) struct ExactlyOnce {
    manifest: Arc<Manifest>,
    added: BTreeMap<ClaimKey, BTreeSet<Member>>,
    /// The latest mend of each round and its members.
    rounds: BTreeMap<RoundId, (Mend, BTreeSet<Member>)>,
}

impl ExactlyOnce {
    pub(super) fn new(manifest: &Arc<Manifest>) -> Self {
        let (added, rounds) = (BTreeMap::new(), BTreeMap::new());
        Self { manifest: Arc::clone(manifest), added, rounds }
    }

    pub(in crate::sim) fn added(&mut self, key: ClaimKey, member: Member) -> Result<(), String> {
        if self.added.entry(key).or_default().insert(member) {
            Ok(())
        } else {
            Err(format!("{key} was added twice by {member}"))
        }
    }

    /// A member loaded a stage's weights and cleared its accumulator.
    pub(in crate::sim) fn begins_again(&mut self, member: Member, stage: Stage) {
        for (_, members) in self.added.iter_mut().filter(|(key, _)| key.stage == stage) {
            members.remove(&member);
        }
    }

    pub(in crate::sim) fn closed(&mut self, round: &Round) {
        let known = self.rounds.get(&round.id).map(|(mend, _)| *mend);
        if known != Some(round.mended.mend) {
            let members = round.group.members.iter().map(|part| part.member).collect();
            self.rounds.insert(round.id, (round.mended.mend, members));
        }
    }

    /// Checks that the accumulators of the committed rounds hold every microbatch exactly once.
    pub(in crate::sim) fn committed(&mut self, record: &CommitRecord) -> Result<(), String> {
        for (weights, (attempt, _)) in (0..).map(WeightGroup).zip(&record.rounds) {
            let named = |id: &&RoundId| {
                (id.era, id.term, id.step, id.weights, id.attempt)
                    == (record.era, record.term, record.step, weights, *attempt)
            };
            let id = self.rounds.keys().rev().find(named).copied();
            let members = id.and_then(|id| self.rounds.get(&id));
            let Some((_, members)) = members else {
                return Err(format!("the round of weight group {weights} was never closed"));
            };
            for stage in self.manifest.stages_of(weights) {
                self.is_counted_once(record.step, stage, members)?;
            }
        }
        self.added.retain(|key, _| key.step > record.step);
        self.rounds.retain(|id, _| id.step > record.step);
        Ok(())
    }

    /// Checks that the accumulators of these members hold every microbatch of a step at a stage once.
    fn is_counted_once(
        &self,
        step: Step,
        stage: Stage,
        members: &BTreeSet<Member>,
    ) -> Result<(), String> {
        for microbatch in (0..self.manifest.training.microbatches).map(Microbatch) {
            let key = ClaimKey { step, stage, microbatch };
            let added = self.added.get(&key);
            let counted =
                added.map_or(0, |by| by.iter().filter(|member| members.contains(member)).count());
            if counted != 1 {
                return Err(format!("{key} is committed and was counted {counted} times"));
            }
        }
        Ok(())
    }
}
