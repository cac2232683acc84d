//! The size of the models that an amount of memory holds.

use shoal_protocol::units::Bytes;

use super::Finding;
use crate::memory::HostMemory;

/// Bytes for a weight that is trained with AdamW: itself, gradient, accumulator, moments, and the result of a round.
const TRAINED: u64 = 32;

/// Bytes for a frozen weight beside adapters, in bf16.
const FROZEN: u64 = 2;

/// Packed weights in 33 bytes: 64 in 32, and their scale.
const PACKED: u64 = 64;

/// The part of the memory that activations, snapshots and libtorch take.
const OTHERS: u64 = 4;

/// Memory below which only small models fit.
const LITTLE: Bytes = Bytes::mebi(2048);

/// Checks the memory that is free.
pub(crate) fn memory() -> Finding {
    match HostMemory::now() {
        Ok(memory) => of_machine(memory),
        Err(error) => Finding::note("memory", format!("{error:#}")),
    }
}

fn of_machine(HostMemory { total, available }: HostMemory) -> Finding {
    let text = format!("{available} free of {total}: {}", room(available));
    if available < LITTLE { Finding::note("memory", text) } else { Finding::well("memory", text) }
}

/// What fits into free memory.
pub(super) fn room(free: Bytes) -> String {
    let usable = free.0 - free.0 / OTHERS;
    format!(
        "trains about {} weights, or adapters beside {}, or {} in 4 bits; more are shared with peers or swapped",
        weights(usable / TRAINED),
        weights(usable / FROZEN),
        weights(usable / 33 * PACKED)
    )
}

/// A number of weights, as models are named.
fn weights(count: u64) -> String {
    match count {
        1_000_000_000.. => format!("{:.1} billion", count as f64 / 1e9),
        _ => format!("{} million", count / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn memory_is_measured_in_weights() {
        let text = room(Bytes(128_000_000_000));
        assert!(
            text.contains("3.0 billion weights")
                && text.contains("48.0 billion, or 186.2 billion in 4 bits;"),
            "{text}"
        );
        assert!(room(Bytes(4_000_000_000)).contains("93 million weights"));
        let machine = |available| HostMemory { total: Bytes::mebi(8192), available };
        assert_eq!(of_machine(machine(Bytes::mebi(4096))).state, State::Well);
        assert_eq!(of_machine(machine(Bytes::mebi(512))).state, State::Note);
    }
}
