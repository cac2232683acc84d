//! The exchanges of virtual workers that have them.

use bytes::Bytes;
use shoal_engine::{ForwardOutput, WorkerForward};
use shoal_protocol::ids::{Exchange, Microbatch, Step};

use super::{Trainer, key};

impl Trainer {
    /// The tokens and labels of an exchange; none of the last.
    pub(crate) fn words(&self, (step, worker, exchange): (u64, u32, u32)) -> Option<[Bytes; 2]> {
        let manifest = &self.manifest;
        let passes = manifest.passes_of_exchange(Microbatch(worker), Exchange(exchange));
        let size = u64::from(manifest.training.microbatch_size);
        let rows = u64::from(passes.start) * size..u64::from(passes.end) * size;
        let batch = self.samples.batch_of(Step(step), Microbatch(worker), rows);
        (!passes.is_empty()).then_some([batch.inputs, batch.labels])
    }

    /// Takes an exchange up through all stages.
    pub(crate) fn up(&mut self, work: (u64, u32, u32)) -> Option<ForwardOutput> {
        let (step, worker, exchange) = work;
        let words = self.words(work);
        let (mut input, mut note) = (words.clone().map(|[tokens, _]| tokens), 0.0);
        for stage in self.manifest.stages() {
            let labels = words.as_ref().map(|[_, labels]| labels);
            let words = input.as_ref().zip(labels).map(|(input, labels)| [input, labels]);
            let key = key(step, stage, worker);
            let ran = self.engine.forward_worker(key, Exchange(exchange), words, note);
            let WorkerForward { activation, note: next, loss } = ran.expect("a forward pass");
            (input, note) = (activation, next);
            if loss.is_some() {
                return loss;
            }
        }
        None
    }

    /// Takes an exchange down again.
    pub(crate) fn down(&mut self, (step, worker, exchange): (u64, u32, u32)) {
        let (mut gradient, mut note) = (None, 0.0);
        for stage in self.manifest.stages().collect::<Vec<_>>().into_iter().rev() {
            let (key, engine) = (key(step, stage, worker), &mut self.engine);
            let ran = engine.backward_worker(key, Exchange(exchange), gradient.as_ref(), note);
            (gradient, note) = ran.expect("a backward pass");
        }
    }

    /// Trains a worker, with the passes of an update under way together or one by one. Returns its loss.
    pub(crate) fn train_worker(&mut self, (step, worker): (u64, u32), at_once: u32) -> f32 {
        let count = self.manifest.exchanges_of(Microbatch(worker));
        let mut loss = None;
        for first in (0..count).step_by(at_once as usize) {
            let some = first..(first + at_once).min(count);
            for exchange in some.clone() {
                loss = self.up((step, worker, exchange)).or(loss);
            }
            for exchange in some {
                self.down((step, worker, exchange));
            }
        }
        for stage in self.manifest.stages() {
            self.engine.accumulate(key(step, stage, worker)).expect("it is pending");
        }
        let Some(ForwardOutput::Loss { share, targets, .. }) = loss else {
            panic!("it ends in a loss")
        };
        *self.targets.entry(step).or_default() += targets;
        share
    }
}
