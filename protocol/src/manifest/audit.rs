//! Audits: work that is computed again before it counts.

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, within};
use crate::limits;

/// Steps that a newcomer's work is audited in, at most.
const PROBATION: u32 = 1 << 16;

/// Which work replicas compute again before the commit of its step.
#[derive(
    Debug, Clone, Copy, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct Audit {
    /// The share of steps of which each member's work is computed again by a like replica. Which ones follows from
    /// their results. 0 audits none.
    #[serde(default)]
    pub share: f64,
    /// The first steps of each member that are audited in any case; 0 for none.
    #[serde(default)]
    pub probation: u32,
}

impl Audit {
    /// No work is computed twice.
    pub const NONE: Self = Self { share: 0.0, probation: 0 };

    /// Whether any work is computed twice, so that members state what they took and made.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.share > 0.0 || self.probation > 0
    }

    /// Whether a step is audited, by a number that is drawn evenly from all.
    #[must_use]
    pub fn draws(&self, number: u64) -> bool {
        // All bits of the share's mantissa count.
        ((number >> 11) as f64) < self.share * (1u64 << 53) as f64
    }
}

impl Default for Audit {
    fn default() -> Self {
        Self::NONE
    }
}

impl Manifest {
    /// Checks that audits are possible in this run.
    pub(super) fn check_audit(&self) -> Result<(), ManifestError> {
        within("audit.share", self.audit.share, 0.0..=1.0)?;
        within("audit.probation", self.audit.probation, 0..=PROBATION)?;
        let microbatches = self.training.microbatches;
        if self.audit.is_on() && microbatches > limits::AUDITED_MICROBATCHES {
            return Err(ManifestError::AuditOfMany { microbatches });
        }
        // What a worker of several stages hands over follows from all that it handed over before.
        if self.audit.is_on() && self.workers_exchange() {
            return Err(ManifestError::AuditOfExchanges);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_all_numbers_is_drawn() {
        let audit = |share| Audit { share, probation: 0 };
        let numbers = || (0..1000u64).map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for share in [0.0, 0.03, 0.5, 1.0] {
            let drawn = numbers().filter(|number| audit(share).draws(*number)).count();
            assert!((drawn as f64 / 1000.0 - share).abs() < 0.01, "{share}: {drawn}");
        }
        assert!(!audit(0.0).draws(0) && audit(1.0).draws(u64::MAX));
    }

    #[test]
    fn steps_of_more_microbatches_than_an_order_lists_are_refused() {
        let of = |microbatches, share| {
            let mut manifest = crate::manifest::example::small();
            manifest.training.microbatches = microbatches;
            manifest.audit.share = share;
            manifest.check_audit()
        };
        let most = limits::AUDITED_MICROBATCHES;
        assert_eq!(of(most, 0.1), Ok(()));
        assert_eq!(of(most + 1, 0.0), Ok(()));
        let error = Err(ManifestError::AuditOfMany { microbatches: most + 1 });
        assert_eq!(of(most + 1, 0.1), error);
    }
}
