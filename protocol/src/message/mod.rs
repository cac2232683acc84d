//! What is said: control messages between peers and the coordinator, and the tags that say what a
//! tensor on its way is.
//!
//! Every control message travels in an [`Envelope`] that names both ends' incarnations, the era and
//! the term, so that a word from or to an earlier life is recognised. Nothing here assumes
//! that it arrives once: each message states something that may be stated again.

mod log;
mod membership;
mod peer;
mod round;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use self::log::{CommitRecord, LogRecord, SnapshotPart, StoredFile, StoredStage};
pub use self::membership::{
    Candidate, Duties, MemberRecord, Move, MoveReason, StageChoice, View, ViewChange, is_stopped,
};
pub use self::peer::{PeerMessage, TensorTag};
pub use self::round::{
    Mended, Round, RoundGroup, RoundGroupChange, RoundGroupMember, RoundId, RoundMember,
    RoundOutcome, proof_of_all, proof_tag,
};

use crate::ids::{
    ClaimKey, Era, Grant, Incarnation, Member, Mend, Microbatch, PeerId, Stage, StageSpan, Step,
    Term,
};
use crate::units::Rate;

/// A control message and the lives it is between.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Envelope {
    /// The sender's life.
    pub from: Incarnation,
    /// The life that is meant.
    pub to: Incarnation,
    /// The era the sender is in.
    pub era: Era,
    /// The coordinator's term that the sender obeys.
    pub term: Term,
    /// What is said.
    pub message: Message,
}

/// Everything said on a control stream.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Message {
    /// A member, or who wants to be one, to the coordinator.
    ToCoordinator(ToCoordinator),
    /// The coordinator to a member.
    FromCoordinator(FromCoordinator),
    /// A member to a member.
    PeerMessage(PeerMessage),
    /// An anchor to an anchor, about the run's log.
    Anchor(AnchorMessage),
    /// Who is banned and who is let in by name, as the run's warden signed it. Whoever did not know it
    /// passes it on.
    AccessList {
        /// The encoded statement and its signature.
        signed: Vec<u8>,
    },
    /// Somebody, who need not be a member, wants the newest checkpoint.
    CheckpointRequest,
    /// Where the newest checkpoint is, as far as the sender knows.
    Checkpoint {
        /// None where there is none yet.
        newest: Option<SavedCheckpoint>,
    },
    /// Who keeps the run, to somebody who asked another.
    CoordinatorMoved {
        /// Who.
        coordinator: Member,
        /// Where its data plane listens.
        addresses: Vec<SocketAddr>,
    },
}

/// A complete checkpoint and where it is.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SavedCheckpoint {
    /// The version of the weights.
    pub version: Step,
    /// Each stage, in order.
    pub stages: Vec<StoredStage>,
    /// Where the data planes of those who have it listen.
    pub holders: Vec<(PeerId, Vec<SocketAddr>)>,
}

/// A request of an anchor to another, or the answer to one.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AnchorMessage {
    /// Which request, counted by who asks.
    pub number: u64,
    /// Whether it is the answer.
    pub answer: bool,
    /// What the log's own protocol says.
    pub body: Vec<u8>,
}

/// A claim as its holder knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HeldClaim {
    /// The work.
    pub key: ClaimKey,
    /// The grant that it holds it under.
    pub grant: Grant,
    /// Whether it is in its accumulator (or, held out, evaluated).
    pub done: bool,
    /// The mean loss per token, from the last stage, once it is done.
    pub loss: Option<FixedLoss>,
}

/// What a peer measured of its link to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LinkEstimate {
    /// The shortest.
    pub round_trip: Duration,
    /// What it carries there, where that was measured.
    pub rate: Option<Rate>,
}

/// How long the passes of a microbatch took at one stage, each from when the engine could have begun
/// it: everything that it needs was there, and the pass before it had ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct PassTimes {
    /// The forward pass.
    pub forward: Duration,
    /// The backward pass; zero of what is held out.
    pub backward: Duration,
}

/// The loss of one microbatch, or a sum of them, in units of 2^-32 nats per token: integers, so that
/// a sum is the same in any order.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, bincode::Encode, bincode::Decode,
)]
pub struct FixedLoss(pub i64);

impl FixedLoss {
    const UNIT: f64 = (1u64 << 32) as f64;

    /// Rounds a mean loss per token; saturates far outside of what a loss can be.
    #[must_use]
    pub fn from_nats(loss: f64) -> Self {
        Self((loss * Self::UNIT).round_ties_even().clamp(-1e15, 1e15) as i64)
    }

    /// The mean of `count` losses that were summed into this one; zero of none.
    #[must_use]
    pub fn mean(self, count: u32) -> f64 {
        if count == 0 { 0.0 } else { self.0 as f64 / Self::UNIT / f64::from(count) }
    }
}

impl std::iter::Sum for FixedLoss {
    /// # Panics
    /// When the sum leaves the range, which 2^16 microbatches cannot do.
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        Self(losses.fold(0i64, |sum, loss| sum.checked_add(loss.0).expect("losses are clamped")))
    }
}

/// A member, or who wants to be one, to the coordinator.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum ToCoordinator {
    /// Asks to be admitted.
    Register(Candidate),
    /// The answer to a census: what the sender holds. Its last part ends the answer.
    Held {
        /// Claims of steps that it has not seen the commit of.
        claims: Vec<HeldClaim>,
        /// Which part this is: the first one begins the answer anew.
        part: u32,
        /// Whether there are no more.
        last: bool,
    },
    /// The sender, which archives, has a complete checkpoint as a whole.
    Archived {
        /// The version of the weights.
        version: Step,
    },
    /// The sender keeps a stage of a checkpoint that it does not host, or could not get it.
    Kept {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether it has all its files.
        whole: bool,
    },
    /// A replica of the first stage has room for microbatches beyond the grants numbered up to
    /// `through`.
    WorkRequest {
        /// Of which steps, and how many of each.
        rooms: Vec<(Step, u32)>,
        /// The newest grant it has seen.
        through: Grant,
        /// Nanoseconds that it needs for one microbatch, as in `Accepted`.
        service_time: u64,
    },
    /// Asks for the claim of a microbatch that was accepted.
    Claim {
        /// The work.
        key: ClaimKey,
    },
    /// The work is in the sender's accumulator (or, held out, evaluated). Repeated until answered.
    Done {
        /// The work.
        key: ClaimKey,
        /// The grant it was done under.
        grant: Grant,
        /// The mean loss per token, from the last stage.
        loss: Option<FixedLoss>,
        /// How long it took.
        pass_times: PassTimes,
    },
    /// The answer to a recall: the work is not late, since something that it needs is not there or
    /// came only now, or since it is done and that is on its way.
    Working {
        /// The work.
        key: ClaimKey,
        /// The grant.
        grant: Grant,
    },
    /// The sender holds the result of a round.
    Reduced {
        /// Which.
        round: RoundId,
        /// As it was then.
        mend: Mend,
        /// What came out.
        outcome: RoundOutcome,
        /// What its links to members of the round carry, by their places, as far as it was measured.
        rates: Vec<(u16, Rate)>,
    },
    /// The sender does not know whom a round is among: it wants all of them.
    RoundGroupRequest {
        /// Which round.
        round: RoundId,
    },
    /// The sender does not take a round's result.
    RoundRefused {
        /// Which.
        round: RoundId,
        /// Why not, in words.
        reason: String,
    },
    /// The weights or gradients left the numbers that a run can go on with: a verdict on the run.
    Diverged {
        /// Where.
        key: ClaimKey,
        /// Which tensor and what about it, in words.
        reason: String,
    },
    /// A stage's part of a checkpoint is on the sender's disk and can be fetched from it.
    Stored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
        /// The files, by content; none where the disk did not take them.
        files: Vec<StoredFile>,
    },
    /// The sender does not work on what it was granted: it has let go of it, or never had it.
    Released {
        /// The work.
        key: ClaimKey,
        /// The grant.
        grant: Grant,
    },
    /// The sender, which is not serving yet, holds its stages at this version; or the one that it is to
    /// move to. Repeated until it serves.
    Ready {
        /// The version of the weights.
        version: Step,
        /// The newest membership that it knows: a word of before a move says nothing of it.
        view: u64,
    },
    /// The sender, which is not serving yet or is to move, cannot use the snapshot that it was told of,
    /// or lacks results since: it needs a newer one.
    Stale {
        /// Whether that is of the stage that it is to move to. Who serves and lacks a result of its own
        /// stage cannot go on.
        there: bool,
    },
    /// What the sender measured of its links to some others: what is new, or has changed by much.
    LinkEstimates {
        /// To whom, and what.
        link_estimates: Vec<(PeerId, LinkEstimate)>,
    },
    /// The sender lacks a membership that the present one was made of: it wants the whole.
    ViewRequest,
    /// The sender cannot reach a member that it must speak with.
    CannotReach {
        /// Whom.
        member: Member,
    },
    /// The sender has not heard the coordinator for long: who is no member any more is told so.
    KeepAlive,
    /// The sender is about to leave: it finishes what it has begun, and moves nowhere.
    Draining,
    /// The sender leaves.
    Leave,
}

/// The coordinator to a member.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum FromCoordinator {
    /// A new coordinator takes over: it must know what every member holds before it decides
    /// anything. Who answers obeys no earlier one any more.
    Census {
        /// Its term: it is answered once.
        term: Term,
        /// The present era.
        era: Era,
        /// The version that the present era began at.
        began_at: Step,
        /// The stages that the receiver hosts.
        span: StageSpan,
        /// The newest commit of the era.
        commit: Option<CommitRecord>,
        /// The membership in the log: who does not have it wants it before anything else.
        view: u64,
    },
    /// The new coordinator has heard everybody: whatever waits for an answer is to be said again.
    TakenOver,
    /// Fetch a stage of a checkpoint that is stored elsewhere, and keep it.
    Keep {
        /// The version of the weights.
        version: Step,
        /// What to fetch, and from whom.
        part: SnapshotPart,
    },
    /// A checkpoint is complete: who archives brings it together, and files of versions before the
    /// oldest may go.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// Each stage, in order.
        stages: Vec<StoredStage>,
        /// The oldest version that is still of use.
        oldest: Step,
    },
    /// The newcomer is a member. It serves from the membership on that says so.
    Admitted {
        /// The era that begins for it.
        era: Era,
        /// The stages it hosts.
        span: StageSpan,
        /// The version of the weights that it starts with: the initial ones where it is 0, else
        /// those of a `Snapshot`.
        version: Step,
    },
    /// Several stages need the newcomer equally: it is to look at these members, and register again with
    /// what it measured.
    ProbeLinks {
        /// Who, and where they listen.
        at: Vec<(PeerId, Vec<SocketAddr>)>,
    },
    /// Where the weights are that a newcomer starts with.
    Snapshot {
        /// Their version; results of earlier steps are of no more use.
        version: Step,
        /// Each of its stages, who has its files, and which they are.
        parts: Vec<SnapshotPart>,
    },
    /// The whole run goes back to this version: everything since is computed again. The receiver
    /// does not serve until it holds these weights.
    Rewind {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
        /// The stages that the receiver hosts from now on.
        span: StageSpan,
    },
    /// The receiver is no member any more. It may come back as a new life.
    Expelled {
        /// Why.
        reason: String,
    },
    /// Nobody holds the next stage's claim of this work, which the receiver does: its activation is
    /// to be offered again.
    Replay {
        /// The receiver's work.
        keys: Vec<ClaimKey>,
    },
    /// The newcomer is not admitted.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// Who came, went or changed.
    View(ViewChange),
    /// Who is a member now, all of them, in so many parts.
    Members {
        /// Of which membership.
        number: u64,
        /// Which part this is, and of how many.
        part: (u32, u32),
        /// The members in it.
        members: Vec<Arc<MemberRecord>>,
    },
    /// Microbatches of the first stage, given out with their claims.
    Work {
        /// The step they belong to.
        step: Step,
        /// Which, and under which grants.
        grants: Vec<(Microbatch, Grant)>,
    },
    /// The claim is the receiver's.
    Granted {
        /// The work.
        key: ClaimKey,
        /// Number of the grant.
        grant: Grant,
        /// Who holds the claim of the next stage already, if anybody does.
        next_holder: Option<Member>,
    },
    /// The claim is somebody else's.
    Held {
        /// The work.
        key: ClaimKey,
        /// Whose.
        holder: Member,
    },
    /// The step that the claim is for is closed or not open yet.
    NotOpen {
        /// The work.
        key: ClaimKey,
    },
    /// The claim is asked back if its work is late or, without any patience, if it is yet to be begun.
    /// It is answered at once: `Released`, or `Working` where it is not so.
    Reclaim {
        /// The work.
        key: ClaimKey,
        /// The grant.
        grant: Grant,
        /// How long each pass may take.
        patience: PassTimes,
    },
    /// A done report arrived.
    Noted {
        /// The work.
        key: ClaimKey,
        /// The grant.
        grant: Grant,
    },
    /// Every microbatch of the step is done at this stage: all-reduce.
    Close {
        /// Which round.
        round: RoundId,
        /// With whom, beginning from whom the stage's last round was among.
        group: RoundGroupChange,
        /// Whether it goes on with what there is of it.
        mended: Mended,
        /// The training microbatches that the receiver's accumulator must hold, in order; none where
        /// it only listens.
        counted: Vec<Microbatch>,
    },
    /// Whom a stage's rounds are among, all of them, in so many parts.
    RoundGroup {
        /// The stage.
        stage: Stage,
        /// Which crew.
        number: u64,
        /// Which part this is, and of how many.
        part: (u32, u32),
        /// The members in it.
        here: Vec<RoundGroupMember>,
    },
    /// The step's results: apply them.
    Commit(CommitRecord),
    /// Write your stage's part of a checkpoint as soon as you are at that version.
    Store {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// The run is over: its last checkpoint is complete.
    Finished,
    /// The run cannot go on.
    Stopped {
        /// Why, and what to do.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    #[test]
    fn an_envelope_reads_back() {
        let envelope = Envelope {
            from: Incarnation(3),
            to: Incarnation(4),
            era: Era(0),
            term: Term(1),
            message: Message::FromCoordinator(FromCoordinator::Work {
                step: Step(7),
                grants: vec![(Microbatch(1), Grant { term: Term(1), number: 9 })],
            }),
        };
        let bytes = wire::encode(&envelope).expect("small");
        assert_eq!(wire::decode::<Envelope>(&bytes), Ok(envelope));
    }

    #[test]
    fn losses_sum_to_the_same_in_any_order() {
        let losses: Vec<FixedLoss> = [5.545_177, 0.1, 3.75e-3].map(FixedLoss::from_nats).to_vec();
        let forward: FixedLoss = losses.iter().copied().sum();
        let backward: FixedLoss = losses.iter().rev().copied().sum();
        assert_eq!(forward, backward);
        assert!((forward.mean(3) - (5.545_177 + 0.1 + 3.75e-3) / 3.0).abs() < 1e-9);
    }

    #[test]
    fn tags_differ_in_every_part_of_the_key() {
        let key = ClaimKey { step: Step(1), stage: Stage(2), microbatch: Microbatch(3) };
        let others = [
            ClaimKey { step: Step(2), ..key },
            ClaimKey { stage: Stage(3), ..key },
            ClaimKey { microbatch: Microbatch(4), ..key },
        ];
        assert!(others.into_iter().all(|other| proof_tag(other) != proof_tag(key)));
    }
}
