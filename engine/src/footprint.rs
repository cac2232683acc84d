//! What the tensors of a device take at a moment, by kind.

use std::collections::BTreeSet;
use std::ffi::c_void;

use shoal_protocol::units::Bytes;
use tch::Tensor;

use crate::carried::CarriedMoments;
use crate::stage::StageModel;
use crate::swap::Part;
use crate::tensor::byte_count;

/// Bytes of the tensors of a device that are in memory: the device's, or the machine's where those of the device are there.
/// Without graphs, gradients and their means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Trained weights: of every version, with their copies in the dtype of passes.
    pub weights: Bytes,
    /// Weights that are not trained, beside adapters.
    pub frozen: Bytes,
    /// What the optimizer keeps.
    pub optimizer: Bytes,
    /// Sums of gradients.
    pub sums: Bytes,
    /// Copies of weights on a device that has them only while passes read them: the most so far, since they come and go.
    pub images: Bytes,
    /// All that virtual workers have.
    pub workers: Bytes,
}

impl Footprint {
    /// Those of all kinds.
    fn all(&self) -> Bytes {
        let Self { weights, frozen, optimizer, sums, images, workers } = *self;
        weights + frozen + optimizer + sums + images + workers
    }
}

/// Tensors that were counted, so that those of a memory that several devices share count once.
#[derive(Debug, Default)]
pub(crate) struct Counted(BTreeSet<*mut c_void>);

impl Counted {
    /// The bytes of a tensor that is in memory and was not counted before.
    pub(crate) fn count(&mut self, tensor: &Tensor) -> Bytes {
        let place = tensor.data_ptr();
        // What is swapped out has no memory.
        let is_new = !place.is_null() && self.0.insert(place);
        Bytes(if is_new { byte_count(tensor) as u64 } else { 0 })
    }
}

impl StageModel {
    /// Adds what this stage takes, without images.
    pub(crate) fn add_to(&self, all: &mut Footprint, counted: &mut Counted) {
        for one in self.swappable(false) {
            let of_kind = match one.part {
                Part::Weights(_) | Part::Narrow(_) | Part::Embedding(_) => &mut all.weights,
                Part::Frozen => &mut all.frozen,
                Part::Slot(_) => &mut all.optimizer,
                Part::Sums(_) => &mut all.sums,
                Part::Mean(_) => unreachable!("means are no tensors of a stage"),
            };
            *of_kind += counted.count(&one.tensor);
        }
        let carried = self.carried().into_iter().flat_map(CarriedMoments::vectors);
        carried.for_each(|(_, vector)| all.optimizer += counted.count(&vector.flat));
        for worker in self.workers() {
            let mut own = Footprint::default();
            worker.add_to(&mut own, counted);
            all.workers += own.all();
        }
    }
}
