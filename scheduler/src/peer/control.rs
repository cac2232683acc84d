//! Words of the coordinator.

use shoal_protocol::ids::{ClaimKey, Era, Grant, Member, Microbatch, Stage, StageSpan, Step};
use shoal_protocol::message::{FromCoordinator, PeerMessage, ToCoordinator};
use shoal_protocol::units::Moment;

use super::job::{Claim, Job, Report};
use super::joining::Newcomer;
use super::stage::Hosted;
use super::{Out, Peer, Status};
use crate::action::{PeerAction, PeerEvent};
use crate::router::Router;
use crate::schedule::first_window;

impl Peer {
    pub(super) fn told(&mut self, now: Moment, message: FromCoordinator, out: &mut Out) {
        match message {
            FromCoordinator::Admitted { era, span, version } => {
                self.admitted(era, span, version, out);
            }
            FromCoordinator::Census { term, era, began_at, span, commit, view } => {
                self.census(now, term, (era, began_at, span), (commit, view), out);
            }
            FromCoordinator::TakenOver => self.taken_over(now, out),
            FromCoordinator::Keep { version, part } => {
                out.push(PeerAction::Keep { version, part });
            }
            FromCoordinator::Checkpoint { version, stages, oldest } => {
                let event = PeerEvent::Checkpoint { version, stages, oldest };
                out.push(PeerAction::Event(event));
            }
            FromCoordinator::Refused { reason } => {
                if self.status == Status::Joining {
                    self.end(PeerEvent::Refused { reason }, out);
                }
            }
            FromCoordinator::Expelled { reason } => {
                self.end(PeerEvent::Expelled { reason }, out);
            }
            FromCoordinator::ProbeLinks { at } => self.probe_links(at, out),
            FromCoordinator::Snapshot { version, parts } => {
                self.snapshot(now, version, parts, out);
            }
            FromCoordinator::Rewind { era, version, span } => self.rewind(era, version, span, out),
            FromCoordinator::View(change) => self.view_changed(now, &change, out),
            FromCoordinator::Members { number, part, members } => {
                self.members_told(now, number, part, members, out);
            }
            FromCoordinator::Replay { keys } => self.replay(now, &keys, out),
            FromCoordinator::Work { step, grants } => self.work(now, step, &grants, out),
            FromCoordinator::Granted { key, grant, next_holder } => {
                self.granted(now, key, grant, next_holder, out);
            }
            FromCoordinator::Held { key, holder } => self.held(now, key, holder, out),
            // The step is over for this work, and its commit will take it away.
            FromCoordinator::NotOpen { .. } => {}
            FromCoordinator::Reclaim { key, grant, patience } => {
                self.reclaimed(now, key, grant, patience, out);
            }
            FromCoordinator::Noted { key, grant } => {
                if let Some(job) = self.jobs.get_mut(&key)
                    && job.grant() == Some(grant)
                    && matches!(job.report, Report::Sent { .. })
                {
                    job.report = Report::Noted;
                }
            }
            FromCoordinator::Close { round, group, mended, counted } => {
                self.closed(now, round, &group, mended, counted, out);
            }
            FromCoordinator::RoundGroup { stage, number, part, here } => {
                self.handle_round_group(stage, number, part, here);
            }
            FromCoordinator::Commit(record) => self.commit(now, record, out),
            FromCoordinator::Store { version, stage } => self.store(version, stage, out),
            FromCoordinator::Finished => self.end(PeerEvent::Finished, out),
            FromCoordinator::Stopped { reason } => self.end(PeerEvent::Stopped { reason }, out),
        }
    }

    fn admitted(&mut self, era: Era, span: StageSpan, version: Step, out: &mut Out) {
        if self.status != Status::Joining {
            return;
        }
        self.era = era.max(self.era);
        self.status = Status::Member;
        self.span = Some(span);
        self.version = version;
        let hosted: Vec<Stage> = span.stages().collect();
        for stage in &hosted {
            self.stages.insert(*stage, self.hosted(*stage, hosted.len()));
        }
        self.newcomer = Some(Newcomer::admitted(version));
        self.route_by_view();
        out.push(PeerAction::Event(PeerEvent::Admitted { span }));
        self.serve_when_listed(out);
        self.say_ready(out);
    }

    /// Tells those who offered something before this peer served that it does.
    pub(super) fn welcome_early_askers(&mut self, out: &mut Out) {
        for (stage, to) in std::mem::take(&mut self.early_askers) {
            if self.stages.contains_key(&stage) {
                out.push(PeerAction::Send { to, message: PeerMessage::Free { stage } });
            }
        }
    }

    /// A stage that this peer hosts beside others, each with its own share of the limits.
    pub(super) fn hosted(&self, stage: Stage, hosted: usize) -> Hosted {
        let limits = &self.config.limits;
        let manifest = &self.config.manifest;
        let round_trip = manifest.activation_bytes() + manifest.gradient_bytes();
        // Work of one more step is taken in before the first of them ends, and that one's again when a
        // member is lost.
        let steps = manifest.steps_at_once() + 1;
        let share = limits.in_flight.0 / hosted as u64 / steps / round_trip.0;
        let largest = (limits.largest_window as u64).min(share).max(1) as usize;
        let behind = usize::from(manifest.last_stage().0 - stage.0);
        let window = limits.first_window.max(first_window(behind)).min(largest);
        // Each stage has a router of its own, and they need not agree.
        let onward = Router::by(self.config.routing, self.config.seed ^ u64::from(stage.0) << 48);
        Hosted::new(window, largest, onward)
    }

    /// Microbatches of the first stage, with their claims.
    fn work(&mut self, now: Moment, step: Step, grants: &[(Microbatch, Grant)], out: &mut Out) {
        let first = Stage(0);
        if !self.hosts_at(first, step) || !self.is_open(step) {
            return;
        }
        for (microbatch, grant) in grants {
            self.through = self.through.max(*grant);
            let key = ClaimKey { step, stage: first, microbatch: *microbatch };
            let here = self.jobs.contains_key(&key);
            // It may be taken again when the engine has dropped it.
            let let_go = self.was_let_go(key, *grant) || self.compute.is_dropping(key);
            // It was wished for when this peer was at this stage before, with more room.
            let too_much = !here && self.stages[&first].room(step) == 0;
            if let_go || too_much {
                self.deny(key, *grant, out);
            } else if !here {
                let last = self.is_last(key);
                let job = Job::new(key, None, Claim::Granted(*grant), last);
                self.take(now, key, Job { ready_at: now, ..job }, out);
            }
        }
    }

    /// Tells the coordinator of room at the first stage that it does not know of.
    pub(super) fn wish_for_work(&mut self, out: &mut Out) {
        let Some(hosted) = self.stages.get(&Stage(0)) else { return };
        // Each step has room of its own: the next one's work is given out before this one ends, and
        // this one's again when a peer is lost.
        let room = |step: Step| (step, u32::try_from(hosted.room(step)).unwrap_or(u32::MAX));
        let wanted = if self.draining { 1 } else { usize::MAX };
        let steps = (self.version.0..=self.newest_open().0).map(Step);
        let steps = steps.filter(|step| self.hosts_at(Stage(0), *step));
        let rooms: Vec<(Step, u32)> =
            steps.map(room).take(wanted).filter(|(_, room)| *room > 0).collect();
        let wish = Some((rooms.clone(), self.through));
        if !rooms.is_empty() && self.wish != wish {
            self.wish = wish;
            let (through, service_time) = (self.through, self.service_time());
            let message = ToCoordinator::WorkRequest { rooms, through, service_time };
            out.push(PeerAction::ToCoordinator(message));
        }
    }

    fn granted(
        &mut self,
        now: Moment,
        key: ClaimKey,
        grant: Grant,
        next_holder: Option<Member>,
        out: &mut Out,
    ) {
        if key.step < self.version {
            return;
        }
        let released = self.was_let_go(key, grant);
        let Some(job) = self.jobs.get_mut(&key) else {
            // It was let go of while its claim was on the way.
            return self.deny(key, grant, out);
        };
        if job.grant().is_some() || released {
            return;
        }
        job.claim = Claim::Granted(grant);
        if job.holder.is_none() {
            job.holder = next_holder;
        }
        self.offer_early(now, key, out);
        self.advance(now, key, out);
    }

    /// The claim is another's: the work is dropped, and who sent it hears where it belongs.
    fn held(&mut self, now: Moment, key: ClaimKey, holder: Member, out: &mut Out) {
        let Some(job) = self.jobs.get(&key).filter(|job| job.grant().is_none()) else { return };
        if holder == self.config.me {
            return;
        }
        for to in job.askers.clone() {
            let message = PeerMessage::HeldBy { key, holder };
            out.push(PeerAction::Send { to, message });
        }
        self.abandon(key, out);
        self.admit(now, key.stage, out);
    }

    /// Repeats claims and reports that nobody answered.
    pub(super) fn repeat_reports(&mut self, now: Moment, out: &mut Out) {
        let retry = self.config.limits.retry;
        for (key, job) in &mut self.jobs {
            if let Claim::Asked { at } = &mut job.claim
                && now.since(*at) >= retry
            {
                *at = now;
                out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key: *key }));
            }
            if let (Claim::Granted(grant), Report::Sent { at }) = (job.claim, &mut job.report)
                && now.since(*at) >= retry
            {
                *at = now;
                let (key, loss, pass_times) = (*key, job.loss, job.pass_times);
                let message = ToCoordinator::Done { key, grant, loss, pass_times };
                out.push(PeerAction::ToCoordinator(message));
            }
        }
    }
}
