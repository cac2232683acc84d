//! Losing members: who is gone is expelled, what it held is anybody's again, and what it leaves
//! unfinished is done by others.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step};
use shoal_protocol::message::FromCoordinator;

use super::{Coordinator, Out, Phase, event, send};
use crate::action::CoordinatorEvent;

/// Keys in one replay message: far under the cap of a message.
const KEYS: usize = 4096;

/// Retries between two looks at what nobody has claimed.
const GAPS: u32 = 4;

/// What nobody had claimed at the last look.
pub(super) type Gaps = BTreeMap<Step, BTreeSet<(Stage, Microbatch)>>;

/// Complaints about the last replica of a stage before it is the complainer that goes: if the
/// replica is dead, its own silence tells first.
const COMPLAINTS: u32 = 3;

/// Who cannot reach whom, and how often that was said.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    about_last: BTreeMap<(Member, Member), u32>,
}

impl Complaints {
    pub(super) fn forget(&mut self, gone: Member) {
        self.about_last.retain(|(from, about), _| *from != gone && *about != gone);
    }
}

impl Coordinator {
    /// A member is gone, or must go. It is expelled as soon as the log has it.
    pub(super) fn lost(&mut self, member: Member, how: &str, out: &mut Out) {
        let over = matches!(self.phase, Phase::Finished | Phase::Stopped { .. });
        let Some(span) = self.membership.span_of(member).filter(|_| !over) else { return };
        event(CoordinatorEvent::Lost { member, span, how: how.to_owned() }, out);
        send(member, FromCoordinator::Expelled { reason: how.to_owned() }, out);
        if let Some(record) = self.membership.expel(member) {
            self.lacks(&record, out);
        }
        self.view_changed(out);
    }

    /// Whether somebody is gone whom the log still has: whatever it counted is about to be undone.
    pub(super) fn is_expelling(&self) -> bool {
        let mut logged = self.logged_view.members.iter();
        logged.any(|record| !self.membership.contains(record.member))
    }

    /// The log has these members no more.
    pub(super) fn expelled(&mut self, gone: &[Member], out: &mut Out) {
        let committing = matches!(self.phase, Phase::Committing).then_some(self.version);
        let mut lost = Vec::new();
        for member in gone {
            #[cfg(test)]
            if self.omit == Some(crate::sim::Omit::Revocation) {
                continue;
            }
            let revoked = self.work.expel(*member, committing);
            event(CoordinatorEvent::Revoked { member: *member, claims: revoked.claims }, out);
            self.newcomers.forget(*member);
            self.stragglers.forget_member(*member);
            self.complaints.forget(*member);
            lost.extend(self.snapshots.forget_writer(*member));
            self.forget_coordinator(*member, out);
            #[cfg(test)]
            if self.omit == Some(crate::sim::Omit::Abort) {
                continue;
            }
            self.tear_rounds_with(*member);
        }
        if self.rewind_when_uncovered(gone, out) {
            return;
        }
        self.rewrite_snapshots(&lost, out);
        self.drop_unwanted_snapshots();
        self.tell_newcomers(out);
    }

    /// A holder lets go of a claim.
    pub(super) fn released(&mut self, from: Member, key: ClaimKey, grant: Grant, out: &mut Out) {
        let ledger = self.work.ledgers.get_mut(&key.step);
        if !ledger.is_some_and(|ledger| ledger.release(key, from, grant)) {
            return;
        }
        let idle = self.stragglers.relief.answered(key, grant);
        self.let_go(from, key, idle, out);
        if key.stage == Stage(0) {
            self.work.let_go(from, key.step);
            self.give_out(out);
        }
        if let Some(idle) = idle {
            self.relieve(key.step, key.stage, idle, out);
        }
        self.replay_one(key, out);
    }

    /// Has the activation of work that was just let go of sent again. What else waits for one was asked
    /// for and is asked for again in time: with everything that is let go of that would be too often.
    fn replay_one(&mut self, key: ClaimKey, out: &mut Out) {
        let ledger = self.work.ledgers.get(&key.step).filter(|_| !self.is_suspended());
        let Some((holder, upstream)) = ledger.and_then(|ledger| ledger.sender_of(key)) else {
            return;
        };
        send(holder, FromCoordinator::Replay { keys: vec![upstream] }, out);
        let again = self.now + self.config.retry;
        self.replay_at = Some(self.replay_at.map_or(again, |at| at.min(again)));
    }

    /// Has activations sent again whose receivers are gone, until somebody holds the work.
    pub(super) fn replay(&mut self, out: &mut Out) {
        self.replay_with(&BTreeMap::new(), out);
    }

    /// The same with those that nobody has claimed for long: something got lost on the way.
    pub(super) fn replay_old_gaps(&mut self, out: &mut Out) {
        // What is held of a step whose weights are yet to come has no activation to send.
        let ledgers = self.work.ledgers.iter().filter(|(step, _)| self.has_weights_of(**step));
        let gaps: BTreeMap<Step, _> =
            ledgers.map(|(step, ledger)| (*step, ledger.gaps())).collect();
        let before = std::mem::replace(&mut self.gaps, gaps);
        self.replay_with(&before, out);
    }

    fn replay_with(&mut self, old_gaps: &Gaps, out: &mut Out) {
        if self.is_suspended() {
            return;
        }
        let none = BTreeSet::new();
        let mut waits = false;
        for (step, ledger) in &self.work.ledgers {
            for (holder, keys) in ledger.to_replay(old_gaps.get(step).unwrap_or(&none)) {
                waits = true;
                for keys in keys.chunks(KEYS) {
                    send(holder, FromCoordinator::Replay { keys: keys.to_vec() }, out);
                }
            }
        }
        let again = if waits { self.config.retry } else { self.config.retry * GAPS };
        self.replay_at = (!self.work.ledgers.is_empty()).then(|| self.now + again);
    }

    /// Whether a member may be expelled for what others miss of it: the last of a stage is waited for,
    /// and the own word of who lives with the coordinator would have told.
    pub(super) fn can_spare(&self, member: Member) -> bool {
        let span = self.membership.span_of(member);
        let replicated = |stage: Stage| self.membership.replicas(stage).count() > 1;
        member != self.config.home && span.is_some_and(|span| span.stages().all(replicated))
    }

    /// Two members cannot reach each other: one of them goes. That is the one complained about, who
    /// is probably gone already, unless it is the last of its stage or lives with the coordinator,
    /// whose own word would have told.
    pub(super) fn cannot_reach(&mut self, from: Member, about: Member, out: &mut Out) {
        if !self.membership.contains(about) {
            return;
        }
        if self.can_spare(about) {
            return self.lost(about, "another member cannot reach it", out);
        }
        let count = self.complaints.about_last.entry((from, about)).or_insert(0);
        *count += 1;
        if *count >= COMPLAINTS && from != self.config.home {
            self.lost(from, "it cannot reach another member", out);
        }
    }
}
