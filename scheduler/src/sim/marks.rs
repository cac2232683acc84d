//! Marks: what a run of the simulator counts, from losses and recoveries to rare paths.

use std::collections::BTreeMap;
use std::ops::Index;

macro_rules! marks {
    ($($(#[doc = $doc:literal])+ $mark:ident,)+) => {
        /// Something to count.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mark {
            $($(#[doc = $doc])+ $mark,)+
        }

        impl Mark {
            /// Every mark.
            pub const ALL: &[Self] = &[$(Self::$mark),+];
        }
    };
}

marks! {
    /// A peer died.
    Died,
    /// A member took stages without a host beside its own.
    Extended,
    /// A member was expelled.
    Expelled,
    /// A newcomer caught up and began to serve.
    CaughtUp,
    /// A peer fell behind and started over.
    FellBehind,
    /// A peer changed its span.
    Moved,
    /// A message to or from an earlier incarnation was dropped.
    EarlierLife,
    /// A member requested the whole view.
    ViewRequested,
    /// A connection could not be restored for a while.
    Cut,
    /// A message or tensor went to an unreachable peer.
    Unreached,

    /// An offer was answered with busy.
    OfferRefused,
    /// An offer was redirected to a claim's holder.
    OfferRedirected,
    /// A completion report arrived again.
    ReportedAgain,
    /// An activation was requested again.
    Replayed,
    /// An activation was requested again although a lost member had done its work.
    ReplayedDone,
    /// Work that had lost its next replica lost it again.
    ReroutedAgain,
    /// A later activation of a virtual worker was sent again.
    ExchangedAgain,
    /// A virtual worker was given up after some of its exchanges.
    WorkerGivenUp,
    /// A virtual worker went on when the meeting before was over.
    WorkerJoined,

    /// A claim of an expelled member was taken back.
    ClaimRevoked,
    /// A claim was released by its holder.
    ClaimReleased,
    /// A claim was released while its grant was in flight.
    ClaimReleasedInFlight,
    /// An overdue claim was released on a revocation request.
    ClaimReclaimed,
    /// A claim was requested back after its work was done.
    ReclaimedDone,
    /// A claim was requested back although its work was not overdue.
    ReclaimedEarly,
    /// A claim was requested back again after no answer.
    ReclaimedAgain,
    /// A message was about a claim that was not its sender's.
    ClaimRefused,
    /// A new coordinator took over a claim from its predecessor.
    ClaimTakenOver,

    /// A round was aborted.
    RoundAborted,
    /// The result of a round was not the sum of what was given.
    RoundForged,
    /// A round continued without lost members.
    RoundMended,
    /// A round was mended before any member had a result.
    MendedBeforeResult,
    /// A round was mended when some members had their result.
    MendedAfterResult,
    /// A round was mended whose lost members had counted nothing.
    MendedUnchanged,
    /// A round was mended without several members.
    MendedWithoutMany,
    /// A member continued a mended round of weights that two stages share.
    MendedShared,
    /// A collector made the sum of an island.
    Collected,
    /// A collector made the sum of an island after a mend.
    CollectedAgain,
    /// A newcomer that listened to a round served before the round's commit.
    Promoted,
    /// A microbatch was done during the all-reduce of an earlier step.
    Overlapped,
    /// A member requested a whole round group.
    RoundGroupRequested,
    /// A peer gave up a committed result because pieces of it were lost.
    ResultLost,

    /// A coordinator followed another.
    Succeeded,
    /// A record became durable after its coordinator was deposed.
    LoggedAfterDeposal,
    /// A deposed coordinator appended a record.
    AppendedAfterDeposal,
    /// All replicas of a stage died while a commit was being logged.
    LostInCommit,
    /// A stage was lost.
    StageLost,
    /// The run returned to an earlier version.
    Rewound,
    /// A checkpoint was abandoned.
    CheckpointAbandoned,
    /// A disk failed to write a snapshot.
    NotStored,

    /// A member told a lie.
    Lied,
    /// An audit found what was stated.
    AuditedSound,
    /// Nobody could make an audit.
    NotAudited,
}

/// The count of each mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks(BTreeMap<Mark, u64>);

impl Marks {
    /// Counts a mark `times` times.
    pub(super) fn add(&mut self, mark: Mark, times: u64) {
        if times > 0 {
            *self.0.entry(mark).or_insert(0) += times;
        }
    }

    /// Counts a mark if a condition holds.
    pub(super) fn add_if(&mut self, holds: bool, mark: Mark) {
        self.add(mark, u64::from(holds));
    }
}

impl Index<Mark> for Marks {
    type Output = u64;

    fn index(&self, mark: Mark) -> &u64 {
        self.0.get(&mark).unwrap_or(&0)
    }
}
