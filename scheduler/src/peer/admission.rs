//! Taking microbatches in: room, offers, and letting go.

use shoal_protocol::ids::{ClaimKey, Member, Stage, Step};
use shoal_protocol::message::{PeerMessage, ToCoordinator};
use shoal_protocol::units::Moment;

use super::compute::Dropped;
use super::job::{Answer, Claim, Input, Job, Progress};
use super::stage::Waiting;
use super::{Out, Peer};
use crate::action::{Payload, PeerAction, PeerInput, Task, TaskResult};

impl Peer {
    /// Another member has an activation for a stage of this one.
    pub(super) fn offered(&mut self, now: Moment, offer: Waiting, key: ClaimKey, out: &mut Out) {
        let from = offer.from;
        if !self.serves() {
            self.remember_asker(key.stage, from);
            return self.say_busy(from, key, out);
        }
        if key.step < self.version {
            return;
        }
        let manifest = &self.config.manifest;
        let exists = key.step.0 < manifest.training.steps
            && key.microbatch.0 < manifest.microbatches_of(key.step.0);
        if exists && key.step > self.version && !self.is_open(key.step) {
            // The others are ahead: words are on their way here, of commits or of an expulsion.
            return;
        }
        if key.stage == Stage(0) || key.stage > manifest.last_stage() || !exists {
            return Self::nonsense(from, "an offer for work that is not there", out);
        }
        if !self.hosts_at(key.stage, key.step) {
            // It does not know yet who hosts what, or this peer does not.
            if self.is_moving_to(key.stage) {
                self.remember_asker(key.stage, from);
            }
            return self.say_busy(from, key, out);
        }
        if self.jobs.contains_key(&key) {
            return self.offered_again(from, key, out);
        }
        if self.draining && key.step > self.version {
            return self.say_busy(from, key, out);
        }
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        hosted.turned_away.remove(&from);
        let dropping = self.compute.is_dropping(key);
        if !dropping && hosted.room(key.step) > 0 {
            return self.take_offer(now, key, offer, out);
        }
        if dropping {
            // It is told when the engine has dropped what it had of this work.
            return self.turn_away(from, key, out);
        }
        self.queue_offer(offer, key, out);
        self.admit(now, key.stage, out);
    }

    /// Remembers who asked before this peer served a stage.
    fn remember_asker(&mut self, stage: Stage, from: Member) {
        let known = self.early_askers.contains(&(stage, from));
        if known || self.early_askers.len() < self.config.limits.askers {
            self.early_askers.insert((stage, from));
        }
    }

    /// Queues an offer, ahead of a newer one if need be; who finds no place is told.
    fn queue_offer(&mut self, offer: Waiting, key: ClaimKey, out: &mut Out) {
        let places = self.config.limits.offers;
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        let place = (key.step, key.microbatch);
        if let Some(other) = hosted.offers.get(&place) {
            if other.from != offer.from {
                // Who asked first is served first; the other asks again later.
                self.say_busy(offer.from, key, out);
            }
            return;
        }
        hosted.offers.insert(place, offer);
        if hosted.offers.len() > places {
            let ((step, microbatch), late) = hosted.offers.pop_last().expect("one was put in");
            self.turn_away(late.from, ClaimKey { step, stage: key.stage, microbatch }, out);
        }
    }

    /// An offer of work that is here already: perhaps said twice, perhaps from somebody else.
    fn offered_again(&mut self, from: Member, key: ClaimKey, out: &mut Out) {
        let service_time = self.service_time();
        let askers = self.config.limits.askers;
        let job = self.jobs.get_mut(&key).expect("the caller has looked");
        if !job.askers.contains(&from) {
            // The first asker is not one of those beyond the first.
            if job.askers.len() <= askers {
                job.askers.push(from);
            } else if !job.answered {
                return self.turn_away(from, key, out);
            }
        }
        if job.answered {
            let gradient = job.returned.map(|gradient| gradient.id);
            Self::answer(from, key, gradient, out);
        } else if job.input == Input::Expected {
            out.push(PeerAction::Send {
                to: from,
                message: PeerMessage::Accepted { key, service_time },
            });
        }
    }

    fn turn_away(&mut self, from: Member, key: ClaimKey, out: &mut Out) {
        let askers = self.config.limits.askers;
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        if hosted.turned_away.len() < askers || hosted.turned_away.contains_key(&from) {
            hosted.turned_away.insert(from, key.step);
        }
        hosted.refused.insert((key.step, key.microbatch));
        self.say_busy(from, key, out);
    }

    pub(super) fn say_busy(&self, to: Member, key: ClaimKey, out: &mut Out) {
        let service_time = self.service_time();
        out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
    }

    /// Takes offers in while there is room, and tells those turned away when there is a place.
    pub(super) fn admit(&mut self, now: Moment, stage: Stage, out: &mut Out) {
        let places = self.config.limits.offers;
        let version = self.version;
        let hosted = loop {
            let hosted = self.stages.get_mut(&stage).expect("hosted stages are known");
            let Some(((step, microbatch), offer)) = hosted.next_offer() else { break hosted };
            let key = ClaimKey { step, stage, microbatch };
            if key.step >= version && !self.jobs.contains_key(&key) {
                self.take_offer(now, key, offer, out);
            }
        };
        let queue_full = hosted.offers.len() >= places;
        for (to, step) in std::mem::take(&mut hosted.turned_away) {
            if queue_full && hosted.room(step.max(version)) == 0 {
                hosted.turned_away.insert(to, step);
            } else {
                out.push(PeerAction::Send { to, message: PeerMessage::Free { stage } });
            }
        }
    }

    /// Takes a microbatch in that another member offered: its claim is asked for at once, so that the
    /// answer is not waited for later.
    fn take_offer(&mut self, now: Moment, key: ClaimKey, offer: Waiting, out: &mut Out) {
        let hosted = &self.stages[&key.stage];
        let contested = offer.retry || hosted.refused.contains(&(key.step, key.microbatch));
        let claim = Claim::Asked { at: now };
        let last = self.is_last(key);
        let (service_time, to) = (self.service_time(), offer.from);
        out.push(PeerAction::Send { to, message: PeerMessage::Accepted { key, service_time } });
        out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key }));
        let job = Job { contested, accepted_at: now, ..Job::new(key, Some(to), claim, last) };
        self.take(now, key, job, out);
    }

    /// Takes a microbatch in: it has room from here on.
    pub(super) fn take(&mut self, now: Moment, key: ClaimKey, job: Job, out: &mut Out) {
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        hosted.take(key.step);
        self.jobs.insert(key, job);
        self.offer_early(now, key, out);
        self.advance(now, key, out);
    }

    /// Releases a microbatch's room, if it has not been released.
    pub(super) fn release_room(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get_mut(&key).expect("only jobs have room");
        if std::mem::take(&mut job.holds_room) {
            let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
            hosted.give_room_back(key.step);
            self.admit(now, key.stage, out);
        }
    }

    /// An activation came.
    pub(super) fn activation(
        &mut self,
        now: Moment,
        key: ClaimKey,
        payload: Payload,
        out: &mut Out,
    ) {
        match self.jobs.get_mut(&key) {
            Some(job) if job.input == Input::Expected => {
                job.input = Input::Here(payload);
                job.ready_at = now;
                self.in_flight += payload.size;
                self.queue_passes(key);
            }
            _ => out.push(PeerAction::Release(payload.id)),
        }
    }

    /// Forgets the work of every step up to this one, and its output logs.
    pub(super) fn drop_jobs_through(&mut self, step: Step, out: &mut Out) {
        let old: Vec<ClaimKey> =
            self.jobs.keys().take_while(|key| key.step <= step).copied().collect();
        for key in old {
            self.drop_job(key, out);
        }
    }

    /// Lets go of one microbatch and everything kept for it. What the engine is using now is
    /// released when it is done.
    pub(super) fn drop_job(&mut self, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.remove(&key).expect("only jobs are dropped");
        let hosted = self.stages.get_mut(&key.stage).expect("hosted stages are known");
        let running = job.forward == Progress::Running || job.backward == Progress::Running;
        if job.holds_room && !running {
            hosted.give_room_back(key.step);
        }
        if key.step >= self.version {
            hosted.refused.insert((key.step, key.microbatch));
        }
        hosted.blocked.remove(&key);
        self.compute.forget(key);
        for payload in [job.output, job.returned].into_iter().flatten() {
            self.logged = self.logged - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
        let holds_room = job.holds_room && running;
        let mut dropped = Dropped { in_use: Vec::new(), holds_room };
        let mut incoming = |payload: Payload, used: bool| {
            if used {
                dropped.in_use.push(payload);
            } else {
                self.in_flight = self.in_flight - payload.size;
                out.push(PeerAction::Release(payload.id));
            }
        };
        if let Input::Here(payload) = job.input {
            incoming(payload, job.forward == Progress::Running);
        }
        if let Answer::Here(payload) = job.answer {
            incoming(payload, job.backward == Progress::Running);
        }
        let has_graph = job.forward == Progress::Done
            && job.backward != Progress::Done
            && !self.is_held_out(key);
        if running || has_graph {
            self.compute.drop_later(key, dropped);
            out.push(PeerAction::Compute(Task::Discard { key }));
        }
    }

    /// Whether there may be work of this step. A step's work is given out while one before is reduced
    /// whose update it reads, and the commit of the one before that may still be on its way here.
    pub(super) fn is_open(&self, step: Step) -> bool {
        (self.version..=self.newest_open()).contains(&step)
    }

    /// The newest step that there may be work of.
    pub(super) fn newest_open(&self) -> Step {
        self.newest_runnable().next().next()
    }

    /// The newest step whose weights are here.
    pub(super) fn newest_runnable(&self) -> Step {
        Step(self.version.0 + self.config.manifest.steps_at_once() - 1)
    }

    /// Lets go of what an input brings to a peer that takes no further part.
    pub(super) fn let_go(&mut self, now: Moment, input: PeerInput, out: &mut Out) {
        let payload = match input {
            PeerInput::Tensor { payload, .. } => Some(payload),
            PeerInput::Done { result, .. } => match result {
                TaskResult::Forwarded { key, output: result, .. }
                | TaskResult::Returned { key, gradient: result }
                    if self.compute.is_dropping(key) =>
                {
                    return self.drop_result(key, result, out);
                }
                TaskResult::Forwarded { output, .. } => output,
                TaskResult::Returned { gradient, .. } => gradient,
                TaskResult::Exported { .. }
                | TaskResult::Reduced { .. }
                | TaskResult::Installed { .. }
                | TaskResult::Summarised { .. } => return self.round_computed(now, result, out),
                _ => None,
            },
            _ => None,
        };
        out.extend(payload.map(|payload| PeerAction::Release(payload.id)));
    }
}
