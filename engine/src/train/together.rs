//! A virtual worker that several devices train together, each its slices of every pass.
//!
//! All make the same updates in the same order, so they meet as in a pass: for the mean gradient, of which each reduces
//! a share, and for the updated weights. The bits are those of one device.

use std::ops::Range;
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, Microbatch};
use shoal_protocol::manifest::Manifest;
use tch::{Device, Tensor};

use crate::device::exchange::Seat;
use crate::device::tensor::{elements, elements_mut};
use crate::error::{EngineError, GradientProblem, Result};
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::Parameter;
use crate::numeric::fixed_point::FixedPoint;
use crate::train::accumulator::Accumulator;
use crate::weights::held::Held;
use crate::weights::share::Share;
use crate::weights::version::Weights;

/// A device's place among those that train a worker together.
#[derive(Debug)]
pub(crate) struct Together {
    seat: Seat,
    /// The elements that each device updates, in the order of seats: together the flat vector.
    shares: Vec<Range<usize>>,
    /// The elements that each device has sums of.
    counted: Vec<Arc<Held>>,
}

impl Together {
    /// The place of a device with this share; `None` if it trains workers alone.
    pub(crate) fn new(
        manifest: &Manifest,
        parameters: &[Parameter],
        share: &Share,
    ) -> Option<Self> {
        let seat = share.seat().filter(|_| !share.is_whole())?.clone();
        let held = |seat: Seat| {
            let own = OwnSlices::new(&manifest.model, Some(&seat));
            Arc::new(Held::of_gradients(parameters, &own))
        };
        let counted = seat.each().map(held).collect();
        Some(Self { shares: share.elements_of_all(parameters), counted, seat })
    }

    /// The elements that this device updates.
    pub(crate) fn own(&self) -> Range<usize> {
        self.shares[self.seat.index()].clone()
    }

    /// The whole of a flat vector, of which each device brings its part, in the machine's memory.
    pub(crate) fn whole(&self, own: &Tensor) -> Result<Tensor> {
        let parts = self.seat.gather(&own.f_to(Device::Cpu)?)?;
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// The mean gradient of an update, f32 in the machine's memory, from the sums of all devices.
    pub(crate) fn mean(&self, sums: &Accumulator, fixed_point: FixedPoint) -> Result<Tensor> {
        let all = self.seat.gather(&sums.tensor().f_to(Device::Cpu)?)?;
        let own = self.own();
        let mut total = vec![0i64; own.len()];
        for (part, held) in all.into_iter().zip(&self.counted) {
            sums.of_device(part, held.clone()).add_to(&own, &mut total)?;
        }
        let mut means = vec![0f32; own.len()];
        fixed_point.means(&[bytemuck::cast_slice::<_, u8>(&total)], &mut means)?;
        self.whole(&Tensor::f_from_slice(&means)?)
    }

    /// Takes over the weights that the other devices updated.
    pub(crate) fn take_updates(&self, weights: &mut Weights) -> Result<()> {
        let updated = self.seat.gather(&weights.part(&self.own())?)?;
        for (index, (range, values)) in self.shares.iter().zip(updated).enumerate() {
            if index != self.seat.index() && !range.is_empty() {
                weights.take(range, &values)?;
            }
        }
        Ok(())
    }

    /// Whether all devices could count the gradients of an update: otherwise the error of the first that could not,
    /// at all of them, so that none waits for another.
    pub(crate) fn agree(
        &self,
        failed: Option<EngineError>,
        key: ClaimKey,
        parameters: &[Parameter],
    ) -> Result<()> {
        let own = match failed {
            None => Failure::NONE,
            Some(EngineError::BadGradient { tensor, key, problem }) => {
                let at = parameters.iter().position(|one| one.name == tensor);
                Failure::of(at.unwrap_or(parameters.len()), key.microbatch, problem)
            }
            Some(other) => return Err(other),
        };
        let all = self.seat.gather(&Tensor::f_from_slice(&own.0)?)?;
        let mut all = all.iter().map(|one| Failure(elements::<f64>(one).try_into().expect("five")));
        match all.find_map(|one| one.problem()) {
            None => Ok(()),
            Some((at, microbatch, problem)) => {
                let tensor = parameters.get(at).map_or_else(String::new, |one| one.name.clone());
                Err(EngineError::BadGradient {
                    tensor,
                    key: ClaimKey { microbatch, ..key },
                    problem,
                })
            }
        }
    }
}

/// Changes the numbers of a flat vector in the machine's memory. Of a vector whose parts are on several devices it
/// changes all, because blocks do not end where parts do, and returns this device's part, the range `own`.
pub(crate) fn change_whole(
    numbers: &Tensor,
    own: &Range<usize>,
    together: Option<&Together>,
    change: impl FnOnce(&mut [f32]),
) -> Result<Tensor> {
    let mut all = match together {
        Some(together) => together.whole(numbers)?,
        None => numbers.f_to(Device::Cpu)?.f_alias_copy()?,
    };
    change(elements_mut(&mut all));
    match together {
        Some(_) => Ok(all.f_narrow(0, own.start as i64, own.len() as i64)?.f_alias_copy()?),
        None => Ok(all),
    }
}

/// What a device tells the others about its gradients: a number that is 0 if all is well, otherwise 1 more than the
/// index of the weight; the microbatch; and the problem.
struct Failure([f64; 5]);

impl Failure {
    const NONE: Self = Self([0.0; 5]);

    fn of(at: usize, microbatch: Microbatch, problem: GradientProblem) -> Self {
        let [kind, largest, limit] = match problem {
            GradientProblem::NotFinite => [0.0; 3],
            GradientProblem::OutOfRange { largest, limit } => [1.0, largest, limit],
        };
        Self([at as f64 + 1.0, f64::from(microbatch.0), kind, largest, limit])
    }

    fn problem(&self) -> Option<(usize, Microbatch, GradientProblem)> {
        let [at, microbatch, kind, largest, limit] = self.0;
        let problem = match kind {
            0.0 => GradientProblem::NotFinite,
            _ => GradientProblem::OutOfRange { largest, limit },
        };
        (at > 0.0).then(|| (at as usize - 1, Microbatch(microbatch as u32), problem))
    }
}
