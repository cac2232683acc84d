//! Devices of one machine that compute slices of each layer together: all of them, or groups with a device for each slice,
//! among which microbatches are divided.

use std::time::Duration;

use super::advice::{Work, advise};
use super::machine::{
    DIVIDED, LONGEST, Machine, MachineAdvice, MachineOutcome, Obstacle, WEIGHT, Waits, obstacle,
    of_one_peer,
};

/// Exchanges of a layer between devices that have slices of it, forward: attention and the feed-forward block each read
/// all tokens, and each have a sum of which a device takes its tokens (Korthikanti et al. 2022, arXiv 2205.05198).
const FORWARD_EXCHANGES: f64 = 4.0;

/// Backward: the same, and the tokens of the others again, which a device does not keep.
const BACKWARD_EXCHANGES: f64 = 6.0;

/// Exchanges of a pass outside its layers: the sum of embeddings and all tokens for the head; backward, the gradient of
/// the tokens for the embedding, and the sum of the head's.
const OTHER_EXCHANGES: f64 = 3.0;

/// The number of slices with the shortest step; of equal ones the largest, whose devices need the least memory.
pub(super) fn sliced(work: &Work, machine: &Machine) -> MachineOutcome {
    let numbers =
        (2..machine.devices).rev().filter(|slices| machine.devices.is_multiple_of(*slices));
    let in_groups = numbers.filter_map(|slices| in_slices(work, machine, slices).ok());
    let together = in_slices(work, machine, machine.devices);
    let obstacle = together.as_ref().err().copied();
    let all = together.ok().into_iter().chain(in_groups);
    all.min_by_key(|plan| plan.step).ok_or_else(|| obstacle.expect("it was not possible"))
}

/// Each microbatch in so many slices, by as many devices, which meet in every layer.
pub(super) fn in_slices(work: &Work, machine: &Machine, slices: usize) -> MachineOutcome {
    let layers = machine.layers.ok_or(Obstacle::Layers)? as f64;
    let rate = machine.inside.rate.0.max(1) as f64;
    let (each, groups) = (slices.max(1) as f64, machine.devices / slices.max(1));
    let [forward, backward] =
        [FORWARD_EXCHANGES, BACKWARD_EXCHANGES].map(|of_layer| of_layer * layers + OTHER_EXCHANGES);
    // In each a device receives the tokens of the others of its group, or their products for its own.
    let lacks = 1.0 - 1.0 / each;
    let token = |exchanges: f64| (exchanges * lacks * work.activation / rate).min(LONGEST);
    let delays = (forward + backward) * machine.inside.delay.as_secs_f64();
    let divided = (DIVIDED * machine.weights).min(work.state);
    let own = Work {
        forward: work.forward / each + token(forward),
        backward: work.backward / each + token(backward),
        // Of each of both passes.
        overhead: work.overhead + delays / 2.0,
        state: (work.state - divided) / each + divided / machine.count(),
        kept: work.kept / each,
        ..*work
    };
    let mut advice = advise(&own, 1, groups, None).ok_or_else(|| obstacle(&own, machine))?;
    let tokens = (advice.microbatch * advice.microbatches) as f64;
    let exchanges =
        (token(forward) + token(backward)) * tokens + delays * advice.microbatches as f64;
    let exchanges = Duration::from_secs_f64(exchanges).min(advice.passes);
    advice.computes = advice.computes.saturating_sub(exchanges);
    // Each device copies what others updated of its slices.
    let updates = machine.copies(WEIGHT * machine.weights / each);
    let step = advice.passes + updates;
    let waits = Waits { exchanges, updates, ..Waits::default() };
    Ok(MachineAdvice { slices, ..of_one_peer(advice, step, waits) })
}

#[cfg(test)]
mod tests {
    use super::super::machine::tests::{WORK, machine};
    use super::super::network::Link;
    use super::*;

    fn of(layers: usize, slices: usize) -> MachineAdvice {
        let machine = machine(25_000_000_000);
        let inside = Link { delay: Duration::ZERO, ..machine.inside };
        let machine = Machine { layers: Some(layers), inside, ..machine };
        in_slices(&WORK, &machine, slices).expect("there is no limit")
    }

    #[test]
    fn slices_exchange_ten_times_a_layer_and_six_times_more() {
        for (slices, groups) in [(8, 1), (4, 2), (2, 4)] {
            // All but its own part of a token, for the tokens of its group.
            let lacks = 1.0 - 1.0 / f64::from(slices);
            let tokens = 131_072.0 / f64::from(groups);
            let once = lacks * 10_240.0 * tokens / 25e9;
            let seconds = 10.0 * 40.0 * once;
            let (all, none) = (of(40, slices as usize), of(0, slices as usize));
            let exchanges = all.waits.exchanges.as_secs_f64();
            assert!((exchanges - seconds - 6.0 * once).abs() < 1e-3, "{all:?}");
            assert!(((all.step - none.step).as_secs_f64() - seconds).abs() < 1e-3, "{all:?}");
            let computes = 3.9e-4 * 131_072.0 / 8.0;
            let updates = 4.0 * 13e9 / f64::from(slices) * 7.0 / 8.0 / 25e9;
            let least = computes + 6.0 * once + updates;
            assert!((none.step.as_secs_f64() - least).abs() < 1e-3, "{none:?}");
        }
    }
}
