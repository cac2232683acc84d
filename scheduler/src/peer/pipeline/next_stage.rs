//! The next stage as a hosted stage sees it: the replicas to which its activations go.

use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, Member, Stage, StageSpan, Step};
use shoal_protocol::message::MemberRecord;
use shoal_protocol::units::Moment;

use crate::peer::config::PeerConfig;
use crate::peer::context::Context;
use crate::router::{Router, is_early};

/// The replicas of the next stage, and the work that waits for room there.
#[derive(Debug)]
pub(super) struct NextStage {
    router: Router,
    /// The part of all replicas that the router knows.
    coverage: Coverage,
    /// Work whose activation no replica has room for.
    blocked: BTreeSet<ClaimKey>,
}

/// The part of a stage's replicas that a sample of the members has. Members are in random order, so
/// the part of the replicas is about the part of the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Coverage {
    /// Members that were considered.
    considered: usize,
    members: usize,
}

impl Default for Coverage {
    fn default() -> Self {
        Self { considered: 1, members: 1 }
    }
}

impl Coverage {
    /// The share of an amount.
    fn of(self, all: u64) -> u64 {
        let part = u128::from(all) * self.considered as u128 / self.members.max(1) as u128;
        u64::try_from(part).unwrap_or(all)
    }
}

impl NextStage {
    /// The stage after a hosted one. Each has a router of its own, and they need not agree.
    pub(super) fn new(config: &PeerConfig, hosted: Stage) -> Self {
        let router = Router::by(config.routing, config.seed ^ u64::from(hosted.0) << 48);
        Self { router, coverage: Coverage::default(), blocked: BTreeSet::new() }
    }

    /// Follows the membership: sends to all replicas of the stage, or to a cell of them where they are
    /// many.
    pub(super) fn update_members(&mut self, ctx: &Context<'_>, stage: Stage) {
        let (era, ends) = (ctx.position.era, [Step(0), Step(u64::MAX)]);
        // A replica that migrates is a candidate at both stages, each for its steps there.
        let hosts = |record: &MemberRecord| ends.iter().any(|step| record.hosts(stage, era, *step));
        let (cell, coverage) = cell(&ctx.view.members, ctx.me(), ctx.config.limits.cell, hosts);
        self.router.set_candidates(cell);
        self.coverage = coverage;
        self.update_links(ctx);
    }

    /// Follows the link estimates.
    pub(super) fn update_links(&mut self, ctx: &Context<'_>) {
        self.router.set_link_estimates(|member| ctx.links.round_trip(member.peer));
    }

    /// Chooses a replica for the activation of this work; none where all are busy.
    pub(super) fn choose(
        &mut self,
        ctx: &Context<'_>,
        key: ClaimKey,
        was_offered: bool,
    ) -> Option<Member> {
        let (next, era) = (key.stage.next(), ctx.position.era);
        let hosts_at = |member: &Member, stage| {
            ctx.view.record(*member).is_some_and(|record| record.hosts(stage, era, key.step))
        };
        let hosts = |member: &Member| hosts_at(member, next);
        // Work that is offered again is late already, so that any replica will do.
        if was_offered {
            return self.router.choose_where(hosts);
        }
        let is_here = hosts(&ctx.me());
        // Where stages are swapped activations stay: visits bring the weights to them.
        let span = ctx.span_at(key.step).unwrap_or(StageSpan::none());
        if is_here && ctx.config.limits.swaps(span.stages().count()) {
            return self.router.choose_where(|member| *member == ctx.me());
        }
        // A member that hosts both stages takes its part at the earlier one, and nothing has to travel to it.
        let useful = |member: &Member| {
            hosts(member) && (!is_here || *member == ctx.me() || !hosts_at(member, key.stage))
        };
        let all = ctx.config.manifest.microbatches_of(key.step.0);
        let left = all.saturating_sub(key.microbatch.0) as usize;
        let following = self.coverage.of(left.saturating_sub(1) as u64);
        let early = is_early(left, all as usize);
        self.router.choose_in_time(key.step, (following, early), useful)
    }

    /// A replica reported its time for one microbatch, in nanoseconds.
    pub(super) fn note_service_time(&mut self, member: Member, service_time: u64) {
        self.router.measured(member, service_time);
    }

    /// A replica refused an offer.
    pub(super) fn note_refusal(&mut self, member: Member) {
        self.router.set_busy(member);
        self.router.refund(member);
    }

    /// A replica received work without being chosen.
    pub(super) fn note_redirect(&mut self, member: Member) {
        self.router.charge(member);
    }

    pub(super) fn note_answer(&mut self, member: Member, sent: Moment, now: Moment) {
        let _ = self.router.answered(member, sent, now);
    }

    pub(super) fn set_free(&mut self, member: Member) {
        self.router.set_free(member);
    }

    pub(super) fn set_all_free(&mut self) {
        self.router.set_all_free();
    }

    pub(super) fn block(&mut self, key: ClaimKey) {
        self.blocked.insert(key);
    }

    /// Returns whether the work was blocked.
    pub(super) fn unblock(&mut self, key: ClaimKey) -> bool {
        self.blocked.remove(&key)
    }

    pub(super) fn first_blocked(&self) -> Option<ClaimKey> {
        self.blocked.first().copied()
    }

    pub(super) fn blocked(&self) -> impl Iterator<Item = ClaimKey> + '_ {
        self.blocked.iter().copied()
    }

    /// Forgets all work and which replicas are busy, for a rewind.
    pub(super) fn clear(&mut self) {
        self.blocked.clear();
        self.router.set_all_free();
    }
}

/// The first hosts of a stage that follow this peer in the order of ids, and their part of all. Ids are
/// random, so every replica is in about equally many cells, and a membership change affects few of them.
fn cell(
    members: &[Arc<MemberRecord>],
    me: Member,
    mut room: usize,
    hosts: impl Fn(&MemberRecord) -> bool,
) -> (Vec<Member>, Coverage) {
    let mine = members.partition_point(|record| record.member.peer < me.peer);
    let (before, after) = members.split_at(mine);
    let mut cell = Vec::new();
    let mut coverage = Coverage::default();
    for (index, record) in after.iter().chain(before).enumerate() {
        if !hosts(record) {
            continue;
        }
        if room == 0 {
            return (cell, coverage);
        }
        // A migrating replica is not there in every step, so it counts beyond the limit.
        room -= usize::from(record.moves.is_none());
        cell.push(record.member);
        coverage = Coverage { considered: index + 1, members: members.len() };
    }
    (cell, Coverage::default())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;
    use crate::rng::mixed;

    fn record(number: u64) -> Arc<MemberRecord> {
        let mut peer = [0; 32];
        peer[..8].copy_from_slice(&mixed(number, 1).to_be_bytes());
        Arc::new(MemberRecord::plain(
            Member { peer: PeerId(peer), incarnation: Incarnation(1) },
            StageSpan::one(Stage((number % 2) as u16)),
        ))
    }

    /// The share of 64 of 1,250 replicas is about a twentieth.
    #[test]
    fn the_coverage_is_about_the_part_of_its_stage_that_a_cell_has() {
        let mut members: Vec<_> = (0..2_500).map(record).collect();
        members.sort_by_key(|record| record.member);
        let hosts = |record: &MemberRecord| record.span.contains(Stage(1));
        for me in [0, 700, 2_499] {
            let (some, coverage) = cell(&members, members[me].member, 64, hosts);
            assert_eq!(some.len(), 64);
            let left = coverage.of(10_000);
            assert!(left.abs_diff(10_000 * 64 / 1_250) <= 150, "{left}");
            let (all, coverage) = cell(&members, members[me].member, 1_250, hosts);
            assert_eq!((all.len(), coverage.of(10_000)), (1_250, 10_000));
        }
    }
}
