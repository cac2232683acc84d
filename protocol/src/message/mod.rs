//! Control messages between peers and the coordinator, and the tags of tensor messages.
//!
//! Every control message travels in an [`Envelope`] that names both ends' incarnations, the era and
//! the term. A receiver thus recognises a message from or to an earlier incarnation. Nothing here
//! relies on exactly-once delivery: each message states a fact that may be repeated.

mod audit;
mod challenge;
mod curves;
mod evidence;
mod handover;
mod log;
mod membership;
mod peer;
mod round;
mod seal;
mod term_proof;
#[cfg(test)]
mod test_keys;
mod work;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use self::audit::{
    AuditId, AuditOrder, AuditedInput, AuditedWork, Finding, HandoverDigest, SumsPrint,
    SumsPrinter, WorkDigest,
};
pub use self::challenge::{Challenge, OWNER_GROUPS, PROJECTIONS, RoundCheck, owner_groups};
pub use self::curves::{CURVE_POINTS, CurvePoint, Curves};
pub use self::evidence::{Basis, Conviction, Evidence, EvidenceError, SignedFinding};
pub use self::handover::{Handed, Handover, HandoverHashes, InputId, Recalled, Seal};
pub use self::log::{
    CommitRecord, Founding, LogRecord, SavedCheckpoint, SnapshotPart, StoredFile, StoredStage,
};
pub use self::membership::{
    Candidate, Duties, Followed, MemberRecord, Move, MoveReason, StageChoice, StageRoom, View,
    ViewChange, is_stopped,
};
pub use self::peer::{PeerMessage, TensorHeader, TensorTag};
pub use self::round::{
    Mended, Round, RoundGroup, RoundGroupChange, RoundGroupMember, RoundId, RoundMember,
    RoundOutcome, proof_of_all, proof_tag,
};
pub use self::seal::Sealer;
pub use self::term_proof::{
    AnchorGroup, Attested, GROUP_VOTERS, PROOFS, ProofError, Signature, Signatures, TermProof,
    TermVote,
};
pub use self::work::{FixedLoss, HeldClaim, PassTimes};

use crate::ids::{
    ClaimKey, Era, Grant, Incarnation, Member, Mend, Microbatch, PeerId, Stage, StageSpan, Step,
    Term, WeightGroup,
};
use crate::units::Rate;

/// A control message with the incarnations of sender and receiver.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Envelope {
    /// The sender's incarnation.
    pub from: Incarnation,
    /// The receiver's incarnation, as the sender knows it.
    pub to: Incarnation,
    /// The era of the sender.
    pub era: Era,
    /// The term of the coordinator that the sender follows.
    pub term: Term,
    /// The content.
    pub message: Message,
}

/// All messages of a control stream.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Message {
    /// From a member or a candidate to the coordinator.
    ToCoordinator(ToCoordinator),
    /// From the coordinator to a member.
    FromCoordinator(FromCoordinator),
    /// From one member to another.
    PeerMessage(PeerMessage),
    /// Between anchors, about the run's log.
    Anchor(AnchorMessage),
    /// The access list, signed by the run's issuer: banned peers and peers admitted by id. Each peer passes a new one on.
    AccessList {
        /// The encoded access list and its signature.
        signed: Vec<u8>,
    },
    /// Request for the newest checkpoint, from any peer, member or not.
    CheckpointRequest,
    /// The location of the newest checkpoint that the sender knows of.
    Checkpoint {
        /// `None` if there is none yet.
        newest: Option<SavedCheckpoint>,
    },
    /// Names the coordinator to a peer that sent a coordinator's message to another anchor.
    CoordinatorMoved {
        /// The coordinator.
        coordinator: Member,
        /// The addresses of its data plane.
        addresses: Vec<SocketAddr>,
        /// What proves its term, as in `Elected`; empty if the sender has not heard from it yet.
        proofs: Vec<TermProof>,
    },
    /// The term that the anchors elected a coordinator for. Goes before the coordinator's first message.
    Elected {
        /// The proof of the term, and before it those of earlier groups of anchors, oldest first.
        proofs: Vec<TermProof>,
    },
    /// Request for the curves of the run, from a member that has not seen its first steps. Answered once in a life.
    CurvesRequest,
    /// The curves that the sender has.
    Curves(Curves),
}

/// A request from one anchor to another, or the answer to one.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AnchorMessage {
    /// The number of the request, counted by the anchor that sends the request.
    pub number: u64,
    /// Whether this is the answer.
    pub answer: bool,
    /// The number of the sender's history; `None` while its log is empty.
    pub history: Option<u16>,
    /// The encoded message of the log's protocol.
    pub body: Vec<u8>,
}

/// The measured properties of a link from one peer to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LinkEstimate {
    /// The shortest measured round trip.
    pub round_trip: Duration,
    /// The throughput towards the other peer; `None` if it was not measured.
    pub rate: Option<Rate>,
}

/// From a member or a candidate to the coordinator.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum ToCoordinator {
    /// Asks for admission.
    Register(Candidate),
    /// The answer to a census: the claims of the sender. Its last part completes the answer.
    Held {
        /// Claims of steps whose commit the sender has not received.
        claims: Vec<HeldClaim>,
        /// The index of this part. Part 0 restarts the answer.
        part: u32,
        /// Whether this is the last part.
        last: bool,
    },
    /// The sender, an archive, has all files of a checkpoint.
    Archived {
        /// The version of the weights.
        version: Step,
    },
    /// The sender keeps a stage of a checkpoint that it does not host, or could not fetch it.
    Kept {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
        /// Whether the sender has all files of the stage.
        whole: bool,
    },
    /// A replica of the first stage has room for microbatches in addition to the grants numbered up to `through`.
    WorkRequest {
        /// Steps, with the number of microbatches wanted of each.
        rooms: Vec<(Step, u32)>,
        /// The newest grant that the sender has received.
        through: Grant,
        /// Nanoseconds that the sender needs for one microbatch, as in `Accepted`.
        service_time: u64,
    },
    /// Asks for the claim of a microbatch that the sender accepted.
    Claim {
        /// The work.
        key: ClaimKey,
    },
    /// The work is in the sender's accumulator (or, if held out, evaluated). Repeated until answered.
    Done {
        /// The work.
        key: ClaimKey,
        /// The grant under which it was done.
        grant: Grant,
        /// The mean loss per token, from the last stage.
        loss: Option<FixedLoss>,
        /// The durations of its passes.
        pass_times: PassTimes,
        /// What was taken and made; empty in a run without audits.
        handover: Box<Handover>,
    },
    /// The answer to a claim revocation request: the work is not late. An input is missing or
    /// arrived only recently, or the work is done and its report is on the way.
    Working {
        /// The work.
        key: ClaimKey,
        /// The grant of the claim.
        grant: Grant,
    },
    /// The sender holds the result of a round.
    Reduced {
        /// The round.
        round: RoundId,
        /// The mend of the round that produced the result.
        mend: Mend,
        /// The result of the round.
        outcome: RoundOutcome,
        /// What the sender's sums and the result make of the result's challenge, for each group of owners; empty if
        /// the round has no other member, or was mended and rounds sums.
        checks: Vec<RoundCheck>,
        /// The prints of the sender's sums at each of its stages that has the weights, in a run with audits.
        sums: Vec<(Stage, SumsPrint)>,
        /// The measured throughput of the sender's links to members of the round, by their
        /// positions.
        rates: Vec<(u16, Rate)>,
    },
    /// The sender does not know the members of a round: it requests the complete round group.
    RoundGroupRequest {
        /// The round.
        round: RoundId,
    },
    /// The sender has computed a member's work again, or could not.
    Audited {
        /// The audit.
        id: AuditId,
        /// What became of it.
        finding: Finding,
    },
    /// The sender rejects a round's result.
    RoundRefused {
        /// The round.
        round: RoundId,
        /// The member whose piece of the result shows it; `None` if the sender itself reduced that piece.
        owner: Option<Member>,
        /// The reason, for people.
        reason: String,
    },
    /// The weights or gradients are no longer usable numbers: the run cannot continue.
    Diverged {
        /// The work at which it was found.
        key: ClaimKey,
        /// The tensor and its defect, for people.
        reason: String,
    },
    /// A stage of a checkpoint is on the sender's disk and can be fetched from it.
    Stored {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
        /// The files, by content; empty if the sender failed to write them.
        files: Vec<StoredFile>,
    },
    /// The sender does not work on a granted claim: it released the claim, or never had it.
    Released {
        /// The work.
        key: ClaimKey,
        /// The grant of the claim.
        grant: Grant,
    },
    /// The sender, which does not serve yet, holds its stages at this version, or the destination
    /// of its migration. Repeated until it serves there.
    Ready {
        /// The version of the weights.
        version: Step,
        /// The newest membership that it knows: a message from before a migration does not count for it.
        view: u64,
    },
    /// The sender does not serve yet or is to move, and cannot use the snapshot it was given, or
    /// lacks results since then: it needs a newer snapshot of these stages.
    Behind(Followed),
    /// Measured links to other peers: new ones, and those that changed by much.
    LinkEstimates {
        /// The other peers, each with the estimate.
        link_estimates: Vec<(PeerId, LinkEstimate)>,
    },
    /// The sender lacks the membership that a change starts from: it requests the complete
    /// membership.
    ViewRequest,
    /// The sender cannot reach a member that it must communicate with.
    CannotReach {
        /// The unreachable member.
        member: Member,
    },
    /// The sender has not received a message from the coordinator for long. The coordinator answers
    /// if the sender is no longer a member.
    KeepAlive,
    /// The sender is about to leave: it finishes the work that it has begun, and does not migrate.
    Draining,
    /// The sender leaves.
    Leave,
}

/// From the coordinator to a member.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum FromCoordinator {
    /// A new coordinator takes over. It must know the claims of every member before it decides
    /// anything. A member that answers ignores earlier coordinators from then on.
    Census {
        /// The new coordinator's term. A member answers once per term.
        term: Term,
        /// The present era.
        era: Era,
        /// The version that the present era began at.
        began_at: Step,
        /// The stages that the receiver hosts.
        span: StageSpan,
        /// The newest commit of the era.
        commit: Option<CommitRecord>,
        /// The number of the membership in the log. A member that lacks it requests it first.
        view: u64,
    },
    /// The new coordinator has all answers: members repeat every message that still waits for an
    /// answer.
    TakenOver,
    /// Fetch a stage of a checkpoint from other peers, and keep it.
    Keep {
        /// The version of the weights.
        version: Step,
        /// The stage, its files and their holders.
        part: SnapshotPart,
    },
    /// A checkpoint is complete. Archives collect it, and files of versions before the oldest may
    /// be deleted.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// The stored stages, in order.
        stages: Vec<StoredStage>,
        /// The oldest version that is still needed.
        oldest: Step,
    },
    /// The newcomer is a member. It serves once a membership lists it as serving.
    Admitted {
        /// The era that the newcomer begins in.
        era: Era,
        /// The stages that it hosts.
        span: StageSpan,
        /// The version of the weights that it starts with: the initial ones where it is 0, else
        /// those of a `Snapshot`.
        version: Step,
    },
    /// Several stages need the newcomer equally: it measures its links to these members, and
    /// registers again with the result.
    ProbeLinks {
        /// The members, with the addresses of their data planes.
        at: Vec<(PeerId, Vec<SocketAddr>)>,
    },
    /// The location of the weights that a newcomer starts with.
    Snapshot {
        /// The membership in which the member began to wait for it.
        view: u64,
        /// The version of the weights. Results of earlier steps are no longer needed.
        version: Step,
        /// The files of each of its stages and their holders.
        parts: Vec<SnapshotPart>,
    },
    /// The whole run returns to this version and repeats the steps after it. The receiver does not
    /// serve until it holds these weights.
    Rewind {
        /// The era that begins.
        era: Era,
        /// The version of the weights.
        version: Step,
        /// The stages that the receiver hosts from now on.
        span: StageSpan,
    },
    /// The receiver is no longer a member. It may join again as a new incarnation.
    Expelled {
        /// The reason, for people.
        reason: String,
    },
    /// The claim of the next stage for this work has no holder, and the receiver holds its own: it
    /// offers the activation again.
    Replay {
        /// The receiver's work whose activations to offer.
        keys: Vec<ClaimKey>,
    },
    /// The newcomer is not admitted.
    Refused {
        /// The reason and a remedy, for people.
        reason: String,
    },
    /// A change of membership.
    View(ViewChange),
    /// One part of the complete membership.
    Members {
        /// The number of the membership.
        number: u64,
        /// The index of this part, and the number of parts.
        part: (u32, u32),
        /// The members in this part.
        members: Vec<Arc<MemberRecord>>,
    },
    /// Microbatches of the first stage, assigned together with their claims.
    Work {
        /// The step they belong to.
        step: Step,
        /// The microbatches, each with its grant.
        grants: Vec<(Microbatch, Grant)>,
    },
    /// The receiver holds the claim.
    Granted {
        /// The work.
        key: ClaimKey,
        /// The grant of the claim.
        grant: Grant,
        /// The holder of the next stage's claim, if it has one already.
        next_holder: Option<Member>,
    },
    /// Another member holds the claim.
    Held {
        /// The work.
        key: ClaimKey,
        /// The holder of the claim.
        holder: Member,
    },
    /// The step of the claim is closed or not open yet.
    NotOpen {
        /// The work.
        key: ClaimKey,
    },
    /// Revokes the claim if its work is late, or, if `patience` is zero, if the work has not begun.
    /// The receiver answers at once: `Released`, or `Working` otherwise.
    Reclaim {
        /// The work.
        key: ClaimKey,
        /// The grant of the claim.
        grant: Grant,
        /// The time limit of each pass.
        patience: PassTimes,
    },
    /// A `Done` report arrived.
    Noted {
        /// The work.
        key: ClaimKey,
        /// The grant of the claim.
        grant: Grant,
    },
    /// Every microbatch of the step is done at the stages of these weights: begin the all-reduce
    /// round.
    Close {
        /// The round.
        round: RoundId,
        /// The round group, as a change from the group of the last round of these weights.
        group: RoundGroupChange,
        /// The mend, if the round continues with partial sums of an interrupted one.
        mended: Mended,
        /// The training microbatches that the receiver's accumulators must hold, in order; empty if
        /// it only listens.
        counted: Vec<(Stage, Microbatch)>,
    },
    /// One part of a complete round group.
    RoundGroup {
        /// The weights that the group's rounds sum.
        weights: WeightGroup,
        /// The number of the round group.
        number: u64,
        /// The index of this part, and the number of parts.
        part: (u32, u32),
        /// The members in this part.
        here: Vec<RoundGroupMember>,
    },
    /// Compute a member's work again before its step is committed. Repeated until answered.
    Audit(Arc<AuditOrder>),
    /// The results of a step: the receiver applies them.
    Commit(CommitRecord),
    /// Write your stage of a checkpoint as soon as you have that version.
    Store {
        /// The version of the weights.
        version: Step,
        /// The stage.
        stage: Stage,
    },
    /// The run is over: its last checkpoint is complete.
    Finished,
    /// The run cannot continue.
    Stopped {
        /// The reason and a remedy, for people.
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
