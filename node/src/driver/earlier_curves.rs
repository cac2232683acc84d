//! Which members are asked for the curves of the steps before this peer joined, and which it answers.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::View;
use shoal_protocol::units::Moment;

/// The most members that are asked: those that joined late or began again have not all steps either.
const ASKED: usize = 8;

/// How long one has for its answer before the next is asked.
const PATIENCE: Duration = Duration::from_secs(5);

/// The requests for curves, those of this peer and those of others.
#[derive(Debug, Default)]
pub(super) struct EarlierCurves {
    /// The peers that were asked.
    asked: BTreeSet<PeerId>,
    /// The member that has yet to answer.
    pending: Option<Member>,
    /// When the next one may be asked.
    next_at: Moment,
    /// The members that were answered.
    answered: BTreeSet<Member>,
}

impl EarlierCurves {
    /// Returns the member to ask now, if there is one left. Each peer begins at another place of the membership, so a
    /// crowd of newcomers does not ask one member.
    pub(super) fn next(&mut self, now: Moment, me: Member, view: &View) -> Option<Member> {
        if now < self.next_at || self.asked.len() >= ASKED {
            return None;
        }
        let others: Vec<Member> = view
            .members
            .iter()
            .filter(|record| record.serving && record.member != me)
            .map(|record| record.member)
            .collect();
        let begin = usize::from(u16::from_le_bytes([me.peer.0[0], me.peer.0[1]]));
        let begin = begin % others.len().max(1);
        let mut in_turn = others[begin..].iter().chain(&others[..begin]);
        let next = in_turn.find(|member| !self.asked.contains(&member.peer)).copied()?;
        self.asked.insert(next.peer);
        self.pending = Some(next);
        self.next_at = now + PATIENCE;
        Some(next)
    }

    /// Returns whether curves from this member answer the request of this peer, which they do once.
    pub(super) fn is_answer(&mut self, from: Member) -> bool {
        let is_answer = self.pending == Some(from);
        if is_answer {
            self.pending = None;
            self.next_at = Moment::default();
        }
        is_answer
    }

    /// Returns whether to answer a request: a member gets one answer in each life.
    pub(super) fn may_ask(&mut self, from: Member, view: &View) -> bool {
        self.answered.retain(|member| view.lists(*member));
        view.lists(from) && self.answered.insert(from)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shoal_protocol::ids::{Incarnation, StageSpan};
    use shoal_protocol::message::{MemberRecord, StageRoom};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn view(numbers: impl Iterator<Item = u8>) -> View {
        let record = |number| MemberRecord {
            room: StageRoom::in_memory(1),
            ..MemberRecord::plain(member(number), StageSpan::none())
        };
        View { number: 1, members: numbers.map(record).map(Arc::new).collect() }
    }

    #[test]
    fn some_members_are_asked_in_turn_and_each_once() {
        let (me, view, mut curves) = (member(3), view(0..20), EarlierCurves::default());
        let mut now = Moment::default();
        let mut asked = BTreeSet::new();
        while let Some(next) = curves.next(now, me, &view) {
            assert!(next != me && asked.insert(next));
            assert_eq!(curves.next(now, me, &view), None, "it has time to answer");
            assert!(!curves.is_answer(member(200)));
            if asked.len() % 2 == 0 {
                assert!(curves.is_answer(next) && !curves.is_answer(next));
            } else {
                now = now + PATIENCE;
            }
        }
        assert_eq!(asked.len(), ASKED);
        assert_eq!(curves.next(now + PATIENCE, me, &self::view(3..4)), None, "it is alone");
    }

    #[test]
    fn a_member_is_answered_once() {
        let (all, mut curves) = (view(0..3), EarlierCurves::default());
        assert!(curves.may_ask(member(1), &all) && !curves.may_ask(member(1), &all));
        assert!(!curves.may_ask(member(9), &all), "it is no member");
        let again = Member { incarnation: Incarnation(2), ..member(1) };
        assert!(!curves.may_ask(again, &all), "its new life is no member yet");
    }
}
