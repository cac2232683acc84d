//! The files that a stage begins with.

use crate::base::BaseFiles;
use crate::checkpoint::StartFiles;

/// The files that a stage's weights come from, as far as they are needed.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The base: the weights of version 0 or, in a run that trains adapters, those beside them, which
    /// are the same at every version.
    pub base: Option<BaseFiles>,
    /// The checkpoint that the run goes on from: weights and optimizer state of the first version.
    pub start: Option<StartFiles>,
}
