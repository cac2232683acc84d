//! A peer that computes wrongly, for tests of audits: `SHOAL_COMPUTES_WRONG=gradient:3` leaves the weight gradient of
//! every third microbatch out, `activation:3` changes a bit of what it hands on, and `sent:3` of what it sends only. Release builds ignore the variable.

use bytes::Bytes;
use shoal_protocol::ids::ClaimKey;
use shoal_protocol::message::{Recalled, Sealer, TensorHeader};

use super::payload::{Held, hash_of};

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
    if armed::is_wrong("activation", key) { changed(&activation) } else { activation }
}

/// The tensors that are sent to another member, and their header: an activation that is not the stated one gets a seal
/// of its own.
pub(crate) fn sent(header: &mut TensorHeader, held: Held, sealer: impl FnOnce() -> Sealer) -> Held {
    let of = header.tag.input().filter(|of| {
        of.input == Recalled::Activation
            && of.key.upstream().is_some_and(|key| armed::is_wrong("sent", key))
    });
    let (Some(of), Some(seal)) = (of, &mut header.seal) else { return held };
    let mut tensors = held.load().expect("it is in memory or on the disk").to_vec();
    tensors[0].bytes = changed(&tensors[0].bytes);
    *seal = sealer().seal(seal.by, seal.era, of, hash_of(&tensors));
    Held::Memory(tensors.into())
}

/// Bytes of which one bit is another.
fn changed(bytes: &Bytes) -> Bytes {
    let mut wrong = bytes.to_vec();
    wrong.iter_mut().take(1).for_each(|byte| *byte ^= 1);
    wrong.into()
}
