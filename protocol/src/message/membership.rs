//! The members of a run, and candidates for membership.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use super::LinkEstimate;
use crate::ids::{ContentHash, Era, Member, PeerId, Stage, StageSpan, Step};
use crate::plain_name::{IslandName, PeerName};
use crate::units::{Price, Rate};

/// Which stages a newcomer wants to host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum StageChoice {
    /// The stage that lacks replicas most.
    Auto,
    /// These stages.
    Span(StageSpan),
    /// Every stage.
    All,
    /// No stage: the peer keeps the log or an archive and computes nothing.
    None,
}

/// The roles that a peer offers besides hosting stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Duties {
    /// Keep the run's log together with the other anchors, and act as coordinator when elected.
    pub anchor: bool,
    /// Keep every checkpoint whole.
    pub archive: bool,
}

/// How many stages, whichever, a peer hosts at once at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct StageRoom {
    /// With all of their state in memory.
    pub in_memory: u16,
    /// With a part of it in the tier below, such as the disk: at least as many. 0 if the peer stays with its own
    /// stages, because some do not fit or its operator chose them.
    pub most: u16,
    /// The rate at which state comes from that tier, and the rate at which it goes there; 0 if nothing is swapped.
    pub swap_rate: Rate,
}

impl StageRoom {
    /// That of a peer that stays with its own stages.
    pub const NONE: Self = Self::in_memory(0);

    /// Room for so many stages in memory, and none below it.
    #[must_use]
    pub const fn in_memory(stages: u16) -> Self {
        Self { in_memory: stages, most: stages, swap_rate: Rate(0) }
    }
}

/// A peer that asks for membership, and its offer.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Candidate {
    /// The stages that it asks for.
    pub choice: StageChoice,
    /// The stages that its memory holds, each alone.
    pub fits: BTreeSet<Stage>,
    /// The addresses of its data plane.
    pub addresses: Vec<SocketAddr>,
    /// Hash of a known-answer forward and backward pass, the build, instruction set and threads:
    /// equal fingerprints compute equal bits. `None` if the peer computes nothing.
    pub fingerprint: Option<ContentHash>,
    /// The roles that it offers besides hosting stages.
    pub duties: Duties,
    /// The number of passes that it runs at a time.
    pub devices: NonZeroU16,
    /// The number of its devices that compute each pass together.
    pub devices_per_pass: NonZeroU16,
    /// How many stages it has room for. The coordinator may assign it others as far as they fit beside its own.
    pub room: StageRoom,
    /// How many stages in a row the coordinator may choose for it at most.
    pub longest: u16,
    /// The price of its machine, if its operator stated one. It decides nothing.
    pub price: Option<Price>,
    /// The name of its island, if it shares a fast network with others.
    pub island: Option<IslandName>,
    /// Its name, for people. It decides nothing.
    pub name: Option<PeerName>,
    /// The measured links to members; `None` before the latency probe.
    pub link_estimates: Option<Vec<(PeerId, LinkEstimate)>>,
}

/// The membership of a run at one point in time.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct View {
    /// The number of the membership; grows with every change.
    pub number: u64,
    /// The members in ascending order, for binary search. Records are shared, because many messages
    /// and tables refer to them.
    pub members: Vec<Arc<MemberRecord>>,
}

/// The difference between two memberships. A receiver that lacks the first requests the complete
/// membership.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct ViewChange {
    /// The number of the membership that it starts from.
    pub since: u64,
    /// The number of the membership that it produces.
    pub number: u64,
    /// Whether all members stop serving, except those that serve according to `here`.
    pub stops: bool,
    /// The members that are removed.
    pub gone: BTreeSet<Member>,
    /// The members that are added or changed. A new incarnation replaces an earlier one.
    pub here: Vec<Arc<MemberRecord>>,
}

impl ViewChange {
    /// The number of members that it adds, changes or removes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.gone.len() + self.here.len()
    }

    /// Whether it changes only the number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.stops && self.len() == 0
    }
}

/// Below this number of newcomers, each is inserted into the membership alone.
const FEW: usize = 16;

impl View {
    /// The record of a member; `None` if it is not a member.
    #[must_use]
    pub fn record(&self, member: Member) -> Option<&MemberRecord> {
        self.of_peer(member.peer).filter(|record| record.member == member)
    }

    /// The record of a peer's current incarnation; `None` if the peer is not a member.
    #[must_use]
    pub fn of_peer(&self, peer: PeerId) -> Option<&MemberRecord> {
        self.members.get(self.place_of(peer).ok()?).map(AsRef::as_ref)
    }

    /// The position of a peer in the list, or the position to insert it at.
    fn place_of(&self, peer: PeerId) -> Result<usize, usize> {
        self.members.binary_search_by_key(&peer, |record| record.member.peer)
    }

    /// Whether this incarnation of a peer is a member.
    #[must_use]
    pub fn lists(&self, member: Member) -> bool {
        self.record(member).is_some()
    }

    /// Whether it is a member that serves.
    #[must_use]
    pub fn serves(&self, member: Member) -> bool {
        self.record(member).is_some_and(|record| record.serving)
    }

    /// The members of this view that are missing from a newer one.
    pub fn gone_in(&self, newer: &Self) -> impl Iterator<Item = Member> {
        let members = self.members.iter().map(|record| record.member);
        members.filter(|member| !newer.lists(*member))
    }

    /// Applies a change. Returns the members that it removes, or `None` if the change starts from
    /// another membership; then this one stays as it is.
    #[must_use]
    pub fn take(&mut self, change: &ViewChange) -> Option<Vec<Member>> {
        if change.since != self.number || change.number < change.since {
            return None;
        }
        let mut gone = Vec::new();
        if change.stops {
            for record in self.members.iter_mut().filter(|record| record.serving) {
                Arc::make_mut(record).serving = false;
            }
        }
        for member in &change.gone {
            if let Ok(place) = self.place_of(member.peer)
                && self.members[place].member == *member
            {
                self.members.remove(place);
                gone.push(*member);
            }
        }
        let mut new = Vec::new();
        for record in &change.here {
            match self.place_of(record.member.peer) {
                Ok(place) => {
                    let old = std::mem::replace(&mut self.members[place], Arc::clone(record));
                    gone.extend((old.member != record.member).then_some(old.member));
                }
                Err(place) => new.push((place, Arc::clone(record))),
            }
        }
        self.insert_all(new);
        self.number = change.number;
        Some(gone)
    }

    /// Inserts newcomers, each before the member at its position. The last of several entries of a
    /// peer counts.
    fn insert_all(&mut self, mut new: Vec<(usize, Arc<MemberRecord>)>) {
        new.sort_by_key(|(_, record)| record.member.peer);
        new.dedup_by(|later, kept| {
            let twice = later.1.member.peer == kept.1.member.peer;
            if twice {
                std::mem::swap(later, kept);
            }
            twice
        });
        if new.len() < FEW {
            for (before, (place, record)) in new.into_iter().enumerate() {
                self.members.insert(place + before, record);
            }
            return;
        }
        let all = Vec::with_capacity(self.members.len() + new.len());
        let mut old = std::mem::replace(&mut self.members, all).into_iter();
        let mut taken = 0;
        for (place, record) in new {
            self.members.extend(old.by_ref().take(place.saturating_sub(taken)));
            taken = taken.max(place);
            self.members.push(record);
        }
        self.members.extend(old);
    }
}

/// The record of one member.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct MemberRecord {
    /// The member: peer and incarnation.
    pub member: Member,
    /// The stages it hosts.
    pub span: StageSpan,
    /// The addresses of its data plane.
    pub addresses: Vec<SocketAddr>,
    /// Whether it serves. A newcomer without weights only listens.
    pub serving: bool,
    /// The roles that it has besides hosting stages.
    pub duties: Duties,
    /// The number of passes that it runs at a time.
    pub devices: NonZeroU16,
    /// The number of its devices that compute each pass together.
    pub devices_per_pass: NonZeroU16,
    /// How many stages it can host at once, those of a migration included.
    pub room: StageRoom,
    /// How many stages in a row the coordinator may choose for it at most.
    pub longest: u16,
    /// The price of its machine, if its operator stated one. It decides nothing.
    pub price: Option<Price>,
    /// The name of its island, if it shares a fast network with others.
    pub island: Option<IslandName>,
    /// Its name, for people. It decides nothing.
    pub name: Option<PeerName>,
    /// What decides the bits that it computes, as in its candidature.
    pub fingerprint: Option<ContentHash>,
    /// Its migration to other stages, while one is under way.
    pub moves: Option<Move>,
}

/// Whether there are members and none of them serves. Before the first step all members serve;
/// later, none serves while a rewind is under way.
#[must_use]
pub fn is_stopped<'a>(members: impl IntoIterator<Item = &'a MemberRecord>) -> bool {
    let serving = members.into_iter().map(|record| record.serving);
    serving.reduce(|one, other| one || other) == Some(false)
}

/// A member's migration to another span, which may have stages in common with its own. The member serves its own
/// stages while it fetches those that it lacks, and changes over between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Move {
    /// The destination.
    pub to: StageSpan,
    /// The era in which the migration began. If a rewind begins a later era, the member is at its
    /// old stages, or at the new ones if the first step there was decided.
    pub era: Era,
    /// The first step that it serves at the destination; `None` until it is ready.
    pub at: Option<Step>,
    /// The reason of the migration.
    pub reason: MoveReason,
}

/// The stages whose weights a member follows from a snapshot on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Followed {
    /// Its own. If it serves, and lacks a result of these, it cannot continue.
    Own,
    /// Those that its migration fetches.
    Destination,
}

/// Why a member changes its stage.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    bincode::Encode,
    bincode::Decode,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum MoveReason {
    /// No member has the destination's weights: the stage restarts from a checkpoint.
    StageLost,
    /// Members of the destination left, and it is the slowest stage since.
    MembersGone,
    /// The destination has a lower measured throughput.
    Uneven,
    /// Two members of about equal speed change places; both are then nearer to the members they
    /// send to.
    Nearer,
    /// A longer or shorter span makes the member's steps shorter.
    Span,
    /// The move is a trial of the effect of moves.
    Trial,
}

impl MoveReason {
    /// The reason as text, about the destination.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::StageLost => "no member is left there",
            Self::MembersGone => "members of it are gone",
            Self::Uneven => "it has the lowest throughput",
            Self::Nearer => "it is nearer",
            Self::Span => "a span of this length is faster",
            Self::Trial => "as a trial of moves",
        }
    }
}

impl MemberRecord {
    /// A member that serves these stages on one device, and of which nothing else is known.
    #[must_use]
    pub fn plain(member: Member, span: StageSpan) -> Self {
        Self {
            member,
            span,
            addresses: Vec::new(),
            serving: true,
            duties: Duties::default(),
            devices: NonZeroU16::MIN,
            devices_per_pass: NonZeroU16::MIN,
            room: StageRoom::NONE,
            longest: 1,
            price: None,
            island: None,
            name: None,
            fingerprint: None,
            moves: None,
        }
    }

    /// The stages that it hosts in a step.
    #[must_use]
    pub fn span_at(&self, era: Era, step: Step) -> StageSpan {
        let there = |moves: &Move| moves.at.is_some_and(|at| (moves.era, at) <= (era, step));
        let moved = self.moves.filter(there);
        moved.map_or(self.span, |moves| moves.to)
    }

    /// The destination of its migration, or else the stages that it hosts.
    #[must_use]
    pub fn destination(&self) -> StageSpan {
        self.moves.map_or(self.span, |moves| moves.to)
    }

    /// Whether memory does not hold all of these stages, which the coordinator chose for it.
    #[must_use]
    pub fn swaps(&self, span: StageSpan) -> bool {
        self.room.most > 0 && span.stages().count() > usize::from(self.room.in_memory)
    }

    /// Whether the step from which it hosts other stages is decided.
    #[must_use]
    pub fn changes_over(&self) -> bool {
        self.moves.is_some_and(|moves| moves.at.is_some())
    }

    /// Whether the step from which it does not host one of its stages any more is decided.
    #[must_use]
    pub fn leaves(&self, stage: Stage) -> bool {
        let goes = |moves: Move| moves.at.is_some() && !moves.to.contains(stage);
        self.span.contains(stage) && self.moves.is_some_and(goes)
    }

    /// The stages that it hosts now and not at the destination of its migration.
    pub fn left_stages(&self) -> impl Iterator<Item = Stage> + use<> {
        self.span.outside(self.destination())
    }

    /// The stages that it fetches in its migration: those of its destination that it does not host.
    pub fn fetched_stages(&self) -> impl Iterator<Item = Stage> + use<> {
        self.destination().outside(self.span)
    }

    /// Whether it serves a stage in a step.
    #[must_use]
    pub fn hosts(&self, stage: Stage, era: Era, step: Step) -> bool {
        self.serving && self.span_at(era, step).contains(stage)
    }

    /// Whether it receives the results of a stage's rounds because it will host the stage later.
    #[must_use]
    pub fn listens(&self, stage: Stage, era: Era, step: Step) -> bool {
        let moves = |moves: Move| moves.to.contains(stage) && moves.era == era;
        let follows = self.serving && self.moves.is_some_and(moves);
        let comes = !self.serving && self.span.contains(stage);
        comes || (follows && !self.hosts(stage, era, step))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::Incarnation;

    /// Members by peer, each with an incarnation, serving or not.
    fn members() -> impl Strategy<Value = BTreeMap<u8, (u64, bool)>> {
        prop::collection::btree_map(0u8..40, (1u64..4, any::<bool>()), 0..40)
    }

    fn record(peer: u8, life: u64, serving: bool) -> Arc<MemberRecord> {
        let member = Member { peer: PeerId([peer; 32]), incarnation: Incarnation(life) };
        let (span, addresses, duties) = (StageSpan::none(), Vec::new(), Duties::default());
        MemberRecord { addresses, serving, duties, ..MemberRecord::plain(member, span) }.into()
    }

    fn view(number: u64, members: &BTreeMap<u8, (u64, bool)>) -> View {
        let members = members.iter().map(|(peer, (life, serving))| record(*peer, *life, *serving));
        View { number, members: members.collect() }
    }

    proptest! {
        #[test]
        fn a_change_produces_the_membership_it_describes(
            before in members(), after in members(), stops in any::<bool>()
        ) {
            let (old, new) = (view(3, &before), view(5, &after));
            let stopped = |record: &Arc<MemberRecord>| {
                let mut record = MemberRecord::clone(record);
                record.serving &= !stops;
                record
            };
            let known = |record: &MemberRecord| {
                old.members.iter().map(stopped).any(|known| known == *record)
            };
            let here = new.members.iter().filter(|record| !known(record)).cloned().collect();
            let peers = |view: &View, gone: &Member| view.of_peer(gone.peer).is_none();
            let left: BTreeSet<Member> = old.gone_in(&new).collect();
            // A removed member whose peer has a new incarnation need not be listed.
            let gone = left.iter().copied().filter(|gone| peers(&new, gone)).collect();
            let change = ViewChange { since: 3, number: 5, stops, gone, here };
            let mut made = old.clone();
            let removed = made.take(&change).expect("it starts from there");
            prop_assert_eq!(removed.into_iter().collect::<BTreeSet<_>>(), left);
            prop_assert_eq!(&made, &new);
            prop_assert_eq!(made.take(&change), None);
            prop_assert_eq!(made, new);
        }

        /// Newcomers may be listed in any order, and more than once.
        #[test]
        fn newcomers_are_inserted_in_order_and_the_last_entry_of_each_counts(
            before in members(), named in prop::collection::vec((20u8..40, 1u64..4), 0..60)
        ) {
            let mut after = before.clone();
            after.extend(named.iter().map(|(peer, life)| (*peer, (*life, true))));
            let here = named.iter().map(|(peer, life)| record(*peer, *life, true)).collect();
            let mut made = view(3, &before);
            let change = ViewChange { since: 3, number: 5, here, ..ViewChange::default() };
            prop_assert!(made.take(&change).is_some());
            prop_assert_eq!(made, view(5, &after));
        }

        /// A list that is out of order makes no change panic.
        #[test]
        fn no_order_of_members_makes_a_change_panic(
            listed in prop::collection::vec(0u8..40, 0..40),
            named in prop::collection::vec(0u8..40, 0..40)
        ) {
            let records =
                |peers: Vec<u8>| peers.into_iter().map(|peer| record(peer, 1, true)).collect();
            let mut made = View { number: 3, members: records(listed) };
            let here = records(named);
            let change = ViewChange { since: 3, number: 5, here, ..ViewChange::default() };
            prop_assert!(made.take(&change).is_some());
        }
    }
}
