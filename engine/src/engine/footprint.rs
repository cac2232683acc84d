//! What the tensors of a device take at a moment, by kind.

use shoal_protocol::units::Bytes;
use tch::Tensor;

use crate::device::tensor::byte_count;
use crate::swap::Part;
use crate::train::carried::CarriedMoments;
use crate::train::frozen::Frozen;
use crate::train::stage::StageModel;

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

/// The bytes of a tensor, if it is in memory: what is swapped out has none.
pub(crate) fn bytes_here(tensor: &Tensor) -> Bytes {
    Bytes(if tensor.data_ptr().is_null() { 0 } else { byte_count(tensor) as u64 })
}

impl StageModel {
    /// Adds what this stage takes, without images, and without weights of another device in the same memory.
    pub(crate) fn add_to(&self, all: &mut Footprint) {
        for one in self.swappable(false) {
            let (of_kind, is_shared) = match one.part {
                Part::Weights(_) | Part::Narrow(_) | Part::Embedding(_) => {
                    (&mut all.weights, self.weights.is_beside())
                }
                Part::Frozen => {
                    (&mut all.frozen, self.frozen.as_ref().is_some_and(Frozen::is_beside))
                }
                Part::Slot(_) => (&mut all.optimizer, false),
                Part::Sums(_) => (&mut all.sums, false),
                Part::Mean(_) => unreachable!("means are no tensors of a stage"),
            };
            if !is_shared {
                *of_kind += bytes_here(&one.tensor);
            }
        }
        let carried = self.carried().into_iter().flat_map(CarriedMoments::vectors);
        carried.for_each(|(_, vector)| all.optimizer += bytes_here(&vector.flat));
        for worker in self.workers() {
            let mut own = Footprint::default();
            worker.add_to(&mut own);
            all.workers += own.all();
        }
    }
}
