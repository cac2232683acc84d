//! What the routers of a stage did, for metrics.

use shoal_protocol::ids::Stage;

use super::Engine;
use crate::error::Result;
use crate::model::expert_loads::{LayerLoads, StageRouting};
use crate::train::stage::StageModel;

impl StageModel {
    /// Hands over what the routers did, those of virtual workers too.
    fn take_routing(&self) -> Result<StageRouting> {
        let mut all = StageRouting::default();
        for version in self.versions() {
            for (place, loads) in version.blocks.expert_loads() {
                all.add(place, LayerLoads::take(loads)?);
            }
        }
        for worker in self.workers() {
            all.join(worker.take_routing()?);
        }
        Ok(all)
    }
}

impl Engine {
    /// What the routers of a stage did in training passes here since this was last read.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub(crate) fn take_routing(&self, stage: Stage) -> Result<StageRouting> {
        self.stage(stage)?.take_routing()
    }
}
