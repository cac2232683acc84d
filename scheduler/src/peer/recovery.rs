//! When others are gone: what was theirs goes to others, and what waited for them is let go of.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Member, Stage};
use shoal_protocol::message::{PeerMessage, ToCoordinator};
use shoal_protocol::units::Moment;

use super::job::{Answer, Input, Job, Progress, Route};
use super::{Out, Peer, Status};
use crate::action::{PeerAction, PeerEvent};

/// Retries after which an offer without an answer is made again, and its acceptance repeated.
const UNANSWERED: u32 = 4;

/// Retries after which the answer to what was sent is asked for.
const UNRETURNED: u32 = 16;

/// Speakers that are in no membership known here: more than can join at once.
const STRANGERS: usize = 4096;

impl Peer {
    /// Whether a speaker is, or may become, a member: the word of its admission may come later than
    /// its own.
    pub(super) fn is_known(&mut self, now: Moment, from: Member) -> bool {
        if self.view.lists(from) {
            return true;
        }
        let gone = self.gone.get(&from.peer).is_some_and(|last| from.incarnation <= *last);
        if !gone && (self.strangers.len() < STRANGERS || self.strangers.contains_key(&from)) {
            self.strangers.entry(from).or_insert(now);
            return true;
        }
        false
    }

    /// Who spoke long ago and never became a member has come and gone between two memberships.
    pub(super) fn forget_strangers(&mut self, now: Moment, out: &mut Out) {
        let patience = self.config.limits.retry * 8;
        self.strangers.retain(|stranger, _| !self.view.lists(*stranger));
        let late = |(member, since): (&Member, &Moment)| {
            (now.since(*since) >= patience).then_some(*member)
        };
        let late: BTreeSet<Member> = self.strangers.iter().filter_map(late).collect();
        if !late.is_empty() {
            self.strangers.retain(|stranger, _| !late.contains(stranger));
            self.departed(now, &late, out);
        }
    }

    /// Members are gone for good.
    pub(super) fn departed(&mut self, now: Moment, gone: &BTreeSet<Member>, out: &mut Out) {
        for member in gone {
            let last = self.gone.entry(member.peer).or_insert(member.incarnation);
            *last = member.incarnation.max(*last);
        }
        self.unreachable.retain(|member| !gone.contains(member));
        for hosted in self.stages.values_mut() {
            hosted.offers.retain(|_, offer| !gone.contains(&offer.from));
            hosted.turned_away.retain(|member, _| !gone.contains(member));
        }
        let keys: Vec<ClaimKey> = self.jobs.keys().copied().collect();
        for key in &keys {
            let Some(job) = self.jobs.get_mut(key) else { continue };
            job.askers.retain(|asker| !gone.contains(asker));
            if is_deserted(*key, job) {
                self.abandon(*key, out);
            }
        }
        for key in keys {
            self.reroute(now, key, gone, out);
        }
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            self.admit(now, stage, out);
        }
        self.stop_waiting_for(gone, out);
    }

    /// Work whose way onward led to who is gone goes to another. Where the answer is here already,
    /// the coordinator says whether anybody needs the activation again.
    fn reroute(&mut self, now: Moment, key: ClaimKey, gone: &BTreeSet<Member>, out: &mut Out) {
        let Some(job) = self.jobs.get_mut(&key) else { return };
        if job.holder.is_some_and(|holder| gone.contains(&holder)) {
            job.holder = None;
        }
        let lost = job.route.to().is_some_and(|to| gone.contains(&to));
        if lost && job.must_go_on() {
            job.route = Route::Unrouted;
            self.offer_early(now, key, out);
        }
    }

    /// The connection to a member broke: what was on its way may be lost, so everything that waits
    /// for an answer is offered again.
    pub(super) fn disconnected(&mut self, now: Moment, member: Member, out: &mut Out) {
        let waiting: Vec<ClaimKey> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.route.to() == Some(member))
            .filter(|(_, job)| job.must_go_on())
            .map(|(key, _)| *key)
            .collect();
        if self.view.lists(member) {
            for key in waiting {
                self.offer_to(now, member, key, out);
            }
        }
    }

    /// A member cannot be reached: the coordinator decides what becomes of it.
    pub(super) fn cannot_reach(&mut self, member: Member, out: &mut Out) {
        if self.view.lists(member) {
            self.unreachable.insert(member);
            self.complain_about(member, out);
        }
    }

    /// Says once more who could not be reached, and tries anew.
    pub(super) fn complain(&mut self, out: &mut Out) {
        for member in std::mem::take(&mut self.unreachable) {
            self.complain_about(member, out);
        }
    }

    /// Of itself the coordinator need not be told: the word would not arrive.
    fn complain_about(&self, member: Member, out: &mut Out) {
        if self.coordinator != Some(member) {
            out.push(PeerAction::ToCoordinator(ToCoordinator::CannotReach { member }));
        }
    }

    /// Says again what nobody has answered for long, in either direction: it may have been lost.
    pub(super) fn retry_offers(&mut self, now: Moment, out: &mut Out) {
        let retry = self.config.limits.retry;
        let late = |at: Moment, times: u32| now.since(at) >= retry * times;
        let to_offer: Vec<(ClaimKey, Member)> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.must_go_on())
            .filter_map(|(key, job)| match job.route {
                Route::Offered { to, at } if late(at, UNANSWERED) => Some((*key, to)),
                Route::Sent { to, at } if late(at, UNRETURNED) => Some((*key, to)),
                _ => None,
            })
            .collect();
        for (key, to) in to_offer {
            self.offer_to(now, to, key, out);
        }
        let service_time = self.service_time();
        for (key, job) in &mut self.jobs {
            if job.input == Input::Expected && late(job.accepted_at, UNANSWERED) {
                job.accepted_at = now;
                for to in job.askers.iter().copied() {
                    let message = PeerMessage::Accepted { key: *key, service_time };
                    out.push(PeerAction::Send { to, message });
                }
            }
        }
    }

    /// Nobody holds the next stage's work any more: the logged activation is offered again.
    pub(super) fn replay(&mut self, now: Moment, keys: &[ClaimKey], out: &mut Out) {
        for key in keys {
            let Some(job) = self.jobs.get_mut(key).filter(|job| job.grant().is_some()) else {
                continue;
            };
            if job.route == Route::Nowhere {
                continue;
            }
            job.replay |= job.answer != Answer::Expected;
            job.holder = None;
            match job.route.to().filter(|to| self.view.serves(*to)) {
                // Its claim may be on its way; if not, it takes the work anew.
                Some(to) => self.offer_to(now, to, *key, out),
                None if job.route == Route::Unrouted => self.offer_early(now, *key, out),
                None if matches!(job.route, Route::Blocked { .. }) => {}
                None => {
                    job.route = Route::Unrouted;
                    self.offer_early(now, *key, out);
                }
            }
        }
    }

    /// Who offered this work has it no more.
    pub(super) fn withdrawn(&mut self, now: Moment, from: Member, key: ClaimKey, out: &mut Out) {
        let Some(hosted) = self.stages.get_mut(&key.stage) else { return };
        let place = (key.step, key.microbatch);
        if hosted.offers.get(&place).is_some_and(|offer| offer.from == from) {
            hosted.offers.remove(&place);
        }
        if let Some(job) = self.jobs.get_mut(&key) {
            job.askers.retain(|asker| *asker != from);
            if is_deserted(key, job) {
                self.abandon(key, out);
                self.admit(now, key.stage, out);
            }
        }
    }

    /// Leaves in order: nothing of later steps is taken in any more, and when what was begun is
    /// committed nobody needs what is here.
    pub(super) fn drain(&mut self, out: &mut Out) {
        self.draining = true;
        let newest = self.newest_runnable();
        let at_work = self.jobs.keys().any(|key| key.step <= newest);
        if !self.serves() || !at_work {
            self.leave_drained(out);
        }
        self.say_draining(out);
    }

    /// Says that it is about to leave, so that it is not moved, and who takes its place is sought.
    pub(super) fn say_draining(&self, out: &mut Out) {
        if self.draining && self.status == Status::Member {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Draining));
        }
    }

    /// Leaves, if it is to and has begun nothing that others would have to do again.
    pub(super) fn leave_drained(&mut self, out: &mut Out) {
        let begun = self.serves() && self.jobs.values().any(|job| job.forward != Progress::Waiting);
        if self.draining && !begun && self.status != Status::Over {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Leave));
            self.end(PeerEvent::Drained, out);
        }
    }

    /// Lets go of work that cannot go on here: whoever was to get its activation hears of it, and so
    /// does the coordinator, if this peer holds the claim.
    pub(super) fn abandon(&mut self, key: ClaimKey, out: &mut Out) {
        let job = self.jobs.get(&key).expect("only jobs are abandoned");
        if let Route::Offered { to, .. } | Route::Accepted { to } = job.route {
            let key = key.downstream();
            out.push(PeerAction::Send { to, message: PeerMessage::Withdrawn { key } });
        }
        if let Some(grant) = job.grant() {
            self.released.insert(key, grant);
            out.push(PeerAction::ToCoordinator(ToCoordinator::Released { key, grant }));
        }
        self.drop_job(key, out);
    }
}

/// Whether work waits for an activation that nobody is going to send. Whoever takes the place of its
/// senders offers it anew, and until then it must not take up room that they may be waiting for.
fn is_deserted(key: ClaimKey, job: &Job) -> bool {
    key.stage > Stage(0)
        && job.askers.is_empty()
        && job.input == Input::Expected
        && job.forward == Progress::Waiting
}
