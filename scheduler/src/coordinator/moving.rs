//! Members that change their stage: each fetches the other one's weights while it serves its own, and
//! changes over at a step of which nothing is given out yet, so that what it counted counts.

use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::message::View;

use super::{Coordinator, Out, Phase, event};
use crate::action::CoordinatorEvent;

impl Coordinator {
    /// Has a member fetch another stage, to serve it in place of its own.
    pub(super) fn move_member(&mut self, member: Member, to: Stage, out: &mut Out) {
        let from = self.membership.span_of(member).expect("members move");
        self.membership.begin_move(member, to);
        event(CoordinatorEvent::MoveBegun { member, from, to }, out);
        self.view_changed(out);
    }

    /// The log has new moves: who is to move hears what to begin from.
    pub(super) fn begin_moves(&mut self, old: &View, out: &mut Out) {
        let is_new = |member: &Member| {
            let known = old.record(*member).and_then(|record| record.moves);
            known.is_none() && self.membership.fetches(*member).is_some()
        };
        let listed = self.logged_view.members.iter().filter(|record| record.moves.is_some());
        let new: Vec<Member> = listed.map(|record| record.member).filter(is_new).collect();
        for member in new {
            self.begin_again(member, out);
        }
    }

    /// A member has the weights of the stage that it is to serve: it does from the first step on of
    /// which nothing is given out, unless it is needed where it is by now.
    pub(super) fn change_over(&mut self, member: Member, out: &mut Out) {
        // What is decided must be in the log before the step that it is about is committed.
        let trains = matches!(self.phase, Phase::Open | Phase::Closing);
        if self.view_pending || !trains {
            return;
        }
        let Some(to) = self.membership.fetches(member) else { return };
        let Some(from) = self.membership.span_of(member) else { return };
        self.newcomers.forget(member);
        self.drop_unwanted_snapshots();
        let mut stages = from.stages();
        let needed = stages.any(|stage| self.membership.staying(stage).all(|who| who == member));
        if needed {
            self.membership.cancel_move(member);
            event(CoordinatorEvent::MoveCancelled { member, to }, out);
        } else {
            let at = self.first_unopened().max(self.version.next());
            self.membership.end_move(member, at);
            self.work.forget_wishes_from(member, at);
            event(CoordinatorEvent::Moves { member, from, to, at }, out);
        }
        self.view_changed(out);
    }
}
