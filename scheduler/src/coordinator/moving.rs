//! Members that change their stage: each fetches the other one's weights while it serves its own, and
//! changes over at the first step of which it has counted nothing, so that what it counted counts. What it
//! has begun of that step goes to others, as if it had died.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{MemberRecord, Move, MoveReason};

use super::{Coordinator, Out, Phase, event};
use crate::action::{CoordinatorEvent, MoveObstacle};

impl Coordinator {
    /// Has a member fetch another stage, to serve it in place of its own.
    pub(super) fn move_member(
        &mut self,
        member: Member,
        to: Stage,
        reason: MoveReason,
        out: &mut Out,
    ) {
        let from = self.membership.span_of(member).expect("members move");
        self.membership.begin_move(member, to, reason);
        event(CoordinatorEvent::MoveBegun { member, from, to, reason }, out);
        self.view_changed(out);
    }

    /// Has those host in the next era what nobody would who can; who is on its way stays.
    pub(super) fn move_for_next_era(&mut self, out: &mut Out) {
        let members: Vec<Member> = self.membership.members().collect();
        for member in members {
            if let Some(moves) = self.membership.on_its_way(member) {
                self.membership.cancel_move(member);
                cancelled(member, moves, MoveObstacle::Rewound, out);
            }
        }
        for (member, to) in self.membership.cover_all() {
            let from = self.membership.span_of(member).expect("members move");
            let reason = MoveReason::StageLost;
            event(CoordinatorEvent::MoveBegun { member, from, to, reason }, out);
        }
    }

    /// The next era begins at a version: who was to host something else in it does.
    pub(super) fn moved_for_era(&self, at: Step, out: &mut Out) {
        for record in self.membership.records() {
            let lost = |moves: &Move| moves.reason == MoveReason::StageLost;
            if let Some(Move { to, reason, .. }) = record.moves.filter(lost) {
                let (member, from) = (record.member, record.span);
                event(CoordinatorEvent::Moves { member, from, to, at, reason }, out);
            }
        }
    }

    /// A member is about to leave: its stages lack it from now on, and it moves nowhere.
    pub(super) fn draining(&mut self, member: Member, out: &mut Out) {
        if !self.membership.drains(member) {
            return;
        }
        let destination = self.membership.record(member).map(MemberRecord::destination);
        self.balance.lacks(destination.expect("only members drain"), self.now);
        if let Some(moves) = self.membership.on_its_way(member) {
            self.newcomers.forget(member);
            self.drop_unwanted_snapshots();
            self.membership.cancel_move(member);
            cancelled(member, moves, MoveObstacle::Leaves, out);
            self.view_changed(out);
        }
    }

    /// A member is gone: its stages lack it, and it moves nowhere.
    pub(super) fn lacks(&mut self, gone: &MemberRecord, out: &mut Out) {
        if !self.membership.drained(gone.member) {
            self.balance.lacks(gone.destination(), self.now);
        }
        self.link_estimates.forget(gone.member.peer);
        if let Some(moves) = gone.moves.filter(|moves| moves.at.is_none()) {
            cancelled(gone.member, moves, MoveObstacle::Gone, out);
        }
    }

    /// The log has new moves: who is to move hears what to begin from.
    pub(super) fn begin_moves(&mut self, movers: BTreeSet<Member>, out: &mut Out) {
        let fetches = |member: &Member| self.membership.fetches(*member).is_some();
        let movers: Vec<Member> = movers.into_iter().filter(fetches).collect();
        self.begin_each(movers, out);
    }

    /// A member has the weights of the stage that it is to serve: it does from the first step on of
    /// which it has counted nothing, unless it is needed where it is by now.
    pub(super) fn change_over(&mut self, member: Member, out: &mut Out) {
        // What is decided must be in the log before the step that it is about is committed.
        let trains = matches!(self.phase, Phase::Open | Phase::Closing);
        if self.view_pending || !trains {
            return;
        }
        let Some(moves) = self.membership.on_its_way(member) else { return };
        let Move { to, reason, .. } = moves;
        let Some(from) = self.membership.span_of(member) else { return };
        self.fetched(member);
        self.newcomers.forget(member);
        self.drop_unwanted_snapshots();
        let mut stages = from.stages();
        let goes = |who| who == member || self.membership.is_draining(who);
        let needed = stages.any(|stage| self.membership.staying(stage).all(goes));
        if needed {
            self.membership.cancel_move(member);
            cancelled(member, moves, MoveObstacle::Needed, out);
        } else {
            let at = self.first_not_counted_by(member);
            self.membership.end_move(member, at);
            self.work.forget_wishes_from(member, at);
            event(CoordinatorEvent::Moves { member, from, to, at, reason }, out);
        }
        self.view_changed(out);
    }
}

fn cancelled(member: Member, moves: Move, obstacle: MoveObstacle, out: &mut Out) {
    let Move { to, reason, .. } = moves;
    event(CoordinatorEvent::MoveCancelled { member, to, reason, obstacle }, out);
}
