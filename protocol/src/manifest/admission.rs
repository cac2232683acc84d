//! Who may take part in a run, and whose key says so.

use serde::{Deserialize, Serialize};

use crate::ids::PeerId;

/// Who may take part. All peers of a run agree on it by the run's name, so none can be talked into
/// another rule.
#[derive(
    Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// Whom the run lets in.
    pub mode: AdmissionMode,
    /// The warden: the peer whose key signs tickets, permits and the roster. In a run that is not open
    /// whoever starts it, unless it is named. Without one, nobody can be invited or banned.
    #[serde(default)]
    pub key: Option<PeerId>,
}

/// Whom a run lets in.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum AdmissionMode {
    /// Everybody who is not banned.
    #[default]
    Open,
    /// Who has turned a ticket into a permit, or is on the warden's list.
    Invite,
    /// Who is on the warden's list.
    Allowlist,
}
