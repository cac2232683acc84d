//! The members of a run and the stages that they host.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Incarnation, Member, PeerId, Stage, StageSpan, Step};
use shoal_protocol::limits;
use shoal_protocol::message::{
    Candidate, Duties, MemberRecord, Move, MoveReason, StageChoice, ViewChange,
};

use crate::coordinator::placing::era_spans;
use crate::coordinator::placing::locality::{LinkEstimates, Load, Locality};
use crate::coordinator::placing::placement::{Offer, PlacementError, place};
use crate::coordinator::placing::throughput::{Estimates, StageThroughputs};
use crate::paging::CHANGED;
use crate::rng::mixed;

/// The members of a run, as the coordinator decides. The log makes the decisions durable.
#[derive(Debug)]
pub(crate) struct Membership {
    stages: u16,
    members: BTreeMap<PeerId, Arc<MemberRecord>>,
    /// The newest incarnation of each peer that was expelled. Neither it nor an earlier one is admitted again.
    expelled: BTreeMap<PeerId, Incarnation>,
    /// Members that are about to leave. The log does not have this: they report it to every coordinator.
    draining: BTreeSet<Member>,
    /// The number of the newest membership that was given to the log.
    number: u64,
    unlogged: Unlogged,
    /// The era and the version of the run.
    position: (Era, Step),
}

/// Changes since the newest membership that was given to the log.
#[derive(Debug, Default)]
struct Unlogged {
    /// Whether all members have stopped serving, except those in `here` that serve.
    stops: bool,
    gone: BTreeSet<Member>,
    /// Members whose records are new or changed.
    here: BTreeSet<PeerId>,
}

/// The result of an admission.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// The stages of the member.
    pub(crate) span: StageSpan,
    /// Whether it was a member already.
    pub(crate) again: bool,
    /// The earlier incarnation that it replaces.
    pub(crate) replaced: Option<Arc<MemberRecord>>,
    /// Whether its fingerprint differs from the others'.
    pub(crate) unlike: bool,
}

/// The reason why a peer is not admitted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdmissionError {
    #[error("a newer life of this peer is a member: stop the other process, or this one")]
    OldLife,
    #[error("this life of the peer was expelled: come back as a new one")]
    Expelled,
    #[error("the run has its {} members: wait until one leaves", limits::MEMBERS)]
    Full,
    #[error("{count} addresses are announced: at most {} can be", limits::MEMBER_ADDRESSES)]
    TooManyAddresses { count: usize },
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl Membership {
    /// The membership that the log gives.
    pub(crate) fn of(stages: u16, history: &History) -> Self {
        let members = history.view.members.iter();
        let members: BTreeMap<PeerId, Arc<MemberRecord>> =
            members.map(|record| (record.member.peer, Arc::clone(record))).collect();
        let gone = history.lives.iter().filter(|(peer, _)| !members.contains_key(peer));
        let expelled = gone.map(|(peer, life)| (*peer, *life)).collect();
        let position = (history.era, history.version);
        let (number, unlogged) = (history.view.number, Unlogged::default());
        let draining = BTreeSet::new();
        let mut membership =
            Self { stages, members, expelled, draining, number, unlogged, position };
        let _ = membership.set_position(history.era, history.version);
        membership
    }

    /// The run has reached a version, or gone back to one: members that were to change over by then have done so,
    /// and members that were not ready for it in an earlier era stay. Returns the members that begin to swap their stages
    /// or have ended that.
    pub(crate) fn set_position(&mut self, era: Era, version: Step) -> Vec<Member> {
        self.position = (era, version);
        let mut others = Vec::new();
        for (peer, known) in &mut self.members {
            let Some(moves) = known.moves else { continue };
            let span = known.span_at(era, version);
            if span != known.span || moves.era < era {
                let record = Arc::make_mut(known);
                let swaps = [record.span, span].map(|span| record.swaps(span));
                others.extend((swaps[0] != swaps[1]).then_some(record.member));
                (record.span, record.moves) = (span, None);
                self.unlogged.here.insert(*peer);
            }
        }
        others
    }

    /// The version that the run has reached.
    pub(crate) fn version(&self) -> Step {
        self.position.1
    }

    /// Whether two members compute the same bits.
    pub(crate) fn are_like(&self, one: Member, other: Member) -> bool {
        let [one, other] = [one, other].map(|member| self.record(member)?.fingerprint);
        one.is_some() && one == other
    }

    /// Forgets that any incarnation of a peer was expelled.
    #[cfg(test)]
    pub(crate) fn forget_expelled(&mut self, peer: PeerId) {
        self.expelled.remove(&peer);
    }

    /// Admits a peer, with the stages that its candidature and the estimated throughput of the stages give, in a run
    /// that waits for so many members.
    ///
    /// # Errors
    /// The reason why it is not admitted.
    pub(crate) fn admit(
        &mut self,
        member: Member,
        candidate: Candidate,
        (serving, wait_for): (bool, usize),
        estimates: &Estimates<'_>,
        (link_estimates, load): (&LinkEstimates, &Load),
    ) -> Result<Admission, AdmissionError> {
        let Candidate { choice, fits, addresses, fingerprint, duties, devices, .. } = candidate;
        let Candidate { devices_per_pass, room, longest, price, island, name, .. } = candidate;
        let mut replaced = None;
        if let Some(known) = self.members.get(&member.peer) {
            let MemberRecord { member: life, span, .. } = **known;
            if life == member {
                return Ok(Admission { span, again: true, replaced, unlike: false });
            }
            if life > member {
                return Err(AdmissionError::OldLife);
            }
            replaced = Some(Arc::clone(known));
        } else if self.expelled.get(&member.peer).is_some_and(|last| member.incarnation <= *last) {
            return Err(AdmissionError::Expelled);
        } else if self.members.len() >= limits::MEMBERS {
            return Err(AdmissionError::Full);
        }
        if addresses.len() > limits::MEMBER_ADDRESSES {
            return Err(AdmissionError::TooManyAddresses { count: addresses.len() });
        }
        let others = |peer: &PeerId| *peer != member.peer;
        let throughput = self.throughput_among(others, estimates);
        let locality = || self.locality(link_estimates, load);
        let hosts = self.records().filter(|record| !record.span.is_empty());
        let present = hosts.filter(|record| others(&record.member.peer)).count();
        let offer = Offer {
            newcomer: member.peer,
            choice,
            fits: &fits,
            longest: room.in_memory.min(longest),
            to_come: wait_for.saturating_sub(present).max(1),
        };
        let span = place(&offer, self.stages, &throughput, locality)?;
        let unlike = self
            .members
            .iter()
            .filter(|(peer, _)| others(peer))
            .find_map(|(_, other)| other.fingerprint)
            .is_some_and(|other| fingerprint.is_some_and(|own| own != other));
        // A member without a stage has nothing to fetch.
        let serving = serving || span.is_empty();
        let moves = None;
        let record = Arc::new(MemberRecord {
            member,
            span,
            addresses,
            serving,
            duties,
            devices,
            devices_per_pass,
            room,
            longest,
            price,
            island,
            name,
            fingerprint,
            moves,
        });
        self.members.insert(member.peer, record);
        self.unlogged.here.insert(member.peer);
        Ok(Admission { span, again: false, replaced, unlike })
    }

    /// The members to which a newcomer is to measure its round-trip times before it is assigned a stage. Empty if
    /// locality does not decide: it has no choice of stages, or is a member.
    pub(crate) fn probe_targets(
        &self,
        newcomer: PeerId,
        candidate: &Candidate,
        estimates: &Estimates<'_>,
    ) -> Vec<(PeerId, Vec<SocketAddr>)> {
        let others = |peer: &PeerId| *peer != newcomer;
        let choice = candidate.choice == StageChoice::Auto && self.members.len() > 1;
        if !choice {
            return Vec::new();
        }
        let throughput = self.throughput_among(others, estimates);
        if throughput.neediest(&candidate.fits, newcomer).len() < 2 {
            return Vec::new();
        }
        let seed = number_of(newcomer);
        let hosts = self.records().filter(|record| !record.span.is_empty());
        let mut all: Vec<(u64, &MemberRecord)> = hosts
            .filter(|record| others(&record.member.peer))
            .map(|record| (mixed(seed, number_of(record.member.peer)), record))
            .collect();
        if all.len() > limits::PROBED_MEMBERS {
            all.select_nth_unstable_by_key(limits::PROBED_MEMBERS, |(order, _)| *order);
            all.truncate(limits::PROBED_MEMBERS);
        }
        let place =
            |(_, record): (u64, &MemberRecord)| (record.member.peer, record.addresses.clone());
        all.into_iter().map(place).collect()
    }

    /// The locality of peers: their cost at each stage.
    pub(crate) fn locality<'a>(
        &self,
        link_estimates: &'a LinkEstimates,
        load: &'a Load,
    ) -> Locality<'a> {
        let hosts = self.records().flat_map(|record| {
            record.destination().stages().map(|stage| (record.member.peer, stage))
        });
        Locality::new(link_estimates, load, hosts, self.number)
    }

    /// Removes a member. Returns its record, if it was one.
    pub(crate) fn expel(&mut self, member: Member) -> Option<Arc<MemberRecord>> {
        if !self.contains(member) {
            return None;
        }
        self.unlogged.here.remove(&member.peer);
        self.unlogged.gone.insert(member);
        self.expelled.insert(member.peer, member.incarnation);
        self.members.remove(&member.peer)
    }

    /// The record of a member.
    pub(crate) fn record(&self, member: Member) -> Option<&MemberRecord> {
        let known = self.members.get(&member.peer).map(AsRef::as_ref);
        known.filter(|record| record.member == member)
    }

    fn record_mut(&mut self, member: Member) -> Option<&mut MemberRecord> {
        let known = self.members.get_mut(&member.peer)?;
        if known.member != member {
            return None;
        }
        self.unlogged.here.insert(member.peer);
        Some(Arc::make_mut(known))
    }

    /// The stages that a member hosts.
    pub(crate) fn span_of(&self, member: Member) -> Option<StageSpan> {
        self.record(member).map(|record| record.span)
    }

    /// Whether a member hosts a stage in a step.
    pub(crate) fn hosts(&self, member: Member, stage: Stage, step: Step) -> bool {
        self.record(member).is_some_and(|record| record.hosts(stage, self.position.0, step))
    }

    /// Whether a member receives the results of a step's rounds at a stage without hosting it.
    pub(crate) fn listens(&self, member: Member, stage: Stage, step: Step) -> bool {
        self.record(member).is_some_and(|record| record.listens(stage, self.position.0, step))
    }

    /// A newcomer has its weights and serves. Returns whether that is new.
    pub(crate) fn begin_serving(&mut self, member: Member) -> bool {
        let serves = self.record(member).is_none_or(|record| record.serving);
        if !serves && let Some(record) = self.record_mut(member) {
            record.serving = true;
        }
        !serves
    }

    /// All members lose their weights.
    pub(crate) fn stop_serving(&mut self) {
        self.unlogged.stops = true;
        for known in self.members.values_mut().filter(|known| known.serving) {
            Arc::make_mut(known).serving = false;
        }
    }

    pub(crate) fn is_serving(&self, member: Member) -> bool {
        self.record(member).is_some_and(|record| record.serving)
    }

    /// The number of a member's devices; one of a member that is gone.
    pub(crate) fn devices_of(&self, member: Member) -> NonZeroU16 {
        self.record(member).map_or(NonZeroU16::MIN, |record| record.devices)
    }

    pub(crate) fn contains(&self, member: Member) -> bool {
        self.record(member).is_some()
    }

    /// The migration for which a member fetches other stages.
    pub(crate) fn migration_of(&self, member: Member) -> Option<Move> {
        self.record(member)?.moves.filter(|moves| moves.at.is_none())
    }

    /// Whether a member is about to leave a stage, or has just left it, for others.
    pub(crate) fn is_leaving(&self, member: Member, stage: Stage) -> bool {
        self.record(member).is_some_and(|record| record.leaves(stage))
    }

    /// The stages that each member hosts in the next era.
    fn next_spans(&self) -> BTreeMap<Member, StageSpan> {
        let next = |record: &MemberRecord| record.span_at(self.position.0.next(), Step(0));
        self.records().map(|record| (record.member, next(record))).collect()
    }

    /// The spans of the next era, in which members that may move host stages that otherwise nobody would. If `extends`,
    /// members also get longer spans.
    fn covering_spans(&self, extends: bool) -> BTreeMap<Member, StageSpan> {
        let movable = |record: &&MemberRecord| !self.is_draining(record.member);
        let movable: Vec<&MemberRecord> = self.records().filter(movable).collect();
        let mut spans = self.next_spans();
        era_spans::move_spare(&mut spans, self.stages, &movable);
        if extends {
            era_spans::extend(&mut spans, self.stages, &movable);
        }
        spans
    }

    /// Whether a stage has no host, with or without its weights, that will stay.
    pub(crate) fn lacks_hosts(&self) -> bool {
        let stays =
            |record: &MemberRecord, stage| record.span.contains(stage) && !record.leaves(stage);
        let hosted = |stage: Stage| self.records().any(|record| stays(record, stage));
        !(0..self.stages).map(Stage).all(hosted)
    }

    /// Whether more stages would be hosted in a new era than in this one. If `extends`, members may get longer spans.
    pub(crate) fn can_cover_more(&self, extends: bool) -> bool {
        self.lacks_hosts()
            && (self.records().any(MemberRecord::changes_over)
                || self.covering_spans(extends) != self.next_spans())
    }

    /// Assigns the stages that no member would host in the next era to members that may move; if `extends`, by longer
    /// spans too. Returns the members with other spans.
    pub(crate) fn cover_all_stages(&mut self, extends: bool) -> Vec<(Member, StageSpan)> {
        let before = self.next_spans();
        let spans = self.covering_spans(extends).into_iter();
        let movers: Vec<_> = spans.filter(|(member, span)| before[member] != *span).collect();
        let (era, at, reason) = (self.position.0, Some(Step(0)), MoveReason::StageLost);
        for (member, to) in movers.iter().copied() {
            let record = self.record_mut(member).expect("it was just listed");
            record.moves = Some(Move { to, era, at, reason });
        }
        movers
    }

    /// A member begins to fetch what it lacks of another span.
    ///
    /// # Panics
    /// If it is not a member, or is migrating already.
    pub(crate) fn begin_migration(&mut self, member: Member, to: StageSpan, reason: MoveReason) {
        let era = self.position.0;
        let record = self.record_mut(member).expect("members move");
        let before = record.moves.replace(Move { to, era, at: None, reason });
        assert_eq!(before, None, "one move at a time");
    }

    /// A member has the weights that it fetched, and changes over at a step.
    ///
    /// # Panics
    /// If it is not migrating.
    pub(crate) fn end_migration(&mut self, member: Member, at: Step) {
        let moves = self.record_mut(member).and_then(|record| record.moves.as_mut());
        moves.expect("only migrating members change over").at = Some(at);
    }

    /// A member stays at its stages.
    pub(crate) fn cancel_migration(&mut self, member: Member) {
        if let Some(record) = self.record_mut(member) {
            record.moves = None;
        }
    }

    /// Whether members serve a stage, and still will when all that are to leave it have left.
    fn covers(&self, stage: Stage) -> bool {
        self.staying(stage).next().is_some()
    }

    /// The members that serve a stage and are not about to migrate, in order.
    pub(crate) fn staying(&self, stage: Stage) -> impl Iterator<Item = Member> + '_ {
        let stays =
            move |member: &Member| self.record(*member).is_some_and(|record| !record.leaves(stage));
        self.replicas(stage).filter(stays)
    }

    /// A member is about to leave. Returns whether that is new.
    pub(crate) fn begin_drain(&mut self, member: Member) -> bool {
        self.contains(member) && self.draining.insert(member)
    }

    /// Whether a member is about to leave.
    pub(crate) fn is_draining(&self, member: Member) -> bool {
        self.draining.contains(&member)
    }

    /// A member is gone. Returns whether it was known to be about to leave.
    pub(crate) fn end_drain(&mut self, gone: Member) -> bool {
        self.draining.remove(&gone)
    }

    /// The number of members that serve each stage and are not about to migrate or leave.
    pub(crate) fn staying_counts(&self) -> BTreeMap<Stage, usize> {
        let mut count = BTreeMap::new();
        let serving = self.records().filter(|record| record.serving);
        for record in serving.filter(|record| !self.is_draining(record.member)) {
            for stage in record.span.stages().filter(|stage| !record.leaves(*stage)) {
                *count.entry(stage).or_insert(0) += 1;
            }
        }
        count
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.records().map(|record| record.member)
    }

    /// The records of all members, in order.
    pub(crate) fn records(&self) -> impl Iterator<Item = &MemberRecord> + '_ {
        self.members.values().map(|known| known.as_ref())
    }

    /// The incarnation of a peer that is a member.
    pub(crate) fn member_of(&self, peer: PeerId) -> Option<Member> {
        self.members.get(&peer).map(|known| known.member)
    }

    /// The members with a duty besides hosting stages, in order.
    pub(crate) fn with_duty(&self, duty: fn(Duties) -> bool) -> impl Iterator<Item = Member> + '_ {
        self.records().filter(move |record| duty(record.duties)).map(|record| record.member)
    }

    /// The members that serve a stage, in order.
    pub(crate) fn replicas(&self, stage: Stage) -> impl Iterator<Item = Member> + '_ {
        let (era, step) = self.position;
        let hosts = move |record: &&MemberRecord| record.hosts(stage, era, step);
        self.records().filter(hosts).map(|record| record.member)
    }

    /// The stages without a replica.
    pub(crate) fn uncovered(&self) -> Vec<Stage> {
        (0..self.stages).map(Stage).filter(|stage| !self.covers(*stage)).collect()
    }

    /// The changes since the last membership, under the next number: for as many members as one record of the log
    /// may have, those that are gone first.
    pub(crate) fn next_change(&mut self) -> ViewChange {
        let since = self.number;
        self.number += 1;
        let Self { members, unlogged, number, .. } = self;
        let mut room = CHANGED;
        let gone = take_first(&mut unlogged.gone, &mut room);
        let here = take_first(&mut unlogged.here, &mut room);
        let here = here.iter().filter_map(|peer| members.get(peer));
        let here = here.map(Arc::clone).collect();
        let stops = std::mem::take(&mut unlogged.stops);
        ViewChange { since, number: *number, stops, gone, here }
    }

    /// Whether there are changes since the last membership that was given to the log.
    pub(crate) fn has_unlogged_changes(&self) -> bool {
        self.unlogged.stops || !self.unlogged.gone.is_empty() || !self.unlogged.here.is_empty()
    }

    /// The throughput of the stages with all members that host them and stay, or migrate to them.
    fn throughput_among(
        &self,
        counts: impl Fn(&PeerId) -> bool,
        estimates: &Estimates<'_>,
    ) -> StageThroughputs {
        let hosts = self.records().filter(|record| counts(&record.member.peer));
        let hosts = hosts.filter(|record| !self.is_draining(record.member));
        let hosts = hosts.map(|record| (record.member, record.destination()));
        StageThroughputs::of(self.stages, hosts, estimates)
    }
}

/// A number that a peer's id gives.
fn number_of(peer: PeerId) -> u64 {
    u64::from_le_bytes(*peer.0.first_chunk().expect("a peer id has 32 bytes"))
}

/// Removes the first elements of a set, as many as there is room for.
fn take_first<T: Ord>(all: &mut BTreeSet<T>, room: &mut usize) -> BTreeSet<T> {
    let mut taken = BTreeSet::new();
    while *room > 0
        && let Some(first) = all.pop_first()
    {
        taken.insert(first);
        *room -= 1;
    }
    taken
}

#[cfg(test)]
mod tests {
    use shoal_protocol::message::{StageRoom, View};

    use super::*;

    fn record(number: u8, stage: u16, moves_to: Option<u16>) -> Arc<MemberRecord> {
        let (era, at) = (Era(0), Some(Step(1)));
        let reason = MoveReason::Uneven;
        Arc::new(MemberRecord {
            room: StageRoom::in_memory(2),
            moves: moves_to.map(|to| Move { to: StageSpan::one(Stage(to)), era, at, reason }),
            ..MemberRecord::plain(
                Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) },
                StageSpan::one(Stage(stage)),
            )
        })
    }

    fn membership(members: Vec<Arc<MemberRecord>>) -> Membership {
        let view = View { number: 1, members };
        Membership::of(2, &History { view, ..History::default() })
    }

    /// The last replica of a stage is about to migrate, and its successor has not arrived: a coordinator that takes
    /// over at that time must not wait for another member to join.
    #[test]
    fn a_new_era_gives_a_stage_to_the_member_that_migrates_to_it() {
        let left =
            membership(vec![record(1, 0, None), record(2, 0, Some(1)), record(3, 1, Some(0))]);
        assert_eq!(left.uncovered(), [Stage(1)]);
        assert!(left.can_cover_more(false));
        let whole = membership(vec![record(1, 0, None), record(2, 1, None), record(3, 1, Some(0))]);
        assert_eq!(whole.uncovered(), []);
        assert!(!whole.can_cover_more(false));
    }
}
