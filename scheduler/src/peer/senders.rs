//! What the sender of a message is to this peer.
//!
//! A message counts for who sent it, not because it arrived. Each kind of sender is a type that only its check
//! in this file makes, and a handler takes the kind that it needs: code that does not ask does not compile.
//!
//! | kind | who it is |
//! |---|---|
//! | [`Listed`] | a member of the view |
//! | [`Host`] | a member that hosts a stage, or is on its way there |
//! | [`Feeder`] | a member whose offer of a microbatch this peer has taken |
//! | [`Asked`] | a member that this peer has offered or sent a microbatch to |
//! | [`Keeper`] | a member that this peer has asked for an input of work that it audits |

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Member, Stage};
use shoal_protocol::message::{InputId, MemberRecord, View};

/// A member of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Listed(Member);

impl Listed {
    pub(super) fn of(view: &View, from: Member) -> Option<Self> {
        view.lists(from).then_some(Self(from))
    }

    pub(super) fn member(self) -> Member {
        self.0
    }
}

/// A member that hosts one of some stages, or is on its way there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Host(Member);

impl Host {
    pub(super) fn of(
        view: &View,
        from: Member,
        stages: impl IntoIterator<Item = Stage>,
    ) -> Option<Self> {
        let record = view.record(from)?;
        stages.into_iter().any(|stage| may_host(record, stage)).then_some(Self(from))
    }

    pub(super) fn member(self) -> Member {
        self.0
    }
}

/// Whether a member hosts a stage, or is on its way there.
fn may_host(record: &MemberRecord, stage: Stage) -> bool {
    record.span.contains(stage) || record.destination().contains(stage)
}

/// A member whose offer of this microbatch was taken: it sends the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Feeder {
    member: Member,
    key: ClaimKey,
}

impl Feeder {
    /// `senders` are the members whose offers of the microbatch were taken.
    pub(super) fn of(senders: &[Member], from: Listed, key: ClaimKey) -> Option<Self> {
        let member = from.member();
        senders.contains(&member).then_some(Self { member, key })
    }

    pub(super) fn member(self) -> Member {
        self.member
    }

    /// The microbatch at this peer's stage.
    pub(super) fn key(self) -> ClaimKey {
        self.key
    }
}

/// A member that this microbatch's activation was offered or sent to: it sends the answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    member: Member,
    key: ClaimKey,
}

impl Asked {
    /// `asked` are the members that the microbatch was offered or sent to.
    pub(super) fn of(asked: &BTreeSet<Member>, from: Listed, key: ClaimKey) -> Option<Self> {
        let member = from.member();
        asked.contains(&member).then_some(Self { member, key })
    }

    pub(super) fn member(self) -> Member {
        self.member
    }

    /// The microbatch at this peer's stage, not at the next one.
    pub(super) fn key(self) -> ClaimKey {
        self.key
    }
}

/// A member that this peer has asked for an input of work that it audits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keeper(InputId);

impl Keeper {
    /// `asked` is the member that was asked for this input.
    pub(super) fn of(asked: Member, from: Listed, input: InputId) -> Option<Self> {
        (from.member() == asked).then_some(Self(input))
    }

    /// The input of the audited work.
    pub(super) fn input(self) -> InputId {
        self.0
    }
}
