//! Who takes part in a run, and who would.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use super::LinkEstimate;
use crate::ids::{ContentHash, Era, Member, PeerId, Stage, StageSpan, Step};

/// Which stages a newcomer wants to host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum StageChoice {
    /// The stage that lacks replicas most.
    Auto,
    /// This one.
    One(Stage),
    /// Every stage.
    All,
    /// None: it keeps the log or an archive, and computes nothing.
    None,
}

/// What a peer would do for the run besides hosting stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Duties {
    /// Keep the run's log with other anchors, and the run when it is chosen.
    pub anchor: bool,
    /// Keep every checkpoint whole.
    pub archive: bool,
}

/// Who wants to be a member, and as what.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Candidate {
    /// The stages wanted.
    pub choice: StageChoice,
    /// The stages that it has room for, each alone.
    pub fits: BTreeSet<Stage>,
    /// Where its data plane listens.
    pub addresses: Vec<SocketAddr>,
    /// Hash of a known-answer forward and backward pass, the build, instruction set and threads:
    /// equal fingerprints compute equal bits. None of who computes nothing.
    pub fingerprint: Option<ContentHash>,
    /// What else it would do for the run.
    pub duties: Duties,
    /// Whether it may be given another stage later: it has room for any two at once, and nobody
    /// chose its stage.
    pub mobile: bool,
    /// What it measured of its links to members; none before it has looked round.
    pub link_estimates: Option<Vec<(PeerId, LinkEstimate)>>,
}

/// Who is a member.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct View {
    /// Grows with every change.
    pub number: u64,
    /// In order of members: they are looked up by it. Records are shared, since those who say a
    /// membership and those who keep it are many.
    pub members: Vec<Arc<MemberRecord>>,
}

/// What makes another membership of one. Who has not the one that it begins from asks for the whole.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct ViewChange {
    /// The membership that it begins from.
    pub since: u64,
    /// The one that it makes of it.
    pub number: u64,
    /// Whether nobody serves any more, but for those who do by `here`.
    pub stops: bool,
    /// Who is no member any more.
    pub gone: BTreeSet<Member>,
    /// Who is new, or not what it was: a new life takes the place of an old one.
    pub here: Vec<Arc<MemberRecord>>,
}

impl ViewChange {
    /// How many members it is about.
    #[must_use]
    pub fn len(&self) -> usize {
        self.gone.len() + self.here.len()
    }

    /// Whether it changes nothing but the number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.stops && self.len() == 0
    }
}

/// Fewer newcomers than this are put into a membership one by one.
const FEW: usize = 16;

impl View {
    /// What is known of a member; none of who is no member.
    #[must_use]
    pub fn record(&self, member: Member) -> Option<&MemberRecord> {
        self.of_peer(member.peer).filter(|record| record.member == member)
    }

    /// What is known of the life of a peer that is a member.
    #[must_use]
    pub fn of_peer(&self, peer: PeerId) -> Option<&MemberRecord> {
        self.members.get(self.place_of(peer).ok()?).map(AsRef::as_ref)
    }

    /// Where a peer is listed, or would be.
    fn place_of(&self, peer: PeerId) -> Result<usize, usize> {
        self.members.binary_search_by_key(&peer, |record| record.member.peer)
    }

    /// Whether this life of a peer is a member.
    #[must_use]
    pub fn lists(&self, member: Member) -> bool {
        self.record(member).is_some()
    }

    /// Whether it is a member that takes part.
    #[must_use]
    pub fn serves(&self, member: Member) -> bool {
        self.record(member).is_some_and(|record| record.serving)
    }

    /// Who was a member here and is none in a newer view.
    pub fn gone_in(&self, newer: &Self) -> impl Iterator<Item = Member> {
        let members = self.members.iter().map(|record| record.member);
        members.filter(|member| !newer.lists(*member))
    }

    /// Makes the membership that a change leads to. Returns who was a member and is none, or
    /// nothing where the change begins from another membership: then this one stays.
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
        self.put_in(new);
        self.number = change.number;
        Some(gone)
    }

    /// Puts newcomers in, each before who is at its place now. Of who is named twice the last word counts.
    fn put_in(&mut self, mut new: Vec<(usize, Arc<MemberRecord>)>) {
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

/// One member.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct MemberRecord {
    /// Who.
    pub member: Member,
    /// The stages it hosts.
    pub span: StageSpan,
    /// Where its data plane listens.
    pub addresses: Vec<SocketAddr>,
    /// Whether it takes part; a newcomer without weights only listens.
    pub serving: bool,
    /// What else it does for the run.
    pub duties: Duties,
    /// Whether it may be given another stage.
    pub mobile: bool,
    /// Its way to another stage, while it is on one.
    pub moves: Option<Move>,
}

/// Whether there are members and none of them serves: before the first step all do, and later none does while
/// a return to an earlier version is under way.
#[must_use]
pub fn is_stopped<'a>(members: impl IntoIterator<Item = &'a MemberRecord>) -> bool {
    let serving = members.into_iter().map(|record| record.serving);
    serving.reduce(|one, other| one || other) == Some(false)
}

/// A member's way from its stage to another: it serves the one while it fetches the other, and
/// changes over between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Move {
    /// The other stage.
    pub to: Stage,
    /// The era that it began in. A later one finds it where it was, or, where the step was decided,
    /// there already.
    pub era: Era,
    /// The first step that it serves there; none while it is not ready.
    pub at: Option<Step>,
    /// What it is for.
    pub reason: MoveReason,
}

/// Why a member is to change its stage.
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
    /// Nobody has the other stage's weights any more: it begins again from a checkpoint.
    StageLost,
    /// Members of the other stage are gone, and it is the slow one since.
    MembersGone,
    /// The other stage gets through less, by what is measured.
    Uneven,
    /// Two that are about equally fast change places, each nearer then to those whom it sends to.
    Nearer,
    /// It is tried what moves lead to.
    Trial,
}

impl MoveReason {
    /// In words, about a stage.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::StageLost => "nobody is left there",
            Self::MembersGone => "members of it are gone",
            Self::Uneven => "it gets through least",
            Self::Nearer => "it is nearer",
            Self::Trial => "moves are tried",
        }
    }
}

impl MemberRecord {
    /// The stages that it hosts in a step.
    #[must_use]
    pub fn span_at(&self, era: Era, step: Step) -> StageSpan {
        let there = |moves: &Move| moves.at.is_some_and(|at| (moves.era, at) <= (era, step));
        let moved = self.moves.filter(there);
        moved.map_or(self.span, |moves| StageSpan::one(moves.to))
    }

    /// The stages that it hosts, or goes to where it is on its way.
    #[must_use]
    pub fn destination(&self) -> StageSpan {
        self.moves.map_or(self.span, |moves| StageSpan::one(moves.to))
    }

    /// Whether it is decided from which step on it hosts another stage.
    #[must_use]
    pub fn leaves(&self) -> bool {
        self.moves.is_some_and(|moves| moves.at.is_some())
    }

    /// Whether it takes part in a step at a stage.
    #[must_use]
    pub fn hosts(&self, stage: Stage, era: Era, step: Step) -> bool {
        self.serving && self.span_at(era, step).contains(stage)
    }

    /// Whether it hears what the rounds of a stage come to, to host it later.
    #[must_use]
    pub fn listens(&self, stage: Stage, era: Era, step: Step) -> bool {
        let moves = |moves: Move| moves.to == stage && moves.era == era;
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

    /// Members by peer, each in some life, serving or not.
    fn members() -> impl Strategy<Value = BTreeMap<u8, (u64, bool)>> {
        prop::collection::btree_map(0u8..40, (1u64..4, any::<bool>()), 0..40)
    }

    fn record(peer: u8, life: u64, serving: bool) -> Arc<MemberRecord> {
        let member = Member { peer: PeerId([peer; 32]), incarnation: Incarnation(life) };
        let (span, addresses, duties) = (StageSpan::none(), Vec::new(), Duties::default());
        MemberRecord { member, span, addresses, serving, duties, mobile: false, moves: None }.into()
    }

    fn view(number: u64, members: &BTreeMap<u8, (u64, bool)>) -> View {
        let members = members.iter().map(|(peer, (life, serving))| record(*peer, *life, *serving));
        View { number, members: members.collect() }
    }

    proptest! {
        #[test]
        fn a_change_makes_the_membership_that_it_says(
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
            // Whose place a new life takes need not be named.
            let gone = left.iter().copied().filter(|gone| peers(&new, gone)).collect();
            let change = ViewChange { since: 3, number: 5, stops, gone, here };
            let mut made = old.clone();
            let told = made.take(&change).expect("it begins from there");
            prop_assert_eq!(told.into_iter().collect::<BTreeSet<_>>(), left);
            prop_assert_eq!(&made, &new);
            prop_assert_eq!(made.take(&change), None);
            prop_assert_eq!(made, new);
        }

        /// Whatever the order they are named in, and however often.
        #[test]
        fn newcomers_are_put_in_order_and_the_last_word_of_each_counts(
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

        /// A list that somebody did not put in order makes no change panic.
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
