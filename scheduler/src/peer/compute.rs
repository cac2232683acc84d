//! What the engine does next, and what its results lead to.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::message::{FixedLoss, ToCoordinator};
use shoal_protocol::units::Moment;

use super::job::{Answer, Input, Progress, Report};
use super::stage::ServiceTime;
use super::{Out, Peer};
use crate::action::{Payload, PeerAction, PeerEvent, Task, TaskResult};

/// Passes that the engine has at a time: one runs and one waits, so that the engine need not wait
/// for its next while the end of one is dealt with. With more, a pass that is worth more and comes
/// later would wait longer.
const GIVEN: usize = 2;

/// Passes that could run now, and those that the engine has. The oldest step goes first; of one step
/// backward passes, since they end microbatches; among forward passes the latest stage, which is
/// nearest to its backward pass.
#[derive(Debug, Default)]
pub(super) struct Compute {
    /// Passes that the engine was given and has not ended.
    given: usize,
    /// A pass ended since the window was last looked at.
    ended: bool,
    /// When one last did.
    pub(super) ended_at: Moment,
    forward: BTreeSet<(Step, Reverse<Stage>, Microbatch)>,
    backward: BTreeSet<(Step, Stage, Microbatch)>,
    /// Work that was dropped while the engine had some of it.
    dropping: BTreeMap<ClaimKey, Dropped>,
}

/// What dropped work still takes up.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    /// What the engine is using.
    pub(super) in_use: Vec<Payload>,
    /// Whether it has room, which is given back when the engine is done with it.
    pub(super) holds_room: bool,
}

impl Compute {
    /// The next backward pass, unless a forward pass of an older step can run.
    fn next_backward(&mut self) -> Option<ClaimKey> {
        let (step, stage, microbatch) = *self.backward.first()?;
        if self.forward.first().is_some_and(|(older, _, _)| *older < step) {
            return None;
        }
        self.backward.pop_first();
        Some(ClaimKey { step, stage, microbatch })
    }

    /// The next forward pass, of the steps up to this one.
    fn next_forward(&mut self, newest: Step) -> Option<ClaimKey> {
        let (step, Reverse(stage), microbatch) = *self.forward.first()?;
        if step > newest {
            return None;
        }
        self.forward.pop_first();
        Some(ClaimKey { step, stage, microbatch })
    }

    fn ended(&mut self, now: Moment) {
        self.given -= 1;
        self.ended = true;
        self.ended_at = now;
    }

    /// Whether the engine has nothing to do, and no pass waits for it.
    pub(super) fn is_idle(&self) -> bool {
        self.given == 0 && self.forward.is_empty() && self.backward.is_empty()
    }

    pub(super) fn is_dropping(&self, key: ClaimKey) -> bool {
        self.dropping.contains_key(&key)
    }

    /// Takes the passes of a microbatch out of the queue.
    pub(super) fn forget(&mut self, key: ClaimKey) {
        self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
        self.backward.remove(&(key.step, key.stage, key.microbatch));
    }

    /// Remembers that the engine is to drop a microbatch, and what that takes up until then.
    pub(super) fn drop_later(&mut self, key: ClaimKey, dropped: Dropped) {
        let again = self.dropping.insert(key, dropped);
        assert!(again.is_none(), "no work is taken again before its drop is done");
    }

    /// Takes their room from all that is being dropped: everything is done again.
    pub(super) fn take_rooms(&mut self) -> Vec<ClaimKey> {
        let held = self.dropping.iter_mut();
        held.filter_map(|(key, dropped)| std::mem::take(&mut dropped.holds_room).then_some(*key))
            .collect()
    }
}

impl Peer {
    /// Puts the passes of this microbatch that can run into the queue.
    pub(super) fn queue_passes(&mut self, key: ClaimKey) {
        let job = &self.jobs[&key];
        if job.can_run_forward() {
            self.compute.forward.insert((key.step, Reverse(key.stage), key.microbatch));
        }
        if job.can_run_backward() && !self.is_held_out(key) {
            self.compute.backward.insert((key.step, key.stage, key.microbatch));
        }
    }

    /// Does what has become possible for this microbatch.
    pub(super) fn advance(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        self.queue_passes(key);
        if self.is_held_out(key) && self.jobs[&key].can_be_evaluated() {
            self.answer_all(now, key, out);
            self.report(now, key, out);
        }
    }

    /// Gives the engine the next passes if it has too few.
    pub(super) fn dispatch(&mut self, out: &mut Out) {
        while self.compute.given < GIVEN && self.give_pass(out) {}
    }

    /// Gives the engine the next pass, if there is one; and the backward pass with the forward pass
    /// where it follows at once, at the last stage.
    fn give_pass(&mut self, out: &mut Out) -> bool {
        if let Some(key) = self.compute.next_backward() {
            let job = self.jobs.get_mut(&key).expect("only jobs are queued");
            assert!(job.can_run_backward(), "no backward pass without its claim");
            job.backward = Progress::Running;
            let gradient = match job.answer {
                Answer::Here(payload) => Some(payload.id),
                _ => None,
            };
            self.compute.given += 1;
            out.push(PeerAction::Compute(Task::Backward { key, gradient }));
        } else if let Some(key) = self.compute.next_forward(self.newest_runnable()) {
            let held_out = self.is_held_out(key);
            let job = self.jobs.get_mut(&key).expect("only jobs are queued");
            job.forward = Progress::Running;
            let activation = match job.input {
                Input::Here(payload) => Some(payload.id),
                _ => None,
            };
            self.compute.given += 1;
            out.push(PeerAction::Compute(Task::Forward { key, activation, held_out }));
            if job.answer == Answer::Own && job.grant().is_some() && !held_out {
                job.backward = Progress::Running;
                self.compute.given += 1;
                out.push(PeerAction::Compute(Task::Backward { key, gradient: None }));
            }
        } else {
            return false;
        }
        true
    }

    /// Widens the window of a stage by one when the engine has come to an end of what it could do
    /// and the window keeps work out: over a slow link more must be in flight.
    pub(super) fn widen_when_idle(&mut self, now: Moment, out: &mut Out) {
        if !std::mem::take(&mut self.compute.ended) || !self.compute.is_idle() {
            return;
        }
        let newest = self.newest_runnable();
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            let hosted = self.stages.get_mut(&stage).expect("it was just listed");
            let kept_out =
                stage == Stage(0) || !hosted.offers.is_empty() || !hosted.turned_away.is_empty();
            let mut runnable = (self.version.0..=newest.0).map(Step);
            let full = runnable.any(|step| hosted.is_full(step));
            if kept_out && full && hosted.window < hosted.largest_window {
                hosted.window += 1;
                self.admit(now, stage, out);
            }
        }
    }

    /// A task ended.
    pub(super) fn computed(
        &mut self,
        now: Moment,
        result: TaskResult,
        busy: Duration,
        out: &mut Out,
    ) {
        match result {
            TaskResult::Forwarded { key, output, loss } => {
                let took = self.pass_ended(now, key);
                self.pass_measured(key, |service_time| service_time.ran_forward(busy), out);
                if self.compute.is_dropping(key) {
                    return self.drop_result(key, output, out);
                }
                self.forwarded(now, key, took, (output, loss), out);
            }
            TaskResult::Returned { key, gradient } => {
                let took = self.pass_ended(now, key);
                self.pass_measured(key, |service_time| service_time.ran_backward(busy), out);
                if self.compute.is_dropping(key) {
                    return self.drop_result(key, gradient, out);
                }
                self.returned(now, key, took, gradient, out);
            }
            // Before a rewind the accumulator was another.
            TaskResult::Accumulated { key } if self.has_weights() => {
                self.accumulated(now, key, out);
            }
            TaskResult::Accumulated { .. } => {}
            TaskResult::Discarded { key } => {
                let dropped = self.compute.dropping.remove(&key).expect("it is dropped once");
                assert_eq!(dropped.in_use, [], "the engine is done with it");
                if let Some(hosted) = self.stages.get_mut(&key.stage) {
                    if dropped.holds_room {
                        hosted.give_room_back(key.step);
                    }
                    self.admit(now, key.stage, out);
                }
            }
            TaskResult::Diverged { key, reason } => {
                let message = ToCoordinator::Diverged { key, reason };
                out.push(PeerAction::ToCoordinator(message));
            }
            TaskResult::Applied { round } => self.applied(round, out),
            TaskResult::Left { .. } => {}
            TaskResult::Stored { version, stage, files } => {
                self.stored(version, stage, files, out);
            }
            TaskResult::NotStored { version, stage } => self.not_stored(version, stage, out),
            TaskResult::Exported { .. }
            | TaskResult::Reduced { .. }
            | TaskResult::Installed { .. }
            | TaskResult::Summarised { .. } => self.round_computed(now, result, out),
            TaskResult::Restored { version, stage } => self.restored(now, version, stage, out),
            TaskResult::NotRestored { version, stage } => {
                self.fetched(version, stage, false, out);
            }
        }
    }

    /// A pass was measured: it counts, and twice where its work was let go of as late, which is no accident then.
    fn pass_measured(&mut self, key: ClaimKey, count: impl Fn(&mut ServiceTime), out: &mut Out) {
        if let Some(hosted) = self.stages.get_mut(&key.stage) {
            count(&mut hosted.service_time);
            if hosted.let_down.values().any(|late| *late == key) {
                count(&mut hosted.service_time);
            }
        }
        self.tell_let_down(out);
    }

    /// A pass ended. Returns how long it took since it could have begun.
    fn pass_ended(&mut self, now: Moment, key: ClaimKey) -> Duration {
        let began = self.jobs.get(&key).map_or(now, |job| self.begins_at(key.step, job));
        self.compute.ended(now);
        now.since(began)
    }

    /// Lets go of the result of work that was dropped meanwhile, and of what it used.
    pub(super) fn drop_result(&mut self, key: ClaimKey, result: Option<Payload>, out: &mut Out) {
        out.extend(result.map(|payload| PeerAction::Release(payload.id)));
        let dropped = self.compute.dropping.get_mut(&key).expect("the caller has looked");
        for payload in std::mem::take(&mut dropped.in_use) {
            self.in_flight = self.in_flight - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
    }

    fn forwarded(
        &mut self,
        now: Moment,
        key: ClaimKey,
        took: Duration,
        (output, loss): (Option<Payload>, Option<FixedLoss>),
        out: &mut Out,
    ) {
        let last = self.is_last(key);
        let job = self.jobs.get_mut(&key).expect("dropped work is known as such");
        job.pass_times.forward = took;
        job.ready_at = now;
        assert_eq!(last, loss.is_some(), "a loss comes from the last stage");
        assert_eq!(last, output.is_none(), "an activation comes from every other stage");
        job.forward = Progress::Done;
        job.loss = loss;
        if let Input::Here(payload) = std::mem::replace(&mut job.input, Input::Used) {
            self.in_flight = self.in_flight - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
        if let Some(output) = output {
            job.output = Some(output);
            self.logged += output.size;
            self.send_on(now, key, out);
        }
        self.advance(now, key, out);
    }

    fn returned(
        &mut self,
        now: Moment,
        key: ClaimKey,
        took: Duration,
        gradient: Option<Payload>,
        out: &mut Out,
    ) {
        self.sums_change(key);
        let job = self.jobs.get_mut(&key).expect("dropped work is known as such");
        assert!(job.grant().is_some(), "nothing is added without its claim");
        assert_eq!(gradient.is_none(), key.stage == Stage(0), "the first stage has no upstream");
        job.backward = Progress::Done;
        job.pass_times.backward = took;
        if let Answer::Here(payload) = std::mem::replace(&mut job.answer, Answer::Used) {
            self.in_flight = self.in_flight - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
        out.push(PeerAction::Compute(Task::Accumulate { key }));
        if let Some(gradient) = gradient {
            job.returned = Some(gradient);
            self.logged += gradient.size;
            self.answer_all(now, key, out);
        }
    }

    /// Answers everybody who asked, and releases the room.
    fn answer_all(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are answered");
        job.answered = true;
        let gradient = job.returned.map(|gradient| gradient.id);
        for to in &job.askers {
            Self::answer(*to, key, gradient, out);
        }
        self.release_room(now, key, out);
    }

    fn accumulated(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        // Who leaves the stage before this step has let go of it: that accumulator counts nowhere.
        if !self.jobs.contains_key(&key) {
            return;
        }
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        hosted.count(key);
        out.push(PeerAction::Event(PeerEvent::Counted { key }));
        self.release_room(now, key, out);
        self.report(now, key, out);
    }

    /// Reports that the work is done.
    fn report(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs are reported");
        let grant = job.grant().expect("work is done under its claim");
        job.report = Report::Sent { at: now };
        let (loss, pass_times) = (job.loss, job.pass_times);
        out.push(PeerAction::ToCoordinator(ToCoordinator::Done { key, grant, loss, pass_times }));
    }
}
