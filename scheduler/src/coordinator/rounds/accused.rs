//! Who reduces no more, because a piece was not the sum of what the members say that they gave.
//!
//! Such a difference has one of two causes: the piece's owner forged it, or a member lies about what it gave. Nobody
//! is believed alone, so the owner stays a member, and only reduces nothing any more. A liar that accuses all others
//! in this way is the last one that nobody accused, and goes. If everybody is accused, one after the other goes until
//! the differences end, and comes back if it was not the one.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, PeerId};

/// Whether a member may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Going {
    /// Others have its stages.
    Well,
    /// A stage is restored from a checkpoint then.
    Badly,
    /// It is the coordinator's own peer.
    Never,
}

/// Fewer members have no majority.
const LEAST: usize = 3;

/// The members that reduce nothing.
#[derive(Debug, Default)]
pub(super) struct Accused {
    members: BTreeSet<Member>,
    /// Who went since the last step that was committed, while all were accused.
    tried: BTreeSet<PeerId>,
    /// After whose going the differences ended: the first to go if they return with it.
    likely: Option<PeerId>,
}

impl Accused {
    /// Whether a member reduces nothing.
    pub(super) fn contains(&self, member: Member) -> bool {
        self.members.contains(&member)
    }

    /// Pieces of these members of a round are not the sum of what its members gave. Returns a member that goes if
    /// reducing elsewhere is not enough.
    pub(super) fn accuse(
        &mut self,
        all: &[Member],
        forged: &BTreeSet<Member>,
        going: impl Fn(Member) -> Going,
    ) -> Option<Member> {
        self.members.extend(forged);
        let free: Vec<Member> =
            all.iter().copied().filter(|member| !self.members.contains(member)).collect();
        let goes = match free[..] {
            [] => self.next_to_try(all, &going),
            [only] if all.len() >= LEAST && going(only) != Going::Never => Some(only),
            _ => None,
        };
        if goes.is_some() {
            self.members.clear();
        }
        goes
    }

    /// The likely one, then those that are easily spared, then the others; again from the start once all were tried.
    fn next_to_try(&mut self, all: &[Member], going: impl Fn(Member) -> Going) -> Option<Member> {
        let (well, others): (Vec<Member>, Vec<Member>) = all
            .iter()
            .rev()
            .filter(|one| going(**one) != Going::Never)
            .partition(|one| going(**one) == Going::Well);
        let candidates = [well, others].concat();
        if candidates.iter().all(|one| self.tried.contains(&one.peer)) {
            self.tried.clear();
        }
        let mut untried = candidates.iter().filter(|one| !self.tried.contains(&one.peer));
        let likely = untried.clone().find(|one| Some(one.peer) == self.likely);
        let goes = likely.or_else(|| untried.next()).copied()?;
        self.tried.insert(goes.peer);
        self.likely = Some(goes.peer);
        Some(goes)
    }

    /// A step is committed: whoever is left differs no more. Forgets the members that are gone.
    pub(super) fn committed(&mut self, is_member: impl Fn(Member) -> bool) {
        self.tried.clear();
        self.members.retain(|member| is_member(*member));
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::Incarnation;

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn members(count: u8) -> Vec<Member> {
        (0..count).map(member).collect()
    }

    #[test]
    fn who_forges_reduces_no_more_and_stays() {
        let mut accused = Accused::default();
        assert_eq!(accused.accuse(&members(3), &[member(1)].into(), |_| Going::Well), None);
        assert!(accused.contains(member(1)) && !accused.contains(member(0)));
        accused.committed(|one| one != member(1));
        assert!(!accused.contains(member(1)), "it is gone");
    }

    #[test]
    fn who_accuses_all_others_goes() {
        let mut accused = Accused::default();
        assert_eq!(accused.accuse(&members(3), &[member(0)].into(), |_| Going::Well), None);
        let goes = accused.accuse(&members(3), &[member(1)].into(), |_| Going::Well);
        assert_eq!(goes, Some(member(2)));
        assert!(!accused.contains(member(0)), "its word counts no more");
    }

    #[test]
    fn of_two_nobody_goes_on_one_word() {
        let mut accused = Accused::default();
        assert_eq!(accused.accuse(&members(2), &[member(0)].into(), |_| Going::Well), None);
    }

    #[test]
    fn if_all_are_accused_one_after_the_other_goes_and_the_likely_one_first() {
        let mut accused = Accused::default();
        let all = members(3);
        let home = |one| if one == member(0) { Going::Never } else { Going::Well };
        let everyone: BTreeSet<Member> = all.iter().copied().collect();
        assert_eq!(accused.accuse(&all, &everyone, home), Some(member(2)));
        let others = &all[..2];
        assert_eq!(accused.accuse(others, &everyone, home), Some(member(1)));
        accused.committed(|_| true);
        assert_eq!(accused.accuse(&all, &everyone, home), Some(member(1)), "it was the one");
        assert_eq!(accused.accuse(&all, &everyone, home), Some(member(2)), "it was not");
        assert_eq!(accused.accuse(&all, &everyone, home), Some(member(2)), "all were tried");
    }
}
