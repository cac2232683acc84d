//! The beginning of a term: the log says what was decided, every member says what it holds, and
//! nothing is granted before all have.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Member, Step};
use shoal_protocol::message::{FromCoordinator, HeldClaim, is_stopped};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, Phase, event, send};
use crate::action::CoordinatorEvent;

/// Who is still to be heard.
#[derive(Debug)]
pub(super) struct Census {
    /// And which part of its answer comes next.
    missing: BTreeMap<Member, u32>,
    /// When they are asked again.
    pub(super) again_at: Moment,
}

impl Coordinator {
    /// The term is in the log, and so is everything that those before this coordinator decided.
    pub(super) fn begin_census(&mut self, out: &mut Out) {
        let home = self.config.home;
        let earlier = self.membership.life_of(home.peer).filter(|life| *life != home);
        if let Some(earlier) = earlier {
            self.lost(earlier, "its process ended", out);
        }
        let members: Vec<Member> = self.membership.members().collect();
        for member in &members {
            self.ask(*member, out);
        }
        let missing = members.into_iter().map(|member| (member, 0)).collect();
        let again_at = self.now + self.config.retry;
        self.phase = Phase::Census(Census { missing, again_at });
        self.end_census_when_heard(out);
    }

    /// Asks a member what it holds. What an earlier coordinator had no time to say comes first; who
    /// lacks the membership asks for it, and is asked again.
    pub(super) fn ask(&self, member: Member, out: &mut Out) {
        let Some(span) = self.membership.span_of(member) else { return };
        let (term, era, began_at, version) = (self.term, self.era, self.began_at, self.version);
        send(member, FromCoordinator::Admitted { era, span, version }, out);
        let (commit, view) = (self.last_commit.clone(), self.logged_view.number);
        send(member, FromCoordinator::Census { term, era, began_at, span, commit, view }, out);
    }

    /// Asks those again whose answer may have been lost.
    pub(super) fn ask_again(&mut self, out: &mut Out) {
        let Phase::Census(census) = &mut self.phase else { return };
        if self.now < census.again_at {
            return;
        }
        census.again_at = self.now + self.config.retry;
        let missing: Vec<Member> = census.missing.keys().copied().collect();
        for member in missing {
            self.ask(member, out);
        }
    }

    /// A member says what it holds.
    pub(super) fn counted(
        &mut self,
        from: Member,
        claims: &[HeldClaim],
        (part, last): (u32, bool),
        out: &mut Out,
    ) {
        let Phase::Census(census) = &mut self.phase else { return };
        let Some(expected) = census.missing.get_mut(&from) else { return };
        if part != 0 && part != *expected {
            return;
        }
        *expected = part.saturating_add(1);
        if last {
            census.missing.remove(&from);
        }
        if part == 0 {
            self.work.forget_claims(from);
        }
        for claim in claims {
            if !self.restore(from, claim) {
                event(CoordinatorEvent::ClaimRefused { member: from, key: claim.key }, out);
                return self.lost(from, "it claims what it cannot hold", out);
            }
        }
        self.end_census_when_heard(out);
    }

    /// Takes in a claim. Those of steps that are over count nowhere any more.
    fn restore(&mut self, from: Member, claim: &HeldClaim) -> bool {
        let step = claim.key.step;
        if step < self.version {
            return true;
        }
        let newest = Step(self.version.0 + self.config.manifest.steps_at_once());
        if step > newest || claim.grant.term >= self.term {
            return false;
        }
        let hosts = self.membership.hosts(from, claim.key.stage, step);
        self.open_books(step);
        let Some(ledger) = self.work.ledgers.get_mut(&step) else { return false };
        let restored = hosts && ledger.restore(claim, from);
        if restored && claim.key.stage.0 == 0 && !claim.done {
            self.work.holds(from, step);
        }
        restored
    }

    /// Goes on as soon as everybody who could hold something has been heard, or is out of the log.
    pub(super) fn end_census_when_heard(&mut self, out: &mut Out) {
        let Phase::Census(census) = &self.phase else { return };
        #[cfg(test)]
        let census_omitted = self.omit == Some(crate::sim::Omit::Census);
        #[cfg(not(test))]
        let census_omitted = false;
        let heard = census_omitted
            || census.missing.keys().all(|member| !self.membership.contains(*member));
        if !heard || self.is_expelling() {
            return;
        }
        let claims = self.work.held();
        event(CoordinatorEvent::BecameCoordinator { term: self.term, claims }, out);
        // Nothing of this era is committed yet: who lacks weights can get those that it began with.
        let fresh = self.last_commit.is_none();
        self.begun |= claims > 0;
        self.phase = Phase::Gathering;
        if self.is_checkpoint_missing() {
            self.checkpoints.make_up();
        }
        self.set_givers();
        self.watch_taken_over();
        self.tell_all(&FromCoordinator::TakenOver, out);
        // Where nobody serves, a return to what the era began with was under way when the one before was lost:
        // members know of it only once it is in the log.
        let stopped = is_stopped(self.membership.records());
        if (!fresh || stopped) && !self.membership.uncovered().is_empty() {
            return self.strand(out);
        }
        let members = self.membership.members();
        let fetches = |member: &Member| {
            !self.membership.is_serving(*member) || self.membership.fetches(*member).is_some()
        };
        let newcomers: Vec<Member> = members.filter(fetches).collect();
        self.begin_each(newcomers, out);
        self.open_when_gathered(out);
        self.give_out(out);
        self.close_when_complete(out);
    }

    /// Whether the newest version up to now that was to be saved is not.
    fn is_checkpoint_missing(&self) -> bool {
        let every = self.config.manifest.checkpoint.every;
        let due = self.version.0.checked_div(every).unwrap_or(0) * every;
        due > self.archive.newest().0
    }
}
