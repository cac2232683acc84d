//! A peer that computes wrongly, for tests of audits: `SHOAL_COMPUTES_WRONG=gradient:3` leaves the weight gradient of
//! every third microbatch out, and `activation:3` changes a bit of what it hands on. Release builds ignore the variable.

use bytes::Bytes;
use shoal_protocol::ids::ClaimKey;

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;

    use shoal_protocol::ids::ClaimKey;

    use crate::fault_point::named_number;

    /// Whether this is wrong for a microbatch.
    pub(super) fn is_wrong(what: &str, key: ClaimKey) -> bool {
        static WRONG: OnceLock<Option<(String, u64)>> = OnceLock::new();
        let wrong = WRONG.get_or_init(|| named_number("SHOAL_COMPUTES_WRONG")).as_ref();
        let is_due = |every: u64| u64::from(key.microbatch.0).is_multiple_of(every);
        wrong.is_some_and(|(name, every)| name == what && is_due(*every))
    }
}

#[cfg(not(debug_assertions))]
mod armed {
    use shoal_protocol::ids::ClaimKey;

    /// Nothing is wrong in release builds.
    pub(super) fn is_wrong(_what: &str, _key: ClaimKey) -> bool {
        false
    }
}

/// Whether the weight gradient of a microbatch is left out.
pub(crate) fn leaves_out(key: ClaimKey) -> bool {
    armed::is_wrong("gradient", key)
}

/// The activation that is handed on for a microbatch.
pub(crate) fn handed_on(key: ClaimKey, activation: Bytes) -> Bytes {
    if !armed::is_wrong("activation", key) {
        return activation;
    }
    let mut wrong = activation.to_vec();
    wrong.iter_mut().take(1).for_each(|byte| *byte ^= 1);
    wrong.into()
}
