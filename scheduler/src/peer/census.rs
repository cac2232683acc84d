//! A new coordinator: it is told what this peer holds, and obeyed from then on.

use shoal_protocol::ids::{Era, StageSpan, Step, Term};
use shoal_protocol::message::{CommitRecord, HeldClaim, ToCoordinator};
use shoal_protocol::units::Moment;

use super::job::{Claim, Report};
use super::{Out, Peer, Status};
use crate::action::PeerAction;

/// Claims in one message: far under the cap of a message.
const CLAIMS: usize = 2048;

impl Peer {
    /// Says what this peer holds. What the coordinators before did not come to say is made up for
    /// first: a rewind, and the newest commit.
    pub(super) fn census(
        &mut self,
        now: Moment,
        term: Term,
        (era, began_at, span): (Era, Step, StageSpan),
        (commit, view): (Option<CommitRecord>, u64),
        out: &mut Out,
    ) {
        if term < self.term || self.status != Status::Member {
            return;
        }
        if self.view.number < view {
            // It is asked again when it has heard who is a member.
            return self.want_view(now, out);
        }
        if term > self.term {
            self.term = term;
            self.rewind(era, began_at, span, out);
            self.backlog.retain(|word| !word.is_of_term_before(term));
            self.taken_over_on_the_way(out);
            if self.newcomer.is_some() {
                // What it missed in between nobody knows: it is told anew what to begin from.
                self.begin_anew(out);
            } else if let Some(commit) = commit {
                self.commit(now, commit, out);
            }
            self.wish = None;
            self.ways_said.clear();
        }
        let claims = self.held_claims();
        let parts = claims.len().div_ceil(CLAIMS).max(1);
        let mut claims = claims.into_iter();
        for part in 0..parts {
            let claims = claims.by_ref().take(CLAIMS).collect();
            let last = part + 1 == parts;
            let message = ToCoordinator::Held { claims, part: part as u32, last };
            out.push(PeerAction::ToCoordinator(message));
        }
    }

    /// The claims that this peer holds. What is told to be done here need not be reported.
    fn held_claims(&mut self) -> Vec<HeldClaim> {
        let held = self.jobs.iter_mut().filter_map(|(key, job)| {
            let grant = job.grant()?;
            let done = job.report != Report::NotDone;
            if done {
                job.report = Report::Noted;
            }
            Some(HeldClaim { key: *key, grant, done, loss: job.loss.filter(|_| done) })
        });
        held.collect()
    }

    /// The new coordinator has heard everybody: whatever waits for its answer is said again.
    pub(super) fn taken_over(&mut self, now: Moment, out: &mut Out) {
        for (key, job) in &mut self.jobs {
            if let Claim::Asked { at } = &mut job.claim {
                *at = now;
                out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key: *key }));
            }
        }
        self.say_draining(out);
        self.say_lost_on_the_way(out);
        self.say_ready(out);
    }
}
