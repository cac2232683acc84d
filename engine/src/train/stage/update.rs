//! Updates of a stage's weights: who updates which, and what becomes of a step.

use std::ops::Range;

use shoal_protocol::manifest::Verdict;

use super::StageModel;
use crate::device::tensor::floats;
use crate::error::{EngineError, Result};
use crate::model::parameters::range_of;
use crate::optimizer::Update;
use crate::optimizer::guard::GuardState;

impl StageModel {
    /// One optimizer update; see [`crate::Engine::apply`].
    pub(crate) fn apply(&mut self, update: &Update<'_>) -> Result<Verdict> {
        self.update_own(update)?;
        self.end_update(update)
    }

    /// Whether a gradient that is not finite may be left out of the step.
    pub(crate) fn leaves_out(&self) -> bool {
        self.guard.as_ref().is_some_and(GuardState::leaves_out)
    }

    /// Updates the weights that are this stage's share. Those of the others follow from
    /// [`Self::copy_from`], and the update ends with [`Self::end_update`].
    pub(crate) fn update_own(&mut self, update: &Update<'_>) -> Result<()> {
        let gradients = update.gradients;
        let _guard = tch::no_grad_guard();
        let expected: Vec<usize> = self.groups.values().map(ExactSizeIterator::len).collect();
        let found: Vec<usize> = gradients.iter().map(|one| one.len() / size_of::<f32>()).collect();
        if expected != found {
            let what = "a stage's mean gradient";
            let [expected, found] = [expected, found].map(|lengths| lengths.iter().sum());
            return Err(EngineError::WrongLength { what, expected, found });
        }
        let gradients = self.groups.values().cloned().zip(gradients.iter().copied().map(floats));
        let gradients: Vec<_> = gradients.collect();
        if let Some(oldest) = self.stale.pop() {
            // Work that reads the oldest version has been accumulated, or is dropped below. Its copies follow
            // when the update ends. Other devices, perhaps at this moment in the same memory, update the others.
            let own = self.own_elements();
            oldest.part(&own)?.f_copy_(&self.weights.part(&own)?)?;
            self.stale.insert(0, std::mem::replace(&mut self.weights, oldest));
        }
        // Other devices may update the others in the same memory.
        let own = self.own_elements();
        let mut weights = self.weights.part(&own)?;
        let verdict = self.verdict(update);
        if verdict.is_skipped() {
            return Ok(());
        }
        let count =
            self.guard.as_ref().map_or(update.count, |guard| guard.updates_of(update.count));
        self.optimizer.apply(
            (&mut weights, own.start),
            &gradients,
            &self.parameters[self.own.clone()],
            &self.manifest,
            (&Update { count, ..*update }, verdict.rate),
        )?;
        // A stage of a run of workers has one weight group.
        self.take_carried(&gradients[0].1)?;
        if let Some((subspace, _)) = &self.subspace {
            subspace.constrain_tensor(own, &mut weights, self.threads)?;
        }
        Ok(())
    }

    /// Takes over what another device of the same island updated.
    pub(crate) fn copy_from(&mut self, owner: &Self) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let range = owner.own_elements();
        self.weights.take(&range, &owner.weights.part(&range)?)
    }

    /// The elements of the weights that are updated here.
    pub(super) fn own_elements(&self) -> Range<usize> {
        range_of(&self.parameters[self.own.clone()])
    }

    /// What becomes of the next step.
    fn verdict(&self, update: &Update<'_>) -> Verdict {
        self.guard
            .as_ref()
            .map_or(Verdict::WHOLE, |guard| guard.judge(update.loss, update.gradient_norm))
    }

    /// All weights are updated.
    pub(crate) fn end_update(&mut self, update: &Update<'_>) -> Result<Verdict> {
        let _guard = tch::no_grad_guard();
        let (step, verdict) = (update.step, self.verdict(update));
        if let Some(guard) = &mut self.guard {
            guard.note(update.loss, update.gradient_norm, &verdict);
        }
        self.weights.follow()?;
        self.version = step.next();
        // Remaining microbatches of the step can no longer count.
        self.forwards.retain(|key, _| key.step > step);
        self.pending.retain(|key, _| key.step > step);
        self.inner.iter_mut().for_each(|inner| inner.discard_through(step));
        Ok(verdict)
    }
}
