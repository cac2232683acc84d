//! Round groups: the members of each weight group's last round, from changes or, where one is missing, as a whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Era, Step, WeightGroup};
use shoal_protocol::message::{
    RoundGroup, RoundGroupChange, RoundGroupMember, RoundId, ToCoordinator,
};
use shoal_protocol::units::Moment;

use crate::action::PeerAction;
use crate::paging::Pages;
use crate::peer::Out;

/// The known round groups, by their weights.
#[derive(Debug, Default)]
pub(super) struct RoundGroups {
    by_weights: BTreeMap<WeightGroup, KnownGroup>,
}

/// The group of the last round of one weight group.
#[derive(Debug, Default)]
struct KnownGroup {
    group: Arc<RoundGroup>,
    /// Pages of a newer one.
    pages: Pages<RoundGroupMember>,
    /// The round that waits for the whole group, and the time of the last request.
    requested: Option<(RoundId, Moment)>,
}

impl RoundGroups {
    /// Applies the change that comes with the close of a round and returns the group. Returns nothing
    /// where the change is old, or where an earlier one is missing: then it requests the whole group.
    pub(super) fn apply(
        &mut self,
        now: Moment,
        retry: Duration,
        round: RoundId,
        change: &RoundGroupChange,
        out: &mut Out,
    ) -> Option<Arc<RoundGroup>> {
        let known = self.by_weights.entry(round.weights).or_default();
        if change.number < known.group.number {
            // A later attempt is under way.
            return None;
        }
        if change.number > known.group.number {
            let Some(newer) = known.group.changed_by(change) else {
                known.request(now, retry, round, out);
                return None;
            };
            known.group = newer.into();
        }
        known.requested = None;
        Some(Arc::clone(&known.group))
    }

    /// Takes one page of a whole group. The close of the round that needs it follows.
    pub(super) fn take_page(
        &mut self,
        weights: WeightGroup,
        number: u64,
        page: (u32, u32),
        members: Vec<RoundGroupMember>,
    ) {
        let known = self.by_weights.entry(weights).or_default();
        if number > known.group.number
            && let Some(all) = known.pages.take(number, page, members)
        {
            known.group = RoundGroup::of(number, all).into();
        }
    }

    /// Repeats unanswered requests of this era's open steps, and drops those of earlier ones.
    pub(super) fn repeat_requests(
        &mut self,
        now: Moment,
        retry: Duration,
        open: (Era, Step),
        out: &mut Out,
    ) {
        for known in self.by_weights.values_mut() {
            known.requested = known.requested.filter(|(round, _)| (round.era, round.step) >= open);
            if let Some((round, _)) = known.requested {
                known.request(now, retry, round, out);
            }
        }
    }
}

impl KnownGroup {
    /// Requests the whole group, unless the last request is more recent than the retry interval.
    fn request(&mut self, now: Moment, retry: Duration, round: RoundId, out: &mut Out) {
        let last = self.requested.filter(|(of, _)| *of == round);
        if last.is_none_or(|(_, at)| now.since(at) >= retry) {
            self.requested = Some((round, now));
            out.push(PeerAction::ToCoordinator(ToCoordinator::RoundGroupRequest { round }));
        }
    }
}
