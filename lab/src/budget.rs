//! Recommends devices of a fleet and a size of microbatches, for `shoal plan`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::Serialize;
use shoal_scheduler::planner::{
    Advice, CostModel, Device, Effort, Link, Network, Placement, PlanError, advise, search,
};
use shoal_scheduler::rng::Rng;

use crate::deaths::Losses;
use crate::egress::Egress;
use crate::fleet::Fleet;
use crate::plan_work::{Training, tokens_per_unit};
use crate::workers_plan::{Timing, WorkersChoice};

/// Effort of the search for one part of a fleet. It is small because many parts are searched.
const EFFORT: Effort = Effort { population: 8, children: 16, exchanges: 512 };

/// The most parts of a fleet that are searched: the cheapest region, the cheapest two, and so on,
/// then each region alone.
const PARTS: usize = 16;

/// The recommendation for a part of a fleet.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// Devices of each region.
    pub devices: Vec<(String, usize)>,
    /// Stages.
    pub stages: usize,
    /// Replicas of each stage.
    pub replicas: usize,
    /// Price of an hour.
    pub price: f64,
    /// Tokens of a microbatch.
    pub microbatch: u64,
    /// Microbatches of each replica in a step.
    pub microbatches: u64,
    /// The most microbatches in flight, by stage.
    pub windows: Vec<usize>,
    /// Seconds of a step.
    pub step: f64,
    /// Seconds of the passes of a step.
    pub passes: f64,
    /// Seconds of an engine's computation in them.
    pub computes: f64,
    /// Seconds of the slowest all-reduce.
    pub all_reduce: f64,
    /// Tokens that are trained in a second.
    pub tokens_per_second: f64,
    /// Price of an hour's bytes that leave their region.
    pub egress: f64,
    /// What deaths of devices cost; absent if none has a death rate. The tokens per second are those that remain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub losses: Option<Losses>,
    /// Tokens for a unit of the prices' currency; absent if the devices have no price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_currency_unit: Option<f64>,
    /// Bytes of memory on the fullest device.
    pub memory: f64,
    /// The same devices as virtual workers; absent if those are not faster by much.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkersChoice>,
}

impl Choice {
    /// Price of an hour, with what leaves its region.
    pub fn per_hour(&self) -> f64 {
        self.price + self.egress
    }
}

/// A part of a fleet with its best placement.
pub struct Placed {
    /// The devices of the part.
    pub fleet: Fleet,
    /// Their links.
    pub network: Network,
    /// Where the stages are.
    pub placement: Placement,
}

/// The placements of the parts of a fleet, each searched once.
pub struct Searches<'a> {
    /// The whole fleet.
    pub fleet: &'a Fleet,
    seed: u64,
    /// By devices of each region, and stages.
    found: BTreeMap<(Vec<usize>, usize), Placed>,
}

impl<'a> Searches<'a> {
    /// None yet, of searches with this seed.
    pub fn new(fleet: &'a Fleet, seed: u64) -> Self {
        Self { fleet, seed, found: BTreeMap::new() }
    }

    /// The placement of so many devices of each region.
    ///
    /// # Errors
    /// If the planner rejects the part.
    pub fn placed(&mut self, counts: Vec<usize>, stages: usize) -> Result<&Placed, PlanError> {
        match self.found.entry((counts, stages)) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let fleet = self.fleet.part(&place.key().0);
                let network = fleet.network()?;
                let model = CostModel::new(&network, fleet.traffic(stages), stages)?;
                let placement = search(&model, &EFFORT, &mut Rng::new(self.seed));
                Ok(place.insert(Placed { fleet, network, placement }))
            }
        }
    }
}

/// A recommendation for each affordable part of the fleet, the fastest first. The list is empty if none
/// fits.
///
/// # Errors
/// If the planner rejects the fleet.
pub fn choices(searches: &mut Searches<'_>, training: &Training) -> Result<Vec<Choice>, PlanError> {
    let fleet = searches.fleet;
    let mut found: Vec<Choice> = Vec::new();
    for stages in fleet.stages() {
        for counts in parts(fleet, training.budget, stages) {
            let choice = choice(searches.placed(counts, stages)?, training, stages);
            let known = |choice: &Choice| {
                found.iter().any(|one| (&one.devices, one.stages) == (&choice.devices, stages))
            };
            found.extend(choice.filter(|choice| !known(choice)));
        }
    }
    let budget = training.budget.unwrap_or(f64::INFINITY);
    found.retain(|choice| choice.per_hour() <= budget);
    found.sort_by(|one, other| other.tokens_per_second.total_cmp(&one.tokens_per_second));
    Ok(found)
}

/// Puts those first that compute the most tokens per unit of currency; of equal ones the order stays.
pub fn order_by_cost(choices: &mut [Choice]) {
    let value = |choice: &Choice| choice.tokens_per_currency_unit.unwrap_or(f64::INFINITY);
    choices.sort_by(|one, other| value(other).total_cmp(&value(one)));
}

/// Devices of each region, in the fleet's order: as many as are affordable and form whole replicas.
pub fn parts(fleet: &Fleet, budget: Option<f64>, stages: usize) -> Vec<Vec<usize>> {
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
            let affordable =
                left.filter(|_| price > 0.0).map_or(usize::MAX, |left| (left / price) as usize);
            counts[*region] = fleet.devices_of(*region).min(affordable);
            left = left.map(|left| left - price * counts[*region] as f64);
        }
        // Drops the devices that form no whole replica, from the most expensive regions.
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

impl Placed {
    /// The link that carries the activations of the slowest pair.
    pub fn slowest(&self) -> Option<Link> {
        let boundary = self.placement.boundaries.iter().max_by_key(|boundary| boundary.time)?;
        Some(self.network.link(boundary.from, boundary.to))
    }
}

fn choice(placed: &Placed, training: &Training, stages: usize) -> Option<Choice> {
    let Placed { fleet, placement, .. } = placed;
    let replicas = fleet.devices() / stages;
    let advice = advise(&training.work(fleet), stages, replicas, placed.slowest())?;
    Some(describe(fleet, training, (stages, replicas), placement, advice))
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
    let step = training.step(passes, all_reduce);
    let device = |at| fleet.home(Device(at)).0;
    let count = |region| (0..fleet.devices()).filter(|at| device(*at) == region).count();
    let regions = 0..fleet.regions();
    let price: f64 = regions.clone().map(|at| fleet.price(at) * count(at) as f64).sum();
    let losses = Losses::of(fleet, placed, step);
    let available = losses.map_or(1.0, |losses| losses.available);
    let tokens_per_second = available * training.tokens as f64 / step;
    let steps_per_hour = available * 3600.0 / step;
    let bytes_out = Egress::of(fleet, placed);
    let egress = bytes_out.of_step() * steps_per_hour;
    let workers = WorkersChoice::of(
        fleet,
        training,
        &Timing {
            replicas,
            microbatches: advice.microbatches,
            passes,
            all_reduce,
            available,
            price,
            memory: advice.memory,
            stages,
        },
        &bytes_out,
    );
    Choice {
        devices: regions.map(|at| (fleet.region(at).to_owned(), count(at))).collect(),
        stages,
        replicas,
        price,
        microbatch: advice.microbatch,
        microbatches: advice.microbatches,
        windows: advice.windows,
        step,
        passes,
        computes: advice.computes.as_secs_f64(),
        all_reduce,
        tokens_per_second,
        egress,
        losses,
        tokens_per_currency_unit: tokens_per_unit(tokens_per_second, price + egress),
        memory: advice.memory,
        workers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages of half a second forward and a second backward per token, and links without delay.
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
        let training = fleet.training().expect("it has a training");
        choices(&mut Searches::new(&fleet, 1), training)
            .expect("the planner accepts it")
            .into_iter()
            .next()
    }

    #[test]
    fn the_fleet_is_as_large_as_the_budget_allows() {
        // Two devices are one pipeline: 8 tokens in 13.5 s. Four are two pipelines with four tokens
        // each, in 4 · 1.5 + 1.5 = 7.5 s. Six are three, of which two have three tokens: 6 s. Eight
        // are four with two tokens each: 4.5 s. For 2 an hour, two dear devices or four cheap ones
        // are affordable.
        for (budget, devices, price, step) in [
            (Some(1.0), [0, 2], 1.0, 13.5),
            (Some(2.0), [0, 4], 2.0, 7.5),
            (Some(3.0), [0, 4], 2.0, 7.5),
            (Some(4.0), [2, 4], 4.0, 6.0),
            (None, [4, 4], 6.0, 4.5),
        ] {
            let best = best(budget, "").expect("it pays for two");
            let counts: Vec<usize> = best.devices.iter().map(|(_, count)| *count).collect();
            // Regions without a device are left out.
            let taken: Vec<usize> = devices.into_iter().filter(|count| *count > 0).collect();
            assert_eq!((counts, best.price, best.step), (taken, price, step), "{budget:?}");
            assert_eq!((best.microbatch, best.tokens_per_second), (1, 8.0 / step));
        }
        assert_eq!(best(Some(0.9), ""), None, "one device is no pipeline");
    }

    #[test]
    fn the_most_tokens_for_the_money_come_first_where_cost_decides() {
        let fleet = Fleet::parse(FLEET).expect("a fleet");
        let training = fleet.training().expect("it has a training");
        let mut found = choices(&mut Searches::new(&fleet, 1), training).expect("choices");
        order_by_cost(&mut found);
        let values: Vec<f64> =
            found.iter().filter_map(|choice| choice.tokens_per_currency_unit).collect();
        assert_eq!(values.len(), found.len());
        assert!(values.is_sorted_by(|one, other| one >= other), "{values:?}");
        // Four cheap devices compute 8 tokens in 7.5 s, for 2 an hour.
        assert_eq!((found[0].price, values[0]), (2.0, 8.0 / 7.5 * 3600.0 / 2.0));
        let free = FLEET.replace("price = 1.0", "price = 0").replace("price = 0.5", "price = 0");
        let fleet = Fleet::parse(&free).expect("a fleet");
        let mut found = choices(&mut Searches::new(&fleet, 1), training).expect("choices");
        order_by_cost(&mut found);
        assert!(found.iter().all(|choice| choice.tokens_per_currency_unit.is_none()));
        assert!(found[0].tokens_per_second >= found[1].tokens_per_second);
    }

    #[test]
    fn a_model_that_does_not_fit_is_not_recommended() {
        assert_eq!(best(None, "state = 100\nmemory = 49\n"), None);
        let best = best(None, "state = 100\nkept = 1\nmemory = 52\n")
            .expect("half of it and some tokens fit");
        // Each stage has two tokens in flight, and stores half a byte of each.
        assert_eq!(best.memory, 51.0);
    }

    #[test]
    fn invalid_training_values_are_refused() {
        for more in [
            "budget = -1",
            "memory = nan",
            "staleness = 5",
            "overhead = 1e4",
            "host_link = 0",
            "layers = 0",
        ] {
            let error = Fleet::parse(&format!("{FLEET}{more}\n")).expect_err(more).to_string();
            assert!(error.contains("[training]"), "{more}: {error}");
        }
    }
}
