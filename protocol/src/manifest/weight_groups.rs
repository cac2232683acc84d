//! Weight groups: which weights are summed in which of a step's all-reduce rounds.
//!
//! Each stage's weights are a group. Where the head is tied to the embedding and lies in another
//! stage, the first and the last stage each keep a copy of that matrix. Its gradients at both are
//! summed in one more round, and both copies get the same update.

use crate::ids::{Stage, Step, WeightGroup};
use crate::message::proof_of_all;

use super::Manifest;

impl Manifest {
    /// The group that the first and the last stage share: the matrix of a tied embedding that is
    /// trained.
    #[must_use]
    pub fn shared_weights(&self) -> Option<WeightGroup> {
        let stages = self.training.stages;
        let trained = self.model.block.tied && self.lora.is_none();
        (trained && stages > 1).then_some(WeightGroup(stages))
    }

    /// Every weight group in order.
    pub fn weight_groups(&self) -> impl Iterator<Item = WeightGroup> + use<> {
        (0..self.training.stages).map(WeightGroup).chain(self.shared_weights())
    }

    /// The groups that make up a stage's weights: its own first.
    pub fn groups_of(&self, stage: Stage) -> impl Iterator<Item = WeightGroup> + use<> {
        let shares = stage == Stage(0) || stage == self.last_stage();
        let shared = self.shared_weights().filter(|_| shares);
        std::iter::once(WeightGroup(stage.0)).chain(shared)
    }

    /// The stages that have a group's weights, in order.
    pub fn stages_of(&self, weights: WeightGroup) -> impl Iterator<Item = Stage> + use<> {
        let shared = self.shared_weights() == Some(weights);
        let (first, last) =
            if shared { (Stage(0), Some(self.last_stage())) } else { (Stage(weights.0), None) };
        std::iter::once(first).chain(last)
    }

    /// Whether the run has a group.
    #[must_use]
    pub fn has_weights(&self, weights: WeightGroup) -> bool {
        weights.0 < self.training.stages || self.shared_weights() == Some(weights)
    }

    /// Whether a peer may change from one stage to another while it serves. Between stages that
    /// share weights it may not: it would need each result of their rounds for both.
    #[must_use]
    pub fn may_change_stage(&self, from: Stage, to: Stage) -> bool {
        let shared = |stage| self.groups_of(stage).count() > 1;
        !(shared(from) && shared(to))
    }

    /// The proof of a round in which every microbatch of a step is counted once at each stage of the
    /// weights.
    #[must_use]
    pub fn whole_proof(&self, step: Step, weights: WeightGroup) -> u64 {
        let of_stage = |stage| proof_of_all(step, stage, self.training.microbatches);
        self.stages_of(weights).map(of_stage).fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::small;
    use super::*;

    #[test]
    fn the_stages_of_a_group_have_it_among_their_groups() {
        for (tied, stages) in [(false, 1), (true, 1), (false, 3), (true, 2), (true, 4)] {
            let mut manifest = small();
            manifest.model.block.tied = tied;
            manifest.training.stages = stages;
            let groups: Vec<WeightGroup> = manifest.weight_groups().collect();
            let shared = usize::from(tied && stages > 1);
            assert_eq!(groups.len(), usize::from(stages) + shared);
            for weights in groups {
                assert!(manifest.has_weights(weights));
                let with = |stage: &Stage| manifest.groups_of(*stage).any(|one| one == weights);
                let with: Vec<Stage> = manifest.stages().filter(with).collect();
                assert_eq!(manifest.stages_of(weights).collect::<Vec<_>>(), with);
            }
            assert!(!manifest.has_weights(WeightGroup(stages + shared as u16)));
        }
    }

    #[test]
    fn a_peer_changes_between_any_stages_that_share_nothing() {
        let mut manifest = small();
        (manifest.model.block.tied, manifest.training.stages) = (true, 3);
        assert!(!manifest.may_change_stage(Stage(0), Stage(2)));
        assert!(manifest.may_change_stage(Stage(0), Stage(1)));
        assert!(manifest.may_change_stage(Stage(1), Stage(2)));
        manifest.model.block.tied = false;
        assert!(manifest.may_change_stage(Stage(0), Stage(2)));
    }
}
