//! What the run's log has: terms, memberships, commits, rewinds and checkpoints.

use super::{FixedLoss, RoundOutcome, ViewChange};
use crate::ids::{Attempt, ContentHash, Era, PeerId, Stage, Step, Term};
use crate::units::Bytes;

/// What the coordinator writes down before it says it.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum LogRecord {
    /// A term of office began.
    Term(Term),
    /// Who is a member from now on, of no more than [`limits::CHANGED_MEMBERS`] at once.
    ///
    /// [`limits::CHANGED_MEMBERS`]: crate::limits::CHANGED_MEMBERS
    View(ViewChange),
    /// A step's results.
    Commit(CommitRecord),
    /// A new era began at this version of the weights.
    Rewind {
        /// The era.
        era: Era,
        /// The version.
        version: Step,
    },
    /// Every stage of this version is stored, by as many peers as there are for it.
    Checkpoint {
        /// The version of the weights.
        version: Step,
        /// Each stage, in order.
        stages: Vec<StoredStage>,
        /// Checkpoints before this version are kept no longer.
        oldest: Step,
    },
    /// Everything is trained and in an archive: the run is over.
    Completed,
}

/// The results of one step: its last word.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub struct CommitRecord {
    /// In which era.
    pub era: Era,
    /// The term of the coordinator that ordered its rounds.
    pub term: Term,
    /// The step; the weights become version `step + 1`.
    pub step: Step,
    /// Each stage's attempt and outcome, in order of stages.
    pub stages: Vec<(Attempt, RoundOutcome)>,
    /// Norm of the gradient over all stages.
    pub gradient_norm: f64,
    /// Sum of the training microbatches' losses.
    pub loss: FixedLoss,
    /// Sum of the held-out microbatches' losses, where the step has any.
    pub held_out_loss: Option<FixedLoss>,
}

/// One stage of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SnapshotPart {
    /// The stage.
    pub stage: Stage,
    /// Where it is.
    pub stored: StoredStage,
}

/// One stage's weights at a version, and who has them.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct StoredStage {
    /// Who has the files.
    pub holders: Vec<PeerId>,
    /// The files, by content.
    pub files: Vec<StoredFile>,
}

/// A file that can be fetched by its hash.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct StoredFile {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its content.
    pub hash: ContentHash,
    /// Its size.
    pub size: Bytes,
}
