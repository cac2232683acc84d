//! Whom rounds are among, as this peer is told: changes, one made of the other, and the whole where
//! one of them is missing.

use std::collections::BTreeMap;
use std::sync::Arc;

use shoal_protocol::ids::{Microbatch, Stage};
use shoal_protocol::message::{
    Mended, Round, RoundGroup, RoundGroupChange, RoundGroupMember, RoundId, ToCoordinator,
};
use shoal_protocol::units::Moment;

use super::{Out, Peer};
use crate::action::PeerAction;
use crate::paging::Pages;

/// The crew of one stage's last round.
#[derive(Debug, Default)]
pub(super) struct KnownRoundGroup {
    group: Arc<RoundGroup>,
    /// What came of a newer one.
    parts: Pages<RoundGroupMember>,
    /// The round that waits for the whole, and when that was last asked for.
    wanted: Option<(RoundId, Moment)>,
}

/// What is known of each stage's rounds that this peer hears of.
pub(super) type RoundGroups = BTreeMap<Stage, KnownRoundGroup>;

impl Peer {
    /// A step is closed at one of this peer's stages.
    pub(super) fn closed(
        &mut self,
        now: Moment,
        id: RoundId,
        change: &RoundGroupChange,
        mended: Mended,
        counted: Vec<Microbatch>,
        out: &mut Out,
    ) {
        if id.stage > self.config.manifest.last_stage() {
            return;
        }
        let known = self.round_groups.entry(id.stage).or_default();
        if change.number < known.group.number {
            // It comes late: another try is on.
            return;
        }
        if change.number > known.group.number {
            let Some(newer) = known.group.changed_by(change) else {
                return self.request_round_group(now, id, out);
            };
            known.group = newer.into();
        }
        known.wanted = None;
        let group = Arc::clone(&known.group);
        self.close(now, Round { id, group, mended }, counted, out);
    }

    /// A part of the whole crew of a stage came; the round that it is for is closed after it.
    pub(super) fn handle_round_group(
        &mut self,
        stage: Stage,
        number: u64,
        part: (u32, u32),
        here: Vec<RoundGroupMember>,
    ) {
        if stage > self.config.manifest.last_stage() {
            return;
        }
        let known = self.round_groups.entry(stage).or_default();
        if number > known.group.number
            && let Some(all) = known.parts.take(number, part, here)
        {
            known.group = RoundGroup::of(number, all).into();
        }
    }

    /// Asks for the whole crew of a round, unless that was asked for just now.
    fn request_round_group(&mut self, now: Moment, round: RoundId, out: &mut Out) {
        let retry = self.config.limits.retry;
        let known = self.round_groups.entry(round.stage).or_default();
        let asked = known.wanted.filter(|(of, _)| *of == round);
        if asked.is_none_or(|(_, at)| now.since(at) >= retry) {
            known.wanted = Some((round, now));
            out.push(PeerAction::ToCoordinator(ToCoordinator::RoundGroupRequest { round }));
        }
    }

    /// Asks again for what did not come, while its step is not over.
    pub(super) fn repeat_round_group_requests(&mut self, now: Moment, out: &mut Out) {
        let (era, version) = (self.era, self.version);
        let wanted = self.round_groups.values_mut().filter_map(|known| {
            known.wanted = known.wanted.filter(|(of, _)| (of.era, of.step) >= (era, version));
            known.wanted
        });
        let wanted: Vec<RoundId> = wanted.map(|(round, _)| round).collect();
        for round in wanted {
            self.request_round_group(now, round, out);
        }
    }
}
