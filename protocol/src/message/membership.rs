//! Who takes part in a run, and who would.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::ids::{ContentHash, Era, Member, Stage, StageSpan, Step};

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
}

/// Who is a member.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct View {
    /// Grows with every change.
    pub number: u64,
    /// In order of members: they are looked up by it.
    pub members: Vec<MemberRecord>,
}

impl View {
    /// What is known of a member; none of who is no member.
    #[must_use]
    pub fn record(&self, member: Member) -> Option<&MemberRecord> {
        let place = self.members.binary_search_by_key(&member, |record| record.member);
        self.members.get(place.ok()?)
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
    /// Whether it may be given another stage.
    pub mobile: bool,
    /// Its way to another stage, while it is on one.
    pub moves: Option<Move>,
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
