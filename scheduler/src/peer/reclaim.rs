//! Claims that are asked back: the answer never waits for the engine.

use shoal_protocol::ids::{ClaimKey, Grant, Step};
use shoal_protocol::message::{PassTimes, PeerMessage, ToCoordinator};
use shoal_protocol::units::Moment;

use super::job::{Answer, Job, Progress, Report};
use super::{Out, Peer};
use crate::action::PeerAction;

impl Peer {
    /// The coordinator asks a claim back, if its work is late or, without any patience, if it is yet
    /// to be begun.
    pub(super) fn reclaimed(
        &mut self,
        now: Moment,
        key: ClaimKey,
        grant: Grant,
        patience: PassTimes,
        out: &mut Out,
    ) {
        if key.step < self.version {
            return;
        }
        let Some(job) =
            self.jobs.get(&key).filter(|job| job.grant().is_none_or(|own| own == grant))
        else {
            return self.deny(key, grant, out);
        };
        // What is done was reported, and that repeats by itself until it is noted.
        let granted = job.grant().is_some() && job.report == Report::NotDone;
        let relieved = patience == PassTimes::default();
        let goes = if relieved {
            job.forward == Progress::Waiting
        } else {
            self.is_late(now, key, job, patience)
        };
        if granted && goes {
            self.turn_askers_away(key, out);
            self.remember_askers(key, relieved);
            self.abandon(key, out);
            self.admit(now, key.stage, out);
        } else {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Working { key, grant }));
        }
    }

    /// Whether the work of this grant was let go of.
    pub(super) fn was_let_go(&self, key: ClaimKey, grant: Grant) -> bool {
        self.released.get(&key).is_some_and(|last| grant <= *last)
    }

    /// This peer does not work on what it was granted, and will not.
    pub(super) fn deny(&mut self, key: ClaimKey, grant: Grant, out: &mut Out) {
        self.released.entry(key).and_modify(|last| *last = grant.max(*last)).or_insert(grant);
        out.push(PeerAction::ToCoordinator(ToCoordinator::Released { key, grant }));
    }

    /// Whether a pass that could have begun is not at its end after so long.
    fn is_late(&self, now: Moment, key: ClaimKey, job: &Job, patience: PassTimes) -> bool {
        // The engine may have the other pass of another microbatch first, which may take longer.
        let patience = patience.forward.max(patience.backward);
        match (job.forward, job.backward) {
            (Progress::Waiting, _)
                if !job.can_run_forward() || key.step > self.newest_runnable() =>
            {
                false
            }
            (Progress::Waiting | Progress::Running, _) => {
                now.since(self.begins_at(key.step, job)) >= patience
            }
            (Progress::Done, Progress::Done) => false,
            (Progress::Done, _) => {
                matches!(job.answer, Answer::Own | Answer::Here(_))
                    && now.since(self.begins_at(key.step, job)) >= patience
            }
        }
    }

    /// When the engine could have begun the next pass of this work: what it needs was there, and the
    /// pass before had ended. While passes end, none that waits for its turn is late.
    pub(super) fn begins_at(&self, step: Step, job: &Job) -> Moment {
        let reads_newest = self.config.manifest.reads(step) == self.version;
        let weights_at = if reads_newest { self.version_at } else { Moment::default() };
        job.ready_at.max(weights_at).max(self.compute.ended_at)
    }

    /// Whoever sent this work is told when there is room again: at once where it only relieves this peer,
    /// which is not busy for what else they have; else when the engine ended a pass.
    fn remember_askers(&mut self, key: ClaimKey, relieved: bool) {
        let hosted = self.stages.get_mut(&key.stage).expect("a job's stage is hosted");
        let most = self.config.limits.askers;
        for asker in &self.jobs[&key].askers {
            if relieved && hosted.turned_away.len() < most {
                hosted.turned_away.insert(*asker, key.step);
            } else if !relieved && hosted.let_down.len() < most {
                hosted.let_down.insert(*asker, key);
            }
        }
    }

    /// A pass ended: those whose work was let go of as late hear what this peer needs, and that it is free.
    pub(super) fn tell_let_down(&mut self, out: &mut Out) {
        let service_time = self.service_time();
        for (stage, hosted) in &mut self.stages {
            for (to, key) in std::mem::take(&mut hosted.let_down) {
                out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
                out.push(PeerAction::Send { to, message: PeerMessage::Free { stage: *stage } });
            }
        }
    }

    /// Whoever sent this work, or is to, sends it elsewhere.
    pub(super) fn turn_askers_away(&self, key: ClaimKey, out: &mut Out) {
        let service_time = self.service_time();
        for to in self.jobs[&key].askers.iter().copied() {
            out.push(PeerAction::Send { to, message: PeerMessage::Busy { key, service_time } });
        }
    }
}
