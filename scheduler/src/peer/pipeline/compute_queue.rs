//! The queue of passes for the engine.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::units::Moment;

use super::job::{Job, Pass};
use super::residency::{Backwards, Forwards, Visit, choose};
use super::visits::Visits;
use crate::action::Payload;

/// Passes that the engine has at a time: one runs and one waits, so that the engine never idles while the
/// end of a pass is handled. A longer queue would delay a more urgent pass that arrives later.
const GIVEN: usize = 2;

/// Passes that can run, and the number of those that the engine has.
///
/// The oldest step goes first; within a step backward passes, since they end microbatches; among forward
/// passes the latest stage, which is nearest to its backward pass. A peer that swaps its stages goes by
/// visits instead.
#[derive(Debug, Default)]
pub(super) struct ComputeQueue {
    /// Passes that the engine has.
    given: usize,
    /// Whether a pass ended since the window was last considered.
    pass_ended: bool,
    /// The time at which the last pass ended.
    ended_at: Moment,
    forward: Forwards,
    backward: Backwards,
    /// The visits of a peer that swaps its stages.
    pub(super) visits: Visits,
    /// Dropped work of which the engine still has some.
    dropping: BTreeMap<ClaimKey, Dropped>,
}

/// Resources that dropped work keeps until the engine discards it.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    /// Tensors that the engine is using.
    pub(super) in_use: Vec<Payload>,
    pub(super) holds_room: bool,
}

impl ComputeQueue {
    /// Queues the passes of a job that can run.
    pub(super) fn queue(&mut self, key: ClaimKey, job: &Job, held_out: bool) {
        if job.can_run_forward() {
            self.forward.insert((key.step, Reverse(key.stage), key.microbatch));
        }
        if job.can_run_backward() && !held_out {
            self.backward.insert((key.step, key.stage, key.microbatch));
        }
    }

    /// Takes the next pass out of the queue, if the engine has room for it. Forward passes must be of
    /// the steps up to `newest`.
    pub(super) fn next(&mut self, newest: Step) -> Option<Pass> {
        if self.given >= GIVEN {
            return None;
        }
        let backward = self.next_backward().map(Pass::Backward);
        let pass = backward.or_else(|| self.next_forward(newest).map(Pass::Forward))?;
        self.given += 1;
        Some(pass)
    }

    /// The next backward pass, unless a forward pass of an older step can run.
    fn next_backward(&mut self) -> Option<ClaimKey> {
        let (step, stage, microbatch) = *self.backward.first()?;
        if self.forward.first().is_some_and(|(older, _, _)| *older < step) {
            return None;
        }
        self.backward.pop_first();
        Some(ClaimKey { step, stage, microbatch })
    }

    fn next_forward(&mut self, newest: Step) -> Option<ClaimKey> {
        let (step, Reverse(stage), microbatch) = *self.forward.first()?;
        if step > newest {
            return None;
        }
        self.forward.pop_first();
        Some(ClaimKey { step, stage, microbatch })
    }

    /// Like [`Self::next`] for a peer that swaps its stages. `comes` is whether other peers may send more
    /// work of a stage in a step. Returns the visit too, if it is a new one.
    pub(super) fn next_by_visit(
        &mut self,
        now: Moment,
        newest: Step,
        comes: impl Fn(Step, Stage) -> bool,
    ) -> Option<(Pass, Option<Visit>)> {
        if self.given >= GIVEN {
            return None;
        }
        let forward = self.forward.first().map(|(step, _, _)| *step).filter(|step| *step <= newest);
        let backward = self.backward.first().map(|(step, _, _)| *step);
        let Some(step) = forward.into_iter().chain(backward).min() else {
            self.visits.rest();
            return None;
        };
        let here = self.visits.current();
        let (visit, pass) = choose(step, here, &self.forward, &self.backward)?;
        let comes = here.is_some_and(|here| comes(step, here.stage));
        if self.visits.waits(now, visit, self.given > 0, comes) {
            return None;
        }
        match pass {
            Pass::Forward(key) => {
                self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
            }
            Pass::Backward(key) => {
                self.backward.remove(&(key.step, key.stage, key.microbatch));
            }
        }
        self.given += 1;
        Some((pass, self.visits.begin(visit, pass).then_some(visit)))
    }

    /// The engine received a pass beyond those of [`Self::next`].
    pub(super) fn note_extra_pass(&mut self) {
        self.given += 1;
    }

    pub(super) fn note_end(&mut self, now: Moment) {
        self.given -= 1;
        self.pass_ended = true;
        self.ended_at = now;
    }

    pub(super) fn ended_at(&self) -> Moment {
        self.ended_at
    }

    /// Whether a pass ended since the last call and the engine has nothing left to do.
    pub(super) fn take_idle(&mut self) -> bool {
        std::mem::take(&mut self.pass_ended)
            && self.given == 0
            && self.forward.is_empty()
            && self.backward.is_empty()
    }

    /// Takes the passes of a microbatch out of the queue.
    pub(super) fn remove(&mut self, key: ClaimKey) {
        self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
        self.backward.remove(&(key.step, key.stage, key.microbatch));
    }

    pub(super) fn is_dropping(&self, key: ClaimKey) -> bool {
        self.dropping.contains_key(&key)
    }

    /// Keeps the resources of dropped work until the engine discards it.
    pub(super) fn drop_later(&mut self, key: ClaimKey, dropped: Dropped) {
        let again = self.dropping.insert(key, dropped);
        assert!(again.is_none(), "work is accepted again only after its drop is done");
    }

    /// Takes the tensors of dropped work that the engine stopped using.
    pub(super) fn take_in_use(&mut self, key: ClaimKey) -> Vec<Payload> {
        let dropped = self.dropping.get_mut(&key).expect("the caller knows that it is dropped");
        std::mem::take(&mut dropped.in_use)
    }

    /// The engine discarded dropped work. Returns whether that still occupied room.
    pub(super) fn discarded(&mut self, key: ClaimKey) -> bool {
        let dropped = self.dropping.remove(&key).expect("work is discarded once");
        assert_eq!(dropped.in_use, [], "the engine is done with it");
        dropped.holds_room
    }

    /// Takes the room of all dropped work, for a rewind. Returns the work that occupied it.
    pub(super) fn take_rooms(&mut self) -> Vec<ClaimKey> {
        let held = self.dropping.iter_mut();
        held.filter_map(|(key, dropped)| std::mem::take(&mut dropped.holds_room).then_some(*key))
            .collect()
    }
}
