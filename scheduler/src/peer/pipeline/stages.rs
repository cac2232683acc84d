//! The hosted stages of a peer.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Member, Stage, StageSpan, Step};
use shoal_protocol::message::PeerMessage;

use super::stage::{Counted, HostedStage};
use crate::action::{PeerAction, PeerLoad};
use crate::peer::Out;
use crate::peer::config::PeerConfig;

/// The hosted stages.
#[derive(Debug, Default)]
pub(super) struct HostedStages {
    by_stage: BTreeMap<Stage, HostedStage>,
    /// The span that the peer hosts, without the stages that it leaves or fetches.
    span: Option<StageSpan>,
}

impl HostedStages {
    pub(super) fn contains(&self, stage: Stage) -> bool {
        self.by_stage.contains_key(&stage)
    }

    pub(super) fn list(&self) -> Vec<Stage> {
        self.by_stage.keys().copied().collect()
    }

    /// Whether the stages are swapped.
    pub(super) fn are_swapped(&self, config: &PeerConfig) -> bool {
        config.limits.swaps(self.by_stage.len())
    }

    pub(super) fn get(&self, stage: Stage) -> Option<&HostedStage> {
        self.by_stage.get(&stage)
    }

    pub(super) fn get_mut(&mut self, stage: Stage) -> Option<&mut HostedStage> {
        self.by_stage.get_mut(&stage)
    }

    /// The stage that the caller knows to be hosted.
    pub(super) fn existing(&mut self, stage: Stage) -> &mut HostedStage {
        self.by_stage.get_mut(&stage).expect("the caller knows that the stage is hosted")
    }

    /// Adds one of so many hosted stages, or adapts its share of the limits. Returns whether it is new.
    pub(super) fn add(&mut self, config: &PeerConfig, stage: Stage, count: usize) -> bool {
        let known = self.by_stage.get_mut(&stage);
        match known {
            Some(hosted) => {
                hosted.set_share(config, count);
                false
            }
            None => {
                self.by_stage.insert(stage, HostedStage::new(config, stage, count));
                true
            }
        }
    }

    /// The peer hosts a span and no other stages any more. In another span than before all windows begin anew.
    pub(super) fn set_span(&mut self, config: &PeerConfig, span: StageSpan) {
        if self.span.replace(span) == Some(span) {
            return;
        }
        let hosted = self.by_stage.len();
        self.by_stage.values_mut().for_each(|stage| stage.begin_window(config, hosted));
    }

    /// Removes the stages outside a span and returns them.
    pub(super) fn remove_outside(&mut self, span: StageSpan) -> Vec<Stage> {
        let removed = self.by_stage.extract_if(.., |stage, _| !span.contains(*stage));
        removed.map(|(stage, _)| stage).collect()
    }

    /// The contents of a step's accumulators at the hosted ones of these stages; `None` if there are
    /// none.
    pub(super) fn counted(
        &self,
        stages: impl Iterator<Item = Stage>,
        step: Step,
    ) -> Option<Counted> {
        let hosted = stages.filter_map(|stage| self.get(stage));
        hosted.map(|hosted| hosted.counted(step)).reduce(|mut all, one| {
            all.microbatches.extend(one.microbatches);
            all.proof = all.proof.wrapping_add(one.proof);
            all
        })
    }

    /// Nanoseconds for one microbatch of each hosted stage, which the engine runs in turn; 0 while one is
    /// not measured.
    pub(super) fn service_time(&self) -> u64 {
        let service_times = self.by_stage.values().map(|hosted| hosted.times.nanoseconds());
        service_times.sum::<Option<u64>>().unwrap_or(0)
    }

    /// The part of the load that the stages know.
    pub(super) fn load(&self) -> PeerLoad {
        let by_stage = |count: fn(&HostedStage) -> usize| {
            self.by_stage.iter().map(|(stage, hosted)| (*stage, count(hosted))).collect()
        };
        PeerLoad {
            accepted: by_stage(HostedStage::accepted),
            waiting: by_stage(|hosted| hosted.offers.len()),
            window: by_stage(HostedStage::window),
            ..PeerLoad::default()
        }
    }

    /// Takes the room of dropped work back, where its stage is still hosted.
    pub(super) fn vacate(&mut self, key: ClaimKey) {
        if let Some(hosted) = self.get_mut(key.stage) {
            hosted.vacate(key.step);
        }
    }

    /// Forgets earlier steps, whose jobs are dropped already.
    pub(super) fn forget_before(&mut self, step: Step) {
        self.by_stage.values_mut().for_each(|hosted| hosted.forget_before(step));
    }

    /// Forgets all work, of which none has room, for a rewind.
    pub(super) fn forget_work(&mut self) {
        self.by_stage.values_mut().for_each(HostedStage::forget_work);
    }

    /// Forgets departed senders.
    pub(super) fn remove_senders(&mut self, departed: &BTreeSet<Member>) {
        self.by_stage.values_mut().for_each(|hosted| hosted.remove_senders(departed));
    }

    /// Reports this peer's pace and its room to the senders of late work, after the end of a pass.
    pub(super) fn notify_late_senders(&mut self, out: &mut Out) {
        let service_time = self.service_time();
        for (stage, hosted) in &mut self.by_stage {
            for (to, key) in hosted.take_late_senders() {
                out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
                out.push(PeerAction::Send { to, message: PeerMessage::Free { stage: *stage } });
            }
        }
    }
}
