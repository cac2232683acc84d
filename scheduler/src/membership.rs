//! Who is a member, and what it hosts.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use shoal_protocol::history::History;
use shoal_protocol::ids::{ContentHash, Incarnation, Member, PeerId, Stage, StageSpan};
use shoal_protocol::limits;
use shoal_protocol::message::{Candidate, Duties, MemberRecord, View};

use crate::capacity::{Capacity, Estimates};
use crate::placement::{PlacementError, place};

/// Addresses that one member may announce: a view of all members stays under the cap of a control
/// message.
const ADDRESSES: usize = 8;

/// Who is a member. The coordinator decides it, the log makes it last.
#[derive(Debug)]
pub(crate) struct Membership {
    stages: u16,
    members: BTreeMap<PeerId, Registered>,
    /// The newest life of each peer that was expelled: it never comes back, and none before it.
    expelled: BTreeMap<PeerId, Incarnation>,
    number: u64,
}

#[derive(Debug)]
struct Registered {
    incarnation: Incarnation,
    span: StageSpan,
    addresses: Vec<SocketAddr>,
    /// None where an earlier coordinator admitted it.
    fingerprint: Option<ContentHash>,
    serving: bool,
    duties: Duties,
}

/// What an admission did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// The stages of the member.
    pub(crate) span: StageSpan,
    /// It was a member already.
    pub(crate) again: bool,
    /// An earlier life that it replaces, and what that hosted.
    pub(crate) replaced: Option<(Member, StageSpan)>,
    /// Its known answers are not those of the others.
    pub(crate) unlike: bool,
}

/// Why somebody is not admitted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdmissionError {
    #[error("a newer life of this peer is a member: stop the other process, or this one")]
    OldLife,
    #[error("this life of the peer was expelled: come back as a new one")]
    Expelled,
    #[error("the run has its {} members: wait until one leaves", limits::MEMBERS)]
    Full,
    #[error("{count} addresses are announced: at most {ADDRESSES} can be")]
    TooManyAddresses { count: usize },
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl Membership {
    /// Who is a member as the log has it.
    pub(crate) fn of(stages: u16, history: &History) -> Self {
        let registered = |record: &MemberRecord| Registered {
            incarnation: record.member.incarnation,
            span: record.span,
            addresses: record.addresses.clone(),
            fingerprint: None,
            serving: record.serving,
            duties: record.duties,
        };
        let members = history.view.members.iter();
        let members: BTreeMap<PeerId, Registered> =
            members.map(|record| (record.member.peer, registered(record))).collect();
        let gone = history.lives.iter().filter(|(peer, _)| !members.contains_key(peer));
        let expelled = gone.map(|(peer, life)| (*peer, *life)).collect();
        Self { stages, members, expelled, number: history.view.number }
    }

    /// Forgets that any life of a peer was expelled.
    #[cfg(test)]
    pub(crate) fn forget_expelled(&mut self, peer: PeerId) {
        self.expelled.remove(&peer);
    }

    /// Takes in a newcomer; says so again to who is a member already. What stages get through is as
    /// it is estimated.
    pub(crate) fn admit(
        &mut self,
        member: Member,
        candidate: Candidate,
        serving: bool,
        estimates: &Estimates<'_>,
    ) -> Result<Admission, AdmissionError> {
        let Candidate { choice, fits, addresses, fingerprint, duties } = candidate;
        let mut replaced = None;
        if let Some(known) = self.members.get(&member.peer) {
            if known.incarnation == member.incarnation {
                let span = known.span;
                return Ok(Admission { span, again: true, replaced, unlike: false });
            }
            if known.incarnation > member.incarnation {
                return Err(AdmissionError::OldLife);
            }
            replaced = Some((Member { incarnation: known.incarnation, ..member }, known.span));
        } else if self.expelled.get(&member.peer).is_some_and(|last| member.incarnation <= *last) {
            return Err(AdmissionError::Expelled);
        } else if self.members.len() >= limits::MEMBERS {
            return Err(AdmissionError::Full);
        }
        if addresses.len() > ADDRESSES {
            return Err(AdmissionError::TooManyAddresses { count: addresses.len() });
        }
        let others = |peer: &PeerId| *peer != member.peer;
        let capacity = self.capacity_among(others, estimates);
        let span = place(member.peer, choice, self.stages, &fits, &capacity)?;
        let unlike = self
            .members
            .iter()
            .filter(|(peer, _)| others(peer))
            .find_map(|(_, other)| other.fingerprint)
            .is_some_and(|other| fingerprint.is_some_and(|own| own != other));
        let incarnation = member.incarnation;
        // Who hosts nothing has nothing to catch up with.
        let serving = serving || span.is_empty();
        let registered = Registered { incarnation, span, addresses, fingerprint, serving, duties };
        self.members.insert(member.peer, registered);
        Ok(Admission { span, again: false, replaced, unlike })
    }

    /// Takes out a member, whose life is over.
    pub(crate) fn expel(&mut self, member: Member) {
        if self.contains(member) {
            self.members.remove(&member.peer);
            self.expelled.insert(member.peer, member.incarnation);
        }
    }

    /// What a member hosts; none of who is no member.
    pub(crate) fn span_of(&self, member: Member) -> Option<StageSpan> {
        self.members
            .get(&member.peer)
            .filter(|known| known.incarnation == member.incarnation)
            .map(|known| known.span)
    }

    /// A newcomer has its weights; returns whether that is new.
    pub(crate) fn serves(&mut self, member: Member) -> bool {
        self.members
            .get_mut(&member.peer)
            .filter(|known| known.incarnation == member.incarnation)
            .is_some_and(|known| !std::mem::replace(&mut known.serving, true))
    }

    /// Nobody has its weights any more.
    pub(crate) fn stop_serving(&mut self) {
        self.members.values_mut().for_each(|known| known.serving = false);
    }

    pub(crate) fn is_serving(&self, member: Member) -> bool {
        self.contains(member) && self.members[&member.peer].serving
    }

    pub(crate) fn contains(&self, member: Member) -> bool {
        self.span_of(member).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.members.iter().map(|(peer, known)| known.as_member(*peer))
    }

    /// The life of a peer that is a member now.
    pub(crate) fn life_of(&self, peer: PeerId) -> Option<Member> {
        self.members.get(&peer).map(|known| known.as_member(peer))
    }

    /// The members that would do something besides hosting stages, in order.
    pub(crate) fn with_duty(&self, duty: fn(Duties) -> bool) -> impl Iterator<Item = Member> + '_ {
        let able = self.members.iter().filter(move |(_, known)| duty(known.duties));
        able.map(|(peer, known)| known.as_member(*peer))
    }

    /// The members that serve a stage, in order.
    pub(crate) fn replicas(&self, stage: Stage) -> impl Iterator<Item = Member> + '_ {
        self.members
            .iter()
            .filter(move |(_, known)| known.serving && known.span.contains(stage))
            .map(|(peer, known)| known.as_member(*peer))
    }

    /// The stages that nobody serves.
    pub(crate) fn uncovered(&self) -> Vec<Stage> {
        (0..self.stages).map(Stage).filter(|stage| self.replicas(*stage).next().is_none()).collect()
    }

    /// Who is a member, under the next number.
    pub(crate) fn next_view(&mut self) -> View {
        self.number += 1;
        let record = |(peer, known): (&PeerId, &Registered)| MemberRecord {
            member: known.as_member(*peer),
            span: known.span,
            addresses: known.addresses.clone(),
            serving: known.serving,
            duties: known.duties,
        };
        View { number: self.number, members: self.members.iter().map(record).collect() }
    }

    /// What the stages get through with all those who host them, and those who are on their way.
    fn capacity_among(
        &self,
        counts: impl Fn(&PeerId) -> bool,
        estimates: &Estimates<'_>,
    ) -> Capacity {
        let hosts = self.members.iter().filter(|(peer, _)| counts(peer));
        let hosts = hosts.map(|(peer, known)| (known.as_member(*peer), known.span));
        Capacity::of(self.stages, hosts, estimates)
    }
}

impl Registered {
    fn as_member(&self, peer: PeerId) -> Member {
        Member { peer, incarnation: self.incarnation }
    }
}
