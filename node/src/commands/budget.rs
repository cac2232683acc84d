//! Which devices of a fleet to take, and how large its microbatches should be: for `shoal plan`.

use serde::{Deserialize, Serialize};
use shoal_scheduler::planner::{
    Advice, CostModel, Device, Effort, Network, Placement, PlanError, Work, advise, search,
};
use shoal_scheduler::rng::Rng;

use super::fleet::{Fleet, FleetError};

/// Placements that are tried for a part of a fleet: many parts are.
const EFFORT: Effort = Effort { population: 8, children: 16, exchanges: 512 };

/// Regions of which parts of a fleet are made: the cheapest one, the cheapest two, and so on, and each alone.
const PARTS: usize = 16;

/// What a step computes and keeps, and what may be spent, as a file says it; docs/placement.md has the keys.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Training {
    /// Tokens of a step.
    pub(super) tokens: u64,
    /// Tokens of a sample: the smallest microbatch.
    sequence: u64,
    /// Seconds of a device for a token, forward through the whole model; backward is twice that unless said.
    forward: f64,
    backward: Option<f64>,
    /// Seconds of each pass besides.
    #[serde(default)]
    overhead: f64,
    /// Bytes of the whole model's weights and moments, and of what it keeps of a token until its backward pass.
    #[serde(default)]
    state: f64,
    #[serde(default)]
    kept: f64,
    /// Bytes that a device has room for.
    memory: Option<f64>,
    /// What an hour may cost, in the money of the prices.
    pub(super) budget: Option<f64>,
    /// Whether a step's passes run while the one before is added up.
    #[serde(default)]
    staleness: u8,
}

impl Training {
    pub(super) fn check(&self) -> Result<(), FleetError> {
        let times = [self.forward, self.backward.unwrap_or(0.0), self.overhead];
        let bytes = [self.state, self.kept, self.memory.unwrap_or(0.0)];
        let able = (1..=1 << 40).contains(&self.tokens)
            && (1..=self.tokens).contains(&self.sequence)
            && times.iter().all(|time| (0.0..=1e3).contains(time))
            && bytes.iter().all(|bytes| (0.0..=1e18).contains(bytes))
            && self.budget.is_none_or(|budget| (0.0..=1e12).contains(&budget))
            && self.staleness <= 1;
        if able { Ok(()) } else { Err(FleetError::Training) }
    }

    fn work(&self, fleet: &Fleet) -> Work {
        Work {
            tokens: self.tokens,
            least: self.sequence,
            forward: self.forward,
            backward: self.backward.unwrap_or(2.0 * self.forward),
            overhead: self.overhead,
            activation: fleet.activations() / self.tokens as f64,
            state: self.state,
            kept: self.kept,
            memory: self.memory,
        }
    }
}

/// What is recommended for a part of a fleet.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Choice {
    /// How many devices of each region.
    pub(super) devices: Vec<(String, usize)>,
    pub(super) stages: usize,
    pub(super) replicas: usize,
    /// Of an hour.
    pub(super) price: f64,
    /// Tokens of a microbatch, and microbatches of each replica in a step.
    pub(super) microbatch: u64,
    pub(super) microbatches: u64,
    /// The most that each stage has in flight.
    pub(super) windows: Vec<usize>,
    /// Seconds of a step: passes, of which engines compute so much, then the slowest all-reduce.
    pub(super) step: f64,
    pub(super) passes: f64,
    pub(super) computes: f64,
    pub(super) all_reduce: f64,
    pub(super) tokens_per_second: f64,
    /// Bytes of memory of the fullest device.
    pub(super) memory: f64,
}

/// What parts of the fleet come to that may be paid for, the fastest first. None of none fits.
///
/// # Errors
/// When nothing can be planned for the fleet.
pub(super) fn choices(
    fleet: &Fleet,
    training: &Training,
    seed: u64,
) -> Result<Vec<Choice>, PlanError> {
    let mut found: Vec<Choice> = Vec::new();
    for stages in fleet.stages() {
        for counts in parts(fleet, training.budget, stages) {
            let choice = choice(&fleet.part(&counts), training, stages, seed)?;
            let known = |choice: &Choice| {
                found.iter().any(|one| (&one.devices, one.stages) == (&choice.devices, stages))
            };
            found.extend(choice.filter(|choice| !known(choice)));
        }
    }
    found.sort_by(|one, other| other.tokens_per_second.total_cmp(&one.tokens_per_second));
    Ok(found)
}

/// Devices of each region, in the fleet's order: as many as may be paid for and make whole replicas.
fn parts(fleet: &Fleet, budget: Option<f64>, stages: usize) -> Vec<Vec<usize>> {
    let mut cheapest: Vec<usize> = (0..fleet.regions()).collect();
    cheapest.sort_by(|one, other| fleet.price(*one).total_cmp(&fleet.price(*other)));
    let first = (1..=cheapest.len()).map(|count| cheapest[..count].to_vec());
    let alone = cheapest.iter().map(|region| vec![*region]);
    let regions = first.chain(alone).take(PARTS);
    let part = |regions: Vec<usize>| {
        let mut counts = vec![0; fleet.regions()];
        let mut left = budget;
        for region in &regions {
            let price = fleet.price(*region);
            let able =
                left.filter(|_| price > 0.0).map_or(usize::MAX, |left| (left / price) as usize);
            counts[*region] = fleet.devices_of(*region).min(able);
            left = left.map(|left| left - price * counts[*region] as f64);
        }
        // What makes no whole replica is left where it costs most.
        let mut beyond = counts.iter().sum::<usize>() % stages;
        for region in regions.iter().rev() {
            let fewer = beyond.min(counts[*region]);
            counts[*region] -= fewer;
            beyond -= fewer;
        }
        counts
    };
    let mut parts: Vec<Vec<usize>> = regions.map(part).collect();
    parts.retain(|counts| counts.iter().sum::<usize>() >= stages);
    parts.sort_unstable();
    parts.dedup();
    parts
}

fn choice(
    fleet: &Fleet,
    training: &Training,
    stages: usize,
    seed: u64,
) -> Result<Option<Choice>, PlanError> {
    let network = fleet.network()?;
    let model = CostModel::new(&network, fleet.traffic(stages), stages)?;
    let placed = search(&model, &EFFORT, &mut Rng::new(seed));
    let replicas = fleet.devices() / stages;
    let advice = advise(&training.work(fleet), stages, replicas, slowest(&placed, &network));
    Ok(advice.map(|advice| describe(fleet, training, (stages, replicas), &placed, advice)))
}

/// The link that activations of the slowest pair go over.
fn slowest(placed: &Placement, network: &Network) -> Option<shoal_scheduler::planner::Link> {
    let boundary = placed.boundaries.iter().max_by_key(|boundary| boundary.time)?;
    Some(network.link(boundary.from, boundary.to))
}

fn describe(
    fleet: &Fleet,
    training: &Training,
    (stages, replicas): (usize, usize),
    placed: &Placement,
    advice: Advice,
) -> Choice {
    let passes = advice.passes.as_secs_f64();
    let all_reduce = placed.cost.data_parallel.as_secs_f64();
    let step = if training.staleness == 1 { passes.max(all_reduce) } else { passes + all_reduce };
    let device = |at| fleet.home(Device(at)).0;
    let count = |region| (0..fleet.devices()).filter(|at| device(*at) == region).count();
    let regions = 0..fleet.regions();
    Choice {
        devices: regions.clone().map(|at| (fleet.region(at).to_owned(), count(at))).collect(),
        stages,
        replicas,
        price: regions.map(|at| fleet.price(at) * count(at) as f64).sum(),
        microbatch: advice.microbatch,
        microbatches: advice.microbatches,
        windows: advice.windows,
        step,
        passes,
        computes: advice.computes.as_secs_f64(),
        all_reduce,
        tokens_per_second: training.tokens as f64 / step,
        memory: advice.memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages of half a second and a second for a token, links that take nothing.
    const FLEET: &str = r#"stages = [2]
activations = 0
gradient = 0
within = { delay = 0, bandwidth = 1e9 }
between = { delay = 0, bandwidth = 1e9 }
region = [{ name = "dear", devices = 4, price = 1.0 }, { name = "cheap", devices = 4, price = 0.5 }]
[training]
tokens = 8
sequence = 1
forward = 1.0
"#;

    fn best(budget: Option<f64>, more: &str) -> Option<Choice> {
        let budget = budget.map_or_else(String::new, |budget| format!("budget = {budget}\n"));
        let fleet = Fleet::parse(&format!("{FLEET}{budget}{more}")).expect("a fleet");
        let training = fleet.training().expect("it says so");
        choices(&fleet, training, 1).expect("it can be planned").into_iter().next()
    }

    #[test]
    fn what_is_taken_is_what_the_budget_pays_for() {
        // Two hours' worth of the dear ones are one pipeline, of the cheap ones two: 8 tokens in 13.5 s, or four
        // each in 4 · 1.5 + 1.5 = 7.5 s. With four there are three, of which one has three tokens: 6 s; all eight
        // have two each: 4.5 s.
        for (budget, devices, price, step) in [
            (Some(1.0), [0, 2], 1.0, 13.5),
            (Some(2.0), [0, 4], 2.0, 7.5),
            (Some(3.0), [0, 4], 2.0, 7.5),
            (Some(4.0), [2, 4], 4.0, 6.0),
            (None, [4, 4], 6.0, 4.5),
        ] {
            let best = best(budget, "").expect("it pays for two");
            let counts: Vec<usize> = best.devices.iter().map(|(_, count)| *count).collect();
            // Regions without any are left out.
            let taken: Vec<usize> = devices.into_iter().filter(|count| *count > 0).collect();
            assert_eq!((counts, best.price, best.step), (taken, price, step), "{budget:?}");
            assert_eq!((best.microbatch, best.tokens_per_second), (1, 8.0 / step));
        }
        assert_eq!(best(Some(0.9), ""), None, "one device is no pipeline");
    }

    #[test]
    fn what_has_no_room_is_not_recommended() {
        assert_eq!(best(None, "state = 100\nmemory = 49\n"), None);
        let best =
            best(None, "state = 100\nkept = 1\nmemory = 52\n").expect("half of it, and some");
        // Of the two that each stage has, half of a token's is kept there.
        assert_eq!(best.memory, 51.0);
    }

    #[test]
    fn what_no_step_can_be_is_refused() {
        for more in
            ["budget = -1", "memory = nan", "staleness = 2", "overhead = 1e4", "backward = -1"]
        {
            let error = Fleet::parse(&format!("{FLEET}{more}\n")).expect_err(more).to_string();
            assert!(error.contains("[training]"), "{more}: {error}");
        }
    }
}
