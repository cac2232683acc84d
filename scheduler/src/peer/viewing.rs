//! Who is a member, as this peer is told: changes, one made of the other, and the whole where one of
//! them is missing.

use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_protocol::ids::{Member, Step};
use shoal_protocol::message::{MemberRecord, ToCoordinator, View, ViewChange};
use shoal_protocol::units::Moment;

use super::stage::Part;
use super::{Out, Peer};
use crate::action::{PeerAction, PeerEvent};
use crate::paging::Pages;

/// What is known of a membership that is not here yet.
#[derive(Debug, Default)]
pub(super) struct Viewing {
    /// When the whole was last asked for, while it is waited for.
    wanted: Option<Moment>,
    /// What came of it.
    parts: Pages<Arc<MemberRecord>>,
}

impl Peer {
    /// Who is a member, as far as this peer knows.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Members came, went or changed.
    pub(super) fn view_changed(&mut self, now: Moment, change: &ViewChange, out: &mut Out) {
        if change.number <= self.view.number {
            return;
        }
        let reroutes = self.concerns_routes(change);
        match self.view.take(change) {
            Some(gone) => self.viewed(now, gone.into_iter().collect(), reroutes, out),
            None => self.want_view(now, out),
        }
    }

    /// Whether a change is about who hosts, hosted or goes to a stage after one of this peer's. Of a
    /// crowd most are not.
    fn concerns_routes(&self, change: &ViewChange) -> bool {
        let next = |record: &MemberRecord| {
            let mut stages = self.stages.keys().map(|stage| stage.next());
            let there = |stage| {
                record.span.contains(stage) || record.moves.is_some_and(|moves| moves.to == stage)
            };
            stages.any(there)
        };
        let named = change.here.iter().map(|record| record.member);
        let mut named = named.chain(change.gone.iter().copied());
        change.stops
            || change.here.iter().any(|record| next(record))
            || named.any(|member| self.view.of_peer(member.peer).is_some_and(next))
    }

    /// A part of the whole membership came.
    pub(super) fn members_told(
        &mut self,
        now: Moment,
        number: u64,
        part: (u32, u32),
        members: Vec<Arc<MemberRecord>>,
        out: &mut Out,
    ) {
        if number <= self.view.number {
            return;
        }
        let Some(members) = self.viewing.parts.take(number, part, members) else { return };
        let old = std::mem::replace(&mut self.view, View { number, members });
        let gone = old.gone_in(&self.view).collect();
        self.viewed(now, gone, true, out);
    }

    fn viewed(&mut self, now: Moment, gone: BTreeSet<Member>, reroutes: bool, out: &mut Out) {
        self.viewing = Viewing::default();
        if reroutes {
            self.route_by_view();
        }
        out.push(PeerAction::Event(PeerEvent::View));
        self.serve_when_listed(out);
        self.follow_moves(now, out);
        self.departed(now, &gone, out);
    }

    /// Asks for the whole membership, unless that was asked for just now.
    pub(super) fn want_view(&mut self, now: Moment, out: &mut Out) {
        let asked = self.viewing.wanted;
        if asked.is_none_or(|asked| now.since(asked) >= self.config.limits.retry) {
            self.viewing.wanted = Some(now);
            out.push(PeerAction::ToCoordinator(ToCoordinator::ViewRequest));
        }
    }

    /// Asks again for what did not come.
    pub(super) fn repeat_want_of_view(&mut self, now: Moment, out: &mut Out) {
        if self.viewing.wanted.is_some() {
            self.want_view(now, out);
        }
    }

    /// Has each stage's work go on to replicas of the next one: to all, or where they are many to a
    /// cell of them.
    pub(super) fn route_by_view(&mut self) {
        let (era, ends) = (self.era, [Step(0), Step(u64::MAX)]);
        let Self { stages, view, config, .. } = self;
        for (stage, hosted) in stages {
            // Who changes its stage is a candidate at both, for the steps that it is there in.
            let hosts = |record: &MemberRecord| {
                ends.iter().any(|step| record.hosts(stage.next(), era, *step))
            };
            let (cell, part) = cell(&view.members, config.me, config.limits.cell, hosts);
            hosted.onward.set_candidates(cell);
            hosted.part = part;
        }
        self.route_by_link_estimates();
    }
}

/// So many of those who host a stage, those that follow this peer in the order of ids, and which part of
/// all that is. Ids are random, so everybody is in about as many cells, and whoever comes or goes is so in
/// few.
fn cell(
    members: &[Arc<MemberRecord>],
    me: Member,
    mut room: usize,
    hosts: impl Fn(&MemberRecord) -> bool,
) -> (Vec<Member>, Part) {
    let mine = members.partition_point(|record| record.member.peer < me.peer);
    let (before, after) = members.split_at(mine);
    let mut cell = Vec::new();
    let mut part = Part::default();
    for (met, record) in after.iter().chain(before).enumerate() {
        if !hosts(record) {
            continue;
        }
        if room == 0 {
            return (cell, part);
        }
        // Who changes its stage is not there in every step, and takes nobody's place.
        room -= usize::from(record.moves.is_none());
        cell.push(record.member);
        part = Part { met: met + 1, members: members.len() };
    }
    (cell, Part::default())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId, Stage, StageSpan};
    use shoal_protocol::message::Duties;

    use super::*;
    use crate::rng::mixed;

    fn record(number: u64) -> Arc<MemberRecord> {
        let mut peer = [0; 32];
        peer[..8].copy_from_slice(&mixed(number, 1).to_be_bytes());
        Arc::new(MemberRecord {
            member: Member { peer: PeerId(peer), incarnation: Incarnation(1) },
            span: StageSpan::one(Stage((number % 2) as u16)),
            addresses: Vec::new(),
            serving: true,
            duties: Duties::default(),
            mobile: false,
            moves: None,
        })
    }

    /// What 64 of 1,250 replicas get through while a step goes on is a twentieth of what is left of it.
    #[test]
    fn a_cell_is_about_the_part_of_its_stage_that_it_is() {
        let mut members: Vec<_> = (0..2_500).map(record).collect();
        members.sort_by_key(|record| record.member);
        let hosts = |record: &MemberRecord| record.span.contains(Stage(1));
        for me in [0, 700, 2_499] {
            let (some, part) = cell(&members, members[me].member, 64, hosts);
            assert_eq!(some.len(), 64);
            let left = part.of(10_000);
            assert!(left.abs_diff(10_000 * 64 / 1_250) <= 150, "{left}");
            let (all, part) = cell(&members, members[me].member, 1_250, hosts);
            assert_eq!((all.len(), part.of(10_000)), (1_250, 10_000));
        }
    }
}
