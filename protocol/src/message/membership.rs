//! Who takes part in a run, and who would.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::ids::{ContentHash, Member, Stage, StageSpan};

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
}

/// Who is a member.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct View {
    /// Grows with every change.
    pub number: u64,
    /// In order of members.
    pub members: Vec<MemberRecord>,
}

impl View {
    /// What is known of a member; none of who is no member.
    #[must_use]
    pub fn record(&self, member: Member) -> Option<&MemberRecord> {
        self.members.iter().find(|record| record.member == member)
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
}
