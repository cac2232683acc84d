//! Migration: members that change their span. A member fetches the weights of the stages that it lacks while it
//! serves its own, and changes over at the first step of which it has counted nothing at the stages that it leaves,
//! so that its counted work stays valid. Work of that step that it has begun there goes to others, as after a death.

use shoal_protocol::ids::{Member, StageSpan, Step};
use shoal_protocol::message::{MemberRecord, Move, MoveReason};

use super::super::{Out, event};
use super::{Members, migration_cancelled};
use crate::action::{CoordinatorEvent, MoveObstacle};

/// The effect of a drain that begins.
#[derive(Debug)]
pub(in super::super) struct Drain {
    /// The stages that lose the member.
    pub(in super::super) stages: StageSpan,
    /// Whether its migration was cancelled.
    pub(in super::super) cancelled: bool,
}

impl Members {
    /// Has a member fetch what it lacks of another span, to serve that in place of its own.
    pub(in super::super) fn begin_migration(
        &mut self,
        member: Member,
        to: StageSpan,
        reason: MoveReason,
        out: &mut Out,
    ) {
        let from = self.current.span_of(member).expect("members move");
        self.current.begin_migration(member, to, reason);
        event(CoordinatorEvent::MoveBegun { member, from, to, reason }, out);
        self.append_change(out);
    }

    /// Stops all serving, cancels migrations under way and gives each stage without a host to a member that can
    /// move, for the next era; if `extends`, to members beside their own too.
    pub(in super::super) fn assign_next_era(&mut self, extends: bool, out: &mut Out) {
        // No membership that is logged from here on lists a replica.
        self.current.stop_serving();
        let members: Vec<Member> = self.current.members().collect();
        for member in members {
            if let Some(moves) = self.current.migration_of(member) {
                self.current.cancel_migration(member);
                migration_cancelled(member, moves, MoveObstacle::Rewound, out);
            }
        }
        for (member, to) in self.current.cover_all_stages(extends) {
            let from = self.current.span_of(member).expect("members move");
            let reason = MoveReason::StageLost;
            event(CoordinatorEvent::MoveBegun { member, from, to, reason }, out);
        }
        self.append_change(out);
    }

    /// Reports the members that host another stage in the era that begins at a version.
    pub(in super::super) fn report_era_moves(&self, at: Step, out: &mut Out) {
        for record in self.current.records() {
            let lost = |moves: &Move| moves.reason == MoveReason::StageLost;
            if let Some(Move { to, reason, .. }) = record.moves.filter(lost) {
                let (member, from) = (record.member, record.span);
                event(CoordinatorEvent::Moves { member, from, to, at, reason }, out);
            }
        }
    }

    /// A member is about to leave: its stages lose it, and it does not migrate. Returns nothing if that was
    /// known.
    pub(in super::super) fn begin_drain(&mut self, member: Member, out: &mut Out) -> Option<Drain> {
        if !self.current.begin_drain(member) {
            return None;
        }
        let stages = self.current.record(member).map(MemberRecord::destination)?;
        let migration = self.current.migration_of(member);
        if let Some(moves) = migration {
            self.current.cancel_migration(member);
            migration_cancelled(member, moves, MoveObstacle::Leaves, out);
            self.append_change(out);
        }
        Some(Drain { stages, cancelled: migration.is_some() })
    }

    /// A member has the weights of its next span: it changes over at step `at`, unless a stage that it would leave
    /// needs it. Returns whether it changes over.
    pub(in super::super) fn end_migration(
        &mut self,
        member: Member,
        at: Step,
        out: &mut Out,
    ) -> bool {
        let Some(moves) = self.current.migration_of(member) else { return false };
        let Some(from) = self.current.span_of(member) else { return false };
        let leaves = |other| other == member || self.current.is_draining(other);
        let needed = from.outside(moves.to).any(|stage| self.current.staying(stage).all(leaves));
        if needed {
            self.current.cancel_migration(member);
            migration_cancelled(member, moves, MoveObstacle::Needed, out);
        } else {
            self.current.end_migration(member, at);
            let Move { to, reason, .. } = moves;
            event(CoordinatorEvent::Moves { member, from, to, at, reason }, out);
        }
        self.append_change(out);
        !needed
    }
}
