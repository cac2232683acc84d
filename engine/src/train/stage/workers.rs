//! What virtual workers do at a stage.

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, Exchange};

use super::{ForwardOutput, Kept, StageModel};
use crate::error::Result;
use crate::weights::version::Weights;

/// The result of a forward pass of a virtual worker whose passes are exchanges.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerForward {
    /// The input of the next stage; none at the last stage or of the last exchange.
    pub activation: Option<Bytes>,
    /// The square of the norm of the newest update's gradient, which travels up with it.
    pub note: f64,
    /// The loss over all passes, from the last exchange of the last stage.
    pub loss: Option<ForwardOutput>,
}

impl StageModel {
    /// The models that virtual workers train.
    pub(crate) fn workers(&self) -> impl Iterator<Item = &Self> {
        self.inner.iter().flat_map(|inner| inner.models())
    }

    /// All that a virtual worker does in a step.
    pub(super) fn train_worker(
        &mut self,
        key: ClaimKey,
        words: [&Bytes; 2],
    ) -> Result<ForwardOutput> {
        let mut inner = self.inner.take().expect("the run has workers");
        let trained = self.weights_of(key).and_then(|weights| inner.train(key, weights, words));
        self.inner = Some(inner);
        let (loss, distance) = trained?;
        self.forwards.insert(key, Kept::Distance(distance));
        Ok(loss)
    }

    /// Runs an exchange forward; see [`crate::Engine::forward_worker`].
    pub(crate) fn forward_worker(
        &mut self,
        work: (ClaimKey, Exchange),
        words: Option<[&Bytes; 2]>,
        note: f64,
    ) -> Result<WorkerForward> {
        let mut inner = self.inner.take().expect("the run has workers");
        let frozen = self.frozen.as_ref();
        let output = self.start_and_joined(work).and_then(|(start, joined)| {
            inner.forward_exchange(work, (start, joined, frozen), words, note)
        });
        self.inner = Some(inner);
        output
    }

    /// Runs an exchange backward; see [`crate::Engine::backward_worker`].
    pub(crate) fn backward_worker(
        &mut self,
        work: (ClaimKey, Exchange),
        gradient: Option<&Bytes>,
        note: f64,
    ) -> Result<(Option<Bytes>, f64)> {
        let mut inner = self.inner.take().expect("the run has workers");
        let weights = self.weights_in(work.0, work.1);
        let output = weights.and_then(|held| inner.backward_exchange(work, held, gradient, note));
        self.inner = Some(inner);
        let (gradient, note, pieces) = output?;
        self.pending.extend(pieces.map(|pieces| (work.0, pieces.into())));
        Ok((gradient, note))
    }

    /// The weights from which a virtual worker begins, and those that it joins before this exchange.
    fn start_and_joined(
        &self,
        (key, exchange): (ClaimKey, Exchange),
    ) -> Result<(&Weights, Option<&Weights>)> {
        let (start, newest) = (self.weights_of(key)?, self.weights_in(key, exchange)?);
        Ok((start, self.manifest.joins_at(exchange).then_some(newest)))
    }
}
