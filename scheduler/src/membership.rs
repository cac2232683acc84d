//! Who is a member, and what it hosts.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use shoal_protocol::ids::{ContentHash, Incarnation, Member, PeerId, Stage, StageSpan};
use shoal_protocol::limits;
use shoal_protocol::message::{MemberRecord, StageChoice, View};

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
    fingerprint: ContentHash,
    serving: bool,
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
    pub(crate) fn new(stages: u16) -> Self {
        Self { stages, members: BTreeMap::new(), expelled: BTreeMap::new(), number: 0 }
    }

    /// Takes in a newcomer; says so again to who is a member already.
    pub(crate) fn admit(
        &mut self,
        member: Member,
        choice: StageChoice,
        addresses: Vec<SocketAddr>,
        fingerprint: ContentHash,
        serving: bool,
    ) -> Result<Admission, AdmissionError> {
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
        let span = place(choice, self.stages, &self.replicas_among(others))?;
        let unlike = self
            .members
            .iter()
            .find(|(peer, _)| others(peer))
            .is_some_and(|(_, other)| other.fingerprint != fingerprint);
        let incarnation = member.incarnation;
        let registered = Registered { incarnation, span, addresses, fingerprint, serving };
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
        };
        View { number: self.number, members: self.members.iter().map(record).collect() }
    }

    fn replicas_among(&self, counts: impl Fn(&PeerId) -> bool) -> BTreeMap<Stage, usize> {
        let mut replicas = BTreeMap::new();
        for (_, known) in self.members.iter().filter(|(peer, _)| counts(peer)) {
            for stage in known.span.stages() {
                *replicas.entry(stage).or_insert(0) += 1;
            }
        }
        replicas
    }
}

impl Registered {
    fn as_member(&self, peer: PeerId) -> Member {
        Member { peer, incarnation: self.incarnation }
    }
}
