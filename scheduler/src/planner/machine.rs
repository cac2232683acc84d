//! Compares how the devices of one machine may train a model together, and which of these fit into the memory of
//! a device: [replicated](Parallelism::Replicated), [offloaded](Parallelism::Offloaded),
//! [sliced](Parallelism::Sliced), [a peer for each device](Parallelism::PeerEach), or
//! [swapped](Parallelism::Swapped).
//!
//! The bytes of a device are those of docs/internals/islands.md for a run in bf16. Replicas divide the weights in f32 and what
//! the optimizer keeps (ZeRO-1, arXiv 1910.02054), or have the weights of passes beside one state in the machine's memory
//! (ZeRO-Offload, arXiv 2101.06840). Slices divide everything: matrices (Megatron, arXiv 1909.08053) and, by tokens, the
//! residual stream (arXiv 2205.05198).

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::units::Bytes;

use super::advice::{Advice, Work, advise};
use super::network::Link;
use super::slices::sliced;
use super::spans::{Cut, SpanAdvice, Tier, advise_span};

/// Seconds of a token, at most: more are never worth a comparison.
pub(super) const LONGEST: f64 = 1e3;

/// Bytes for each weight that replicas divide: the weight in f32, and AdamW's moments.
pub(super) const DIVIDED: f64 = 12.0;

/// Bytes of a weight in f32.
pub(super) const WEIGHT: f64 = 4.0;

/// How the devices of a machine work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parallelism {
    /// One peer, each of whose devices has all weights and runs microbatches of its own.
    Replicated,
    /// The same, with one state for all devices in the machine's memory.
    Offloaded,
    /// One peer, whose devices compute each microbatch together: all, or groups of them.
    Sliced,
    /// A peer for each device, in pipelines of the machine's devices.
    PeerEach,
    /// The same, with more stages than memory holds, swapped over the link below it.
    Swapped,
}

impl Parallelism {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Replicated, Self::Offloaded, Self::Sliced, Self::PeerEach, Self::Swapped];
}

/// The devices of one machine, and what decides how they work together.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Number of devices.
    pub devices: usize,
    /// The link between two of them, each way.
    pub inside: Link,
    /// Numbers of stages that the model may be cut into.
    pub stages: BTreeSet<usize>,
    /// Weights of the model.
    pub weights: f64,
    /// Layers of the model; without them, slices are not planned.
    pub layers: Option<usize>,
    /// The link from a device to the memory below; without it, nothing is swapped.
    pub tier: Option<Tier>,
    /// Whether passes overlap the all-reduce of the step before.
    pub overlaps: bool,
}

/// Why the devices of a machine cannot work together as planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// A device has too little memory.
    #[error("does not fit: a device needs {needs} and has {has}")]
    Memory {
        /// The least that it needs.
        needs: Bytes,
        /// What it has.
        has: Bytes,
    },
    /// The state fits, and what passes keep does not.
    #[error("does not fit: {has} of a device hold the state, but not the microbatches in flight")]
    InFlight {
        /// What a device has.
        has: Bytes,
    },
    /// Microbatches are too few for all devices.
    #[error("a step has fewer samples than the machine has devices")]
    Samples,
    /// It is not known how often slices exchange.
    #[error("`layers` is missing")]
    Layers,
    /// There is no memory below.
    #[error("`host_link` is missing")]
    HostLink,
    /// A device has room for all of it.
    #[error("nothing has to be swapped")]
    Fits,
    /// The stages do not make pipelines of the machine's devices.
    #[error("no number of stages makes pipelines of {devices} devices")]
    Stages {
        /// Devices of the machine.
        devices: usize,
    },
}

/// What devices wait for in a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Waits {
    /// Activations of other devices, and other devices' last microbatches.
    pub stalls: Duration,
    /// Partial products of other devices.
    pub exchanges: Duration,
    /// Loads that no pass hides, and copies of gradients to the machine's memory.
    pub loads: Duration,
    /// Updated weights, or sums of gradients, of other devices.
    pub updates: Duration,
}

/// A plan for the devices of a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct MachineAdvice {
    /// Slices of each layer; 1 if it is whole.
    pub slices: usize,
    /// Devices in a row that a microbatch passes, and stages of each; both 1 where all devices are one peer.
    pub positions: usize,
    /// See `positions`.
    pub span: usize,
    /// Tokens of a microbatch.
    pub microbatch: u64,
    /// Bytes of memory of the fullest device.
    pub memory: f64,
    /// Time of a step.
    pub step: Duration,
    /// The part of it that a device computes.
    pub computes: Duration,
    /// The waits, of which staleness may hide some.
    pub waits: Waits,
}

/// A plan, or why there is none.
pub type MachineOutcome = Result<MachineAdvice, Obstacle>;

/// A plan or an obstacle for each kind of parallelism with which the devices of a machine may compute `work`.
#[must_use]
pub fn advise_machine(work: &Work, machine: &Machine) -> Vec<(Parallelism, MachineOutcome)> {
    let of = |kind| match kind {
        Parallelism::Replicated => replicated(work, machine),
        Parallelism::Offloaded => offloaded(work, machine),
        Parallelism::Sliced => sliced(work, machine),
        Parallelism::PeerEach => peer_each(work, machine),
        Parallelism::Swapped => swapped(work, machine),
    };
    Parallelism::ALL.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// The kind with the shortest step among those that fit; of equal ones the first.
#[must_use]
pub fn fastest(all: &[(Parallelism, MachineOutcome)]) -> Option<Parallelism> {
    let fitting = all.iter().filter_map(|(kind, it)| Some((it.as_ref().ok()?.step, *kind)));
    fitting.min().map(|(_, kind)| kind)
}

impl Machine {
    pub(super) fn count(&self) -> f64 {
        self.devices.max(1) as f64
    }

    /// The part of a divided whole that a device lacks.
    pub(super) fn lacks(&self) -> f64 {
        1.0 - 1.0 / self.count()
    }

    /// Bytes of one device, given those of a device that has all to itself.
    fn replica_state(&self, state: f64) -> f64 {
        state - (DIVIDED * self.weights).min(state) * self.lacks()
    }

    /// Time until each device has what the others updated, of so many bytes.
    pub(super) fn copies(&self, bytes: f64) -> Duration {
        let lacks = bytes * self.lacks();
        if lacks > 0.0 { self.inside.time(Bytes(lacks as u64)) } else { Duration::ZERO }
    }

    /// The all-reduce of a stage of so many bytes among so many devices.
    fn all_reduce(&self, bytes: f64, replicas: usize) -> Duration {
        let replicas = u32::try_from(replicas).unwrap_or(u32::MAX);
        2 * self.inside.exchange(Bytes(bytes as u64), replicas) * replicas.saturating_sub(1)
    }

    /// Pipelines of all devices: the stages of a device and the number of pipelines.
    fn pipelines(&self) -> impl Iterator<Item = (Cut, usize)> {
        let cuts = self.stages.iter().copied().flat_map(Cut::all);
        let whole = cuts.filter(|cut| self.devices.is_multiple_of(cut.positions()));
        whole.map(|cut| (cut, self.devices / cut.positions()))
    }
}

/// Each device runs microbatches of its own, and copies the updates of the others.
fn replicated(work: &Work, machine: &Machine) -> MachineOutcome {
    let own = Work { state: machine.replica_state(work.state), ..*work };
    let advice = advise(&own, 1, machine.devices, None).ok_or_else(|| obstacle(&own, machine))?;
    let updates = machine.copies(WEIGHT * machine.weights);
    let step = advice.passes + updates;
    Ok(of_one_peer(advice, step, Waits { updates, ..Waits::default() }))
}

/// Each device runs microbatches of its own with the weights of passes, and all update one state in the machine's memory.
/// Swapped stages keep no graphs.
fn offloaded(work: &Work, machine: &Machine) -> MachineOutcome {
    let tier = machine.tier.as_ref().ok_or(Obstacle::HostLink)?;
    if replicated(work, machine).is_ok() {
        return Err(Obstacle::Fits);
    }
    let stages = machine.stages.last().copied().unwrap_or(1).max(1) as f64;
    let gradient = WEIGHT * machine.weights;
    let copy = (gradient / tier.rate).min(LONGEST);
    let own = Work {
        // All weights, and one stage's gradient of a microbatch.
        state: tier.weights + gradient / stages,
        kept: work.kept / stages,
        backward: work.forward + work.backward,
        overhead: work.overhead + copy / 2.0,
        ..*work
    };
    let mut advice =
        advise(&own, 1, machine.devices, None).ok_or_else(|| obstacle(&own, machine))?;
    let copies = Duration::from_secs_f64(copy * advice.microbatches as f64).min(advice.passes);
    advice.computes = advice.computes.saturating_sub(copies);
    // An update reads and writes the state, each device its share, and then each has the weights anew.
    let update = work.state / machine.count() / tier.rate + tier.weights / tier.rate;
    let updates = Duration::from_secs_f64(update.min(LONGEST));
    let step = advice.passes + updates;
    Ok(of_one_peer(advice, step, Waits { loads: copies, updates, ..Waits::default() }))
}

/// The plan of a machine whose devices are one peer.
pub(super) fn of_one_peer(advice: Advice, step: Duration, waits: Waits) -> MachineAdvice {
    let Advice { microbatch, memory, computes, .. } = advice;
    MachineAdvice { slices: 1, positions: 1, span: 1, microbatch, memory, step, computes, waits }
}

/// The fastest pipelines of the devices whose stages fit.
fn peer_each(work: &Work, machine: &Machine) -> MachineOutcome {
    let all = machine.pipelines().filter_map(|it| pipeline(work, machine, None, it));
    all.min_by_key(|plan| plan.step).ok_or_else(|| {
        let positions = machine.pipelines().map(|(cut, _)| cut.positions()).max();
        positions.map_or(Obstacle::Stages { devices: machine.devices }, |positions| {
            let share = |bytes: f64| bytes / positions as f64;
            let least = Work { state: share(work.state), kept: share(work.kept), ..*work };
            obstacle(&least, machine)
        })
    })
}

/// The fastest pipelines of the devices whose stages do not fit at once.
fn swapped(work: &Work, machine: &Machine) -> MachineOutcome {
    let tier = machine.tier.as_ref().ok_or(Obstacle::HostLink)?;
    let fits = |(cut, count)| pipeline(work, machine, None, (cut, count)).is_some();
    let longer = || machine.pipelines().filter(|(cut, _)| cut.span > 1);
    let beyond = longer().filter(|it| !fits(*it));
    let all = beyond.filter_map(|it| pipeline(work, machine, Some(tier), it));
    all.min_by_key(|plan| plan.step).ok_or_else(|| {
        match longer().map(|(cut, _)| cut.stages).max() {
            None => Obstacle::Stages { devices: machine.devices },
            Some(_) if longer().all(fits) => Obstacle::Fits,
            Some(stages) => {
                let share = |bytes: f64| bytes / stages as f64;
                let state = share(2.0 * (tier.weights + tier.sums));
                obstacle(&Work { state, kept: share(work.kept), ..*work }, machine)
            }
        }
    })
}

/// Pipelines of devices that each are a peer.
fn pipeline(
    work: &Work,
    machine: &Machine,
    tier: Option<&Tier>,
    (cut, replicas): (Cut, usize),
) -> Option<MachineAdvice> {
    let boundary = (cut.positions() > 1).then_some(machine.inside);
    let SpanAdvice { advice, exposed: loads, .. } =
        advise_span(work, tier, cut, replicas, boundary)?;
    let updates = machine.all_reduce(WEIGHT * machine.weights / cut.positions() as f64, replicas);
    let step = if machine.overlaps { advice.passes.max(updates) } else { advice.passes + updates };
    let stalls = advice.passes.saturating_sub(advice.computes + loads);
    let waits = Waits { stalls, loads, updates, ..Waits::default() };
    let Advice { microbatch, memory, computes, .. } = advice;
    let (positions, span) = (cut.positions(), cut.span);
    Some(MachineAdvice { slices: 1, positions, span, microbatch, memory, step, computes, waits })
}

/// Why no size of microbatches is possible for a device with this work.
pub(super) fn obstacle(own: &Work, machine: &Machine) -> Obstacle {
    let Some(has) = own.memory else { return Obstacle::Samples };
    let needs = own.state + own.kept * own.least.max(1) as f64;
    if needs > has {
        Obstacle::Memory { needs: Bytes(needs as u64), has: Bytes(has as u64) }
    } else if own.tokens / own.least.max(1) < machine.devices as u64 {
        Obstacle::Samples
    } else {
        Obstacle::InFlight { has: Bytes(has as u64) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use shoal_protocol::units::Rate;

    use super::super::slices::in_slices;
    use super::*;

    /// 13 billion weights of 26 bytes each in 40 layers, and steps of 16 samples of 8,192 tokens.
    pub(in super::super) const WORK: Work = Work {
        tokens: 131_072,
        least: 8192,
        forward: 1.3e-4,
        backward: 2.6e-4,
        overhead: 0.0,
        activation: 10_240.0,
        state: 338e9,
        kept: 1e6,
        memory: None,
    };

    pub(in super::super) fn machine(rate: u64) -> Machine {
        Machine {
            devices: 8,
            inside: Link { delay: Duration::from_micros(10), rate: Rate(rate) },
            stages: [8, 16].into(),
            weights: 13e9,
            layers: Some(40),
            tier: Some(Tier { rate: 25e9, weights: 26e9, sums: 104e9 }),
            overlaps: false,
        }
    }

    fn best(memory: f64, rate: u64) -> Option<Parallelism> {
        let work = Work { memory: Some(memory), ..WORK };
        fastest(&advise_machine(&work, &machine(rate)))
    }

    const FAST: u64 = 900_000_000_000;
    const SLOW: u64 = 25_000_000_000;

    /// The advice of Hugging Face's guide to training on several GPUs of one machine.
    #[test]
    fn the_table_for_one_machine_is_that_of_the_guide() {
        // The model fits one device: replicas.
        assert_eq!(best(400e9, FAST), Some(Parallelism::Replicated));
        assert_eq!(best(400e9, SLOW), Some(Parallelism::Replicated));
        // It does not: slices over fast links, a pipeline over slow ones.
        assert_eq!(best(80e9, FAST), Some(Parallelism::Sliced));
        assert_eq!(best(80e9, SLOW), Some(Parallelism::PeerEach));
        // The largest stage does not fit.
        assert_eq!(best(19e9, FAST), Some(Parallelism::Swapped));
        assert_eq!(best(19e9, SLOW), Some(Parallelism::Swapped));
        assert_eq!(best(1e9, FAST), None);
    }

    #[test]
    fn a_device_has_the_bytes_of_the_formulas() {
        let machine = machine(FAST);
        let all = [
            // 14 bytes of a weight and an eighth of 12; a quarter and an eighth; an eighth of 26.
            (replicated(&WORK, &machine), 1.0, 15_500.0),
            (in_slices(&WORK, &machine, 4), 4.0, 5_000.0),
            (in_slices(&WORK, &machine, 8), 8.0, 3_250.0),
        ];
        for (found, slices, bytes) in all {
            let found = found.expect("there is no limit");
            let state = found.memory - WORK.kept / slices * found.microbatch as f64;
            assert_eq!((state / 1e6).round(), 13.0 * bytes, "{slices} slices");
        }
    }

    #[test]
    fn replicas_beside_one_state_need_the_weights_of_passes() {
        // 2 bytes of a weight, and 4 of a sixteenth of them.
        let state = 13e9 * 2.25;
        let of = |memory| offloaded(&Work { memory: Some(memory), ..WORK }, &machine(FAST));
        let kept = WORK.kept / 16.0 * WORK.least as f64;
        let least = of(state + kept).expect("room for a microbatch of one sample");
        assert_eq!((least.memory / 1e6).round(), ((state + kept) / 1e6).round());
        assert!(matches!(of(state), Err(Obstacle::Memory { .. })));
        // Each of two microbatches sends 4 bytes a weight down; an update moves an eighth of 26, and 2 come back.
        assert_eq!(least.waits.loads.as_secs_f64().round(), (2.0 * 4.0 * 13e9 / 25e9_f64).round());
        let updates = least.waits.updates.as_secs_f64();
        assert!((updates - 13e9 * (3.25 + 2.0) / 25e9).abs() < 1e-6, "{updates}");
        assert_eq!(of(400e9), Err(Obstacle::Fits));
    }

    #[test]
    fn what_is_missing_is_named() {
        let work = Work { memory: Some(80e9), ..WORK };
        let bare = Machine { layers: None, tier: None, stages: [3].into(), ..machine(FAST) };
        let reasons: Vec<String> = advise_machine(&work, &bare)
            .into_iter()
            .map(|(_, it)| it.expect_err("nothing is possible").to_string())
            .collect();
        assert!(reasons[0].contains("needs 195.3 GiB and has 74.5 GiB"), "{}", reasons[0]);
        assert!(reasons[1].contains("`host_link`"), "{}", reasons[1]);
        assert!(reasons[2].contains("`layers`"), "{}", reasons[2]);
        assert!(reasons[3].contains("needs 322.4 GiB"), "{}", reasons[3]);
        assert!(reasons[4].contains("`host_link`"), "{}", reasons[4]);
        let roomy = advise_machine(&WORK, &machine(FAST));
        assert_eq!(roomy[4].1, Err(Obstacle::Fits));
        let few = advise_machine(&Work { tokens: 4 * 8192, ..WORK }, &machine(FAST));
        assert_eq!(few[0].1, Err(Obstacle::Samples));
        assert!(few[2].1.is_ok(), "slices share a sample");
    }

    prop_compose! {
        fn works()(
            samples in 8u64..64,
            forward in 1e-6f64..1e-3,
            weights in 1e7f64..1e9,
            activation in 256f64..32_768.0,
            kept in 0f64..1e6,
        ) -> (Work, f64) {
            let (least, overhead, memory) = (512, 0.0, None);
            let (tokens, backward, state) = (samples * least, 2.0 * forward, 26.0 * weights);
            let work =
                Work { tokens, least, forward, backward, overhead, activation, state, kept, memory };
            (work, weights)
        }
    }

    fn of(weights: f64, devices: usize, rate: u64) -> Machine {
        let inside = Link { delay: Duration::ZERO, rate: Rate(rate) };
        let (stages, layers) = ([devices, 16].into(), Some(16));
        let tier = Some(Tier { rate: 1e10, weights: 2.0 * weights, sums: 8.0 * weights });
        Machine { devices, inside, stages, weights, layers, tier, ..machine(rate) }
    }

    proptest! {
        #[test]
        fn what_is_recommended_fits(
            (work, weights) in works(),
            devices in prop::sample::select(vec![2usize, 4, 8]),
            rate in 1_000_000u64..1_000_000_000_000,
            share in 0f64..1.5,
        ) {
            let memory = work.state * share;
            let (work, machine) = (Work { memory: Some(memory), ..work }, of(weights, devices, rate));
            let all = advise_machine(&work, &machine);
            for (kind, it) in &all {
                let Ok(it) = it else { continue };
                prop_assert!(it.memory <= memory, "{kind:?}");
                let state = match kind {
                    Parallelism::Replicated => weights * (14.0 + 12.0 / devices as f64),
                    Parallelism::Offloaded => weights * (2.0 + 4.0 / 16.0),
                    Parallelism::Sliced | Parallelism::PeerEach => work.state / devices as f64,
                    Parallelism::Swapped => 20.0 * weights / 16.0,
                };
                prop_assert!(state <= memory * 1.000_001, "{kind:?}: {state} of {memory}");
                prop_assert!(it.computes <= it.step);
            }
            let fits = all.iter().any(|(_, it)| it.is_ok());
            prop_assert_eq!(fastest(&all).is_some(), fits);
        }

        #[test]
        fn with_perfect_links_and_too_little_memory_for_replicas_slices_are_best(
            (work, weights) in works(),
            devices in prop::sample::select(vec![2usize, 4, 8]),
            share in 0f64..1.0,
        ) {
            let machine = of(weights, devices, u64::MAX);
            let least = work.state / machine.count() + work.kept / machine.count() * work.least as f64;
            let most = machine.replica_state(work.state);
            prop_assume!(least < most);
            let memory = Some(least + (most - least) * share);
            let all = advise_machine(&Work { memory, ..work }, &machine);
            prop_assert_eq!(fastest(&all), Some(Parallelism::Sliced), "{:?}", all);
        }

        #[test]
        fn with_slow_links_replicas_are_best_where_they_fit(
            (work, weights) in works(),
            devices in prop::sample::select(vec![2usize, 4, 8]),
            slowness in 2f64..100.0,
            room in 1f64..4.0,
        ) {
            // Weights take longer to copy than a step to compute, and a step's activations weigh more than the
            // weights with any number of pipelines.
            let computes = work.tokens as f64 * (work.forward + work.backward) / devices as f64;
            let rate = (WEIGHT * weights / computes / slowness) as u64;
            let step = work.tokens as f64 / (devices as f64 / 2.0);
            let activation = work.activation.max(2.0 * WEIGHT * weights / step);
            let machine = of(weights, devices, rate);
            let least = machine.replica_state(work.state) + work.kept * work.least as f64;
            let work = Work { memory: Some(least * room), activation, ..work };
            let all = advise_machine(&work, &machine);
            prop_assert_eq!(fastest(&all), Some(Parallelism::Replicated), "{:?}", all);
        }
    }
}
