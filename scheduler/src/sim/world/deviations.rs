//! Deviations from a correct run: an injected error, and a rule omitted on purpose.

use shoal_protocol::ids::Member;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{RoundId, TensorTag};

use super::event::Cargo;
use crate::action::{PeerAction, Task, TaskResult};
use crate::sim::corruption::{ComputeError, Corruption, HandoverLie, SumLie, lies_about};
use crate::sim::hash_keys::HashKeys;
use crate::sim::omitted_rules::{Omit, OmittedRules};
use crate::sim::payloads::Content;

/// The deviations of a run.
#[derive(Debug)]
pub(super) struct Deviations {
    pub(super) corruption: Corruption,
    /// Whether an error that occurs once has occurred.
    corrupted: bool,
    pub(super) rules: OmittedRules,
}

impl Deviations {
    pub(super) fn new(corruption: Corruption) -> Self {
        Self { corruption, corrupted: false, rules: OmittedRules::new(Omit::Nothing) }
    }

    /// Whether the run omits a rule.
    pub(super) fn omits(&self, rule: Omit) -> bool {
        self.rules.omit == rule
    }

    /// Changes a peer's action. Returns false if it is to be dropped.
    pub(super) fn peer_action(
        &mut self,
        index: usize,
        me: Member,
        action: &mut PeerAction,
    ) -> bool {
        self.corruption.peer_action(index, action) && self.rules.sent_by_peer(me, action)
    }

    /// Whether a running task is to add nothing.
    pub(super) fn skips(&mut self, task: Option<&Task>) -> bool {
        let accumulates = matches!(task, Some(Task::Accumulate { .. }));
        self.once(Corruption::CountNever, accumulates)
    }

    /// Whether virtual workers go on from the weights that they have.
    pub(super) fn stays(&self) -> bool {
        self.corruption == Corruption::JoinNever
    }

    /// Whether a result is to be reported twice.
    pub(super) fn repeats(&mut self, result: &TaskResult) -> bool {
        let accumulated = matches!(result, TaskResult::Accumulated { .. });
        self.once(Corruption::CountTwice, accumulated)
    }

    /// What a peer computes wrongly, in one of so many passes.
    pub(super) fn errs(&self, index: usize) -> Option<(ComputeError, u64)> {
        match self.corruption {
            Corruption::Miscompute { peer, error, every } if peer == index => Some((error, every)),
            Corruption::Collude { peers, every } if peers.contains(&index) => {
                Some((ComputeError::Alike, every))
            }
            _ => None,
        }
    }

    /// Changes a tensor that a peer sends, and its seal.
    pub(super) fn tensor(&self, index: usize, cargo: &mut Cargo, manifest: &Manifest) {
        let Corruption::HandOver { peer, lie, every } = self.corruption else { return };
        let Cargo::Tensor { tag, seal: Some(seal), content, .. } = cargo else { return };
        let Some(of) = tag.input().filter(|_| peer == index) else { return };
        let concerns = match lie {
            HandoverLie::Sends => !matches!(tag, TensorTag::Recalled { .. }),
            HandoverLie::Recalls => matches!(tag, TensorTag::Recalled { .. }),
            HandoverLie::States | HandoverLie::Omits => false,
        };
        if concerns && lies_about(of.key, every) {
            *content = Content::Word(content.digest() ^ 1);
            let sealer = HashKeys(seal.by.peer).sealer(manifest);
            *seal = sealer.seal(seal.by, seal.era, of, content.hash());
        }
    }

    /// What a peer's engine lies about sums.
    pub(super) fn sum_lie(&self, index: usize) -> Option<SumLie> {
        match self.corruption {
            Corruption::Forge { peer, lie } if peer == index => Some(lie),
            _ => None,
        }
    }

    /// Whether an error that occurs once occurs here.
    fn once(&mut self, corruption: Corruption, is_possible: bool) -> bool {
        let occurs = self.corruption == corruption && !self.corrupted && is_possible;
        self.corrupted |= occurs;
        occurs
    }

    /// The round that a peer is to apply before its commit.
    pub(super) fn applies_early(&self, result: &TaskResult) -> Option<RoundId> {
        match (self.corruption, result) {
            (Corruption::ApplyWithoutCommit, TaskResult::Summarised { round, .. }) => Some(*round),
            _ => None,
        }
    }
}
