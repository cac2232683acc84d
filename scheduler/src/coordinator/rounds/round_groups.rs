//! Round groups: the members of each weight group's last round, and the share of the vector that each reduces.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_protocol::ids::{Member, Term, WeightGroup};
use shoal_protocol::message::{RoundGroup, RoundGroupMember};
use shoal_protocol::plain_name::IslandName;
use shoal_protocol::units::Rate;

use super::super::context::Context;
use super::islands::assigned;
use crate::round::{NumberBytes, averaged, member_rates, weights};

/// The members of rounds and the measured rates of their links.
#[derive(Debug, Default)]
pub(super) struct RoundGroups {
    /// The group of the last round of each weight group.
    last: BTreeMap<WeightGroup, Arc<RoundGroup>>,
    /// Measured rates of links between replicas, by sender and receiver.
    link_rates: BTreeMap<(Member, Member), Rate>,
}

impl RoundGroups {
    /// The group of these weights' last round.
    pub(super) fn last(&self, weights: WeightGroup) -> Arc<RoundGroup> {
        self.last.get(&weights).cloned().unwrap_or_default()
    }

    /// The number of replicas in these weights' last round.
    pub(super) fn size(&self, weights: WeightGroup) -> usize {
        self.last.get(&weights).map_or(0, |group| group.members.len())
    }

    /// Sets the group of these weights' last round.
    pub(super) fn set(&mut self, weights: WeightGroup, group: Arc<RoundGroup>) {
        self.last.insert(weights, group);
    }

    /// The group of the next round, in which only some replicas reduce: the one before, if its members and their
    /// shares are the same.
    pub(super) fn next(
        &self,
        context: &Context,
        before: &Arc<RoundGroup>,
        (replicas, reduces): (BTreeSet<Member>, impl Fn(Member) -> bool),
        listeners: BTreeSet<Member>,
    ) -> Arc<RoundGroup> {
        let replicas: Vec<Member> = replicas.into_iter().collect();
        let islands = islands(context, &replicas, before);
        // Between islands each piece crosses once wherever it is reduced, so equal parts are good ones.
        let weights = match islands.iter().any(Option::is_some) {
            true => vec![1; replicas.len()],
            false => self.weights(context, &replicas, before),
        };
        let parts = replicas.into_iter().zip(weights).zip(islands);
        let parts = parts.map(|((member, weight), island)| RoundGroupMember {
            member,
            // Weights that are all 0 stand for equal ones.
            weight: Some(if reduces(member) { weight.max(1) } else { 0 }),
            island,
        });
        let listeners = listeners.into_iter().map(|member| RoundGroupMember {
            member,
            weight: None,
            island: None,
        });
        let group = RoundGroup::of(before.number, parts.chain(listeners));
        numbered(context.progress.term, before, group)
    }

    /// The share of the vector that each replica reduces, by the rates of the links between them in rounds of
    /// the group before.
    fn weights(&self, context: &Context, members: &[Member], before: &RoundGroup) -> Vec<u32> {
        let known: BTreeMap<Member, u32> =
            before.members.iter().map(|part| (part.member, part.weight)).collect();
        let known: Vec<Option<u32>> =
            members.iter().map(|member| known.get(member).copied()).collect();
        let rate = |from: usize, to: usize| {
            let rate = self.link_rates.get(&(members[from], members[to]))?;
            Some(rate.0 as f64)
        };
        let bytes = NumberBytes::of(context.config.manifest.codec.all_reduce);
        weights(&member_rates(&known, bytes, rate), bytes)
    }

    /// Takes the rates at which a member sent to others of its group, by their places.
    pub(super) fn measure(&mut self, from: Member, group: &RoundGroup, rates: &[(u16, Rate)]) {
        for (place, rate) in rates {
            if let Some(to) = group.members.get(usize::from(*place)) {
                let known = self.link_rates.entry((from, to.member)).or_insert(*rate);
                *known = averaged(*known, *rate);
            }
        }
    }

    /// Forgets the measured links of members that are gone.
    pub(super) fn retain_links(&mut self, is_member: impl Fn(Member) -> bool) {
        self.link_rates.retain(|(from, to), _| is_member(*from) && is_member(*to));
    }
}

/// The island of each of these members in a round, by what their operators say or by measured links. There is none
/// if the codec rounds sums.
fn islands(context: &Context, members: &[Member], before: &RoundGroup) -> Vec<Option<u16>> {
    if !context.config.manifest.codec.all_reduce.is_exact() {
        return vec![None; members.len()];
    }
    let name = |member: &Member| context.members.current.record(*member)?.island.as_ref();
    let names: Vec<Option<&IslandName>> = members.iter().map(name).collect();
    assigned(members, &names, &context.members.links, before)
}

/// The group before, if it is the same, or the other one under the next number.
pub(super) fn numbered(term: Term, before: &Arc<RoundGroup>, group: RoundGroup) -> Arc<RoundGroup> {
    if group == **before {
        return Arc::clone(before);
    }
    // Groups of different terms have different numbers.
    let number = before.number.max(term.0 << 32) + 1;
    RoundGroup { number, ..group }.into()
}
