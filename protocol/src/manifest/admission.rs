//! Admission to a run: its mode and its issuer.

use serde::{Deserialize, Serialize};

use crate::ids::PeerId;

/// The rule of admission to a run. It is part of the manifest, whose hash names the run, so all
/// peers of a run have the same rule.
#[derive(
    Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// The peers that the run admits.
    pub mode: AdmissionMode,
    /// The issuer: the peer whose key signs tickets, membership certificates and the access list.
    /// In a run that is not open, it defaults to the peer that starts the run. Without an issuer,
    /// no peer can be invited or banned.
    #[serde(default)]
    pub key: Option<PeerId>,
}

/// The peers that a run admits.
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
    /// All peers except banned ones.
    #[default]
    Open,
    /// Peers that exchanged a ticket for a membership certificate, and peers on the issuer's list.
    Invite,
    /// Peers on the issuer's list.
    Allowlist,
}
