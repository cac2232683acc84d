//! `shoal plan`: places the stages of a model on the devices of a fleet, and explains the placement.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::json;
use shoal_engine::base;
use shoal_formats::config::{RunConfig, read_text};
use shoal_lab::advice::{advice, devices, each, stages_of};
use shoal_lab::budget::{Choice, Searches, choices, order_by_cost};
use shoal_lab::fleet::Fleet;
use shoal_lab::machines::{self, machines};
use shoal_lab::plan_work::RunWork;
use shoal_lab::spans::{self, spans};
use shoal_protocol::manifest::Model;
use shoal_protocol::units::Bytes;
use shoal_scheduler::planner::{
    CostModel, Device, Effort, Network, Placement, PlanError, random_groups, search,
};
use shoal_scheduler::rng::Rng;

use super::hub;
use super::init::fine_tuned;
use super::run_work;
use crate::cli::{PlanArgs, PlanOrder};
use crate::config_sources::OnDisk;
use crate::dataset;
use crate::exit::{Exit, ExitWith};
use crate::terminal::{out, outln};

/// Random placements whose mean cost is printed for comparison.
const RANDOM: usize = 100;

/// Plans for a fleet and prints the plan.
///
/// # Errors
/// If the file describes no valid fleet, or the planner rejects it.
pub(super) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let work = match &args.model {
        Some(model) => Some(work_of_model(args, model)?),
        None => args.run.as_deref().map(work_of).transpose()?,
    };
    let fleet = read(&args.fleet, work.as_ref()).exit_with(Exit::Usage)?;
    let Some(training) = fleet.training() else {
        let plans = plans(&fleet, args.seed).exit_with(Exit::Usage)?;
        if args.json {
            outln!("{}", serde_json::to_string_pretty(&plans)?);
        } else {
            out!("{}", text(&plans));
        }
        return Ok(());
    };
    let mut searches = Searches::new(&fleet, args.seed);
    let mut choices = choices(&mut searches, training).exit_with(Exit::Usage)?;
    if args.order == PlanOrder::Cost {
        order_by_cost(&mut choices);
    }
    let spans = spans(&mut searches, training).exit_with(Exit::Usage)?;
    let machines = machines(&fleet, training);
    if spans.best().is_none() && machines.iter().all(|region| region.fastest.is_none()) {
        return Err(anyhow!(NOTHING_FITS)).exit_with(Exit::Usage);
    }
    let Some(best) = choices.first() else {
        // A stage fits nowhere: only swapped spans do, or machines.
        if args.json {
            let all = json!({ "spans": spans, "machines": machines });
            outln!("{}", serde_json::to_string_pretty(&all)?);
        } else {
            out!("{}{}", spans::text(&spans), machines::text(&machines));
        }
        return Ok(());
    };
    let counts: Vec<usize> = (0..fleet.regions()).map(|at| taken(&fleet, at, best)).collect();
    let chosen = fleet.part(&counts).with_stages(best.stages);
    let plans = plans(&chosen, args.seed).exit_with(Exit::Usage)?;
    if args.json {
        let all = json!({
            "choices": choices, "spans": spans, "machines": machines, "plans": plans
        });
        outln!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        let advice = advice(&choices, training.budget);
        let machines = machines::text(&machines);
        out!("{advice}{}{machines}\n{}", spans::text(&spans), text(&plans));
        if let (Some(work), Some(plan)) = (work, plans.first()) {
            out!("{}", to_do(&fleet, &work, best, plan));
        }
    }
    Ok(())
}

/// The error if no part of the fleet fits.
const NOTHING_FITS: &str = "no part of the fleet fits: raise the budget or the memory, allow other numbers of \
                            stages, or enlarge the step";

/// The error for a run of virtual workers.
const HAS_WORKERS: &str = "the run has [outer]: leave the section out, and the plan says whether virtual workers are faster";

fn read(path: &Path, work: Option<&RunWork>) -> anyhow::Result<Fleet> {
    let text = read_text(path, LARGEST_FLEET)
        .with_context(|| format!("cannot read the fleet {}", path.display()))?;
    let fleet = match work {
        Some(work) => Fleet::for_run(&text, work),
        None => Fleet::parse(&text),
    };
    fleet.with_context(|| format!("{} is not a valid fleet", path.display()))
}

/// The work of the run of a configuration.
fn work_of(path: &Path) -> anyhow::Result<RunWork> {
    let config = RunConfig::load(path, &OnDisk).exit_with(Exit::Usage)?;
    let scratch = tempfile::tempdir().context("there is no room for temporary files")?;
    if config.outer.is_some() {
        return Err(anyhow!(HAS_WORKERS)).exit_with(Exit::Usage);
    }
    Ok(run_work::run_work(&dataset::prepare(&config, scratch.path())?.manifest))
}

/// The work of a run from a model of which nothing but its configuration is here.
fn work_of_model(args: &PlanArgs, model: &str) -> anyhow::Result<RunWork> {
    hub::check_model(model).exit_with(Exit::Usage)?;
    let described = base::describe(&hub::local_config(model)?).exit_with(Exit::Usage)?;
    let longest = described.context;
    let context = args.context;
    if !(1..=longest).contains(&context) {
        return Err(anyhow!(
            "--context {context}: {model} has positions for 1 to {longest} tokens"
        ))
        .exit_with(Exit::Usage);
    }
    let size = u64::from(described.hidden) * u64::from(described.layers);
    let config = fine_tuned(Model { context, ..described }, size, (args.lora, args.nf4));
    let manifest = config.with_enough_tokens().exit_with(Exit::Usage)?;
    manifest.check().exit_with(Exit::Usage)?;
    Ok(run_work::run_work(&manifest))
}

/// Devices of a region that a choice takes.
fn taken(fleet: &Fleet, region: usize, best: &Choice) -> usize {
    let named = best.devices.iter().find(|(name, _)| name == fleet.region(region));
    named.map_or(0, |(_, count)| *count)
}

/// What to write and to type for the best choice, and which devices it leaves out.
fn to_do(fleet: &Fleet, work: &RunWork, best: &Choice, plan: &Plan) -> String {
    let mut text = String::new();
    let Choice { stages, microbatch, .. } = best;
    let size = microbatch / work.sequence;
    let count = work.tokens / microbatch;
    let _ = writeln!(
        text,
        "\nIn run.toml, [training]: stages = {stages}, microbatch_size = {size}, microbatches = {count}"
    );
    for (number, stage) in plan.stages.iter().enumerate() {
        for (region, devices) in &stage.regions {
            let _ = writeln!(
                text,
                "  {} in {region}: shoal join ADDRESS --stage {number}",
                each(*devices)
            );
        }
    }
    for region in 0..fleet.regions() {
        let idle = fleet.devices_of(region) - taken(fleet, region, best);
        if idle > 0 {
            let (name, reason) = (fleet.region(region), idle_reason(fleet, region, best));
            let _ = writeln!(
                text,
                "  {} in {name} {}: {reason}",
                devices(idle),
                if idle == 1 { "is idle" } else { "are idle" }
            );
        }
    }
    text
}

/// Why a choice leaves devices of a region out.
fn idle_reason(fleet: &Fleet, region: usize, best: &Choice) -> String {
    let budget = fleet.training().and_then(|training| training.budget);
    let more = fleet.price(region) * best.stages as f64;
    if budget.is_some_and(|budget| best.per_hour() + more > budget) {
        format!("{} more would exceed the budget", devices(best.stages))
    } else {
        "links to them would make a step longer than they make it shorter".to_owned()
    }
}

/// The most bytes of a file. 64 regions with a link for every pair fit.
const LARGEST_FLEET: Bytes = Bytes::mebi(1);

/// One plan. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Plan {
    stages: Vec<StagePlan>,
    /// Sum of the data-parallel and the pipeline cost.
    total: f64,
    data_parallel: f64,
    pipeline: f64,
    /// Mean cost of random placements.
    random: f64,
}

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct StagePlan {
    /// Its devices. Devices at the same position of consecutive stages exchange activations.
    devices: Vec<String>,
    /// Number of devices by region.
    regions: BTreeMap<String, usize>,
    /// Seconds of its all-reduce, and the device that it waits for.
    all_reduce: f64,
    busiest: String,
    /// The slowest link between that device and another one of the stage; none if it is alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    slowest: Option<SlowestLink>,
    /// The slowest pair at the boundary to the next stage; none for the last stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    onward: Option<Onward>,
}

/// The slowest pair at a stage boundary.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Onward {
    /// Seconds for the activations forward and the gradients back.
    seconds: f64,
    #[serde(flatten)]
    link: SlowestLink,
}

/// One direction of a link.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct SlowestLink {
    from: String,
    to: String,
    delay: f64,
    bytes_per_second: u64,
}

impl SlowestLink {
    fn new(fleet: &Fleet, network: &Network, from: Device, to: Device) -> Self {
        let link = network.link(from, to);
        Self {
            from: fleet.name(from),
            to: fleet.name(to),
            delay: link.delay.as_secs_f64(),
            bytes_per_second: link.rate.0,
        }
    }
}

impl fmt::Display for SlowestLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (milliseconds, rate) = (self.delay * 1e3, self.bytes_per_second as f64 / 1e6);
        write!(f, "{} - {} ({milliseconds:.0} ms, {rate:.1} MB/s)", self.from, self.to)
    }
}

/// A plan for each number of stages of the fleet, the cheapest first.
fn plans(fleet: &Fleet, seed: u64) -> Result<Vec<Plan>, PlanError> {
    let network = fleet.network()?;
    let plan = |stages: usize| {
        let model = CostModel::new(&network, fleet.traffic(stages), stages)?;
        let mut rng = Rng::new(seed);
        let sample = |_| model.place(&random_groups(&model, &mut rng)).cost.total().as_secs_f64();
        let random = (0..RANDOM).map(sample).sum::<f64>() / RANDOM as f64;
        let effort = Effort::for_size(model.devices(), stages);
        let found = search(&model, &effort, &mut Rng::new(seed));
        Ok(describe(fleet, &network, &found, random))
    };
    let mut plans = fleet.stages().into_iter().map(plan).collect::<Result<Vec<_>, _>>()?;
    plans.sort_by(|one, other| one.total.total_cmp(&other.total));
    Ok(plans)
}

fn describe(fleet: &Fleet, network: &Network, found: &Placement, random: f64) -> Plan {
    let onward = |stage: usize| {
        let slowest = found.boundaries.get(stage)?;
        let link = SlowestLink::new(fleet, network, slowest.from, slowest.to);
        Some(Onward { seconds: slowest.time.as_secs_f64(), link })
    };
    let slowest = |devices: &[Device], busiest: Device| {
        let others = devices.iter().copied().filter(|other| *other != busiest);
        let other = others.min_by_key(|other| network.link(busiest, *other).rate)?;
        Some(SlowestLink::new(fleet, network, busiest, other))
    };
    let stages = found.stages.iter().zip(&found.busiest).enumerate();
    let stages = stages.map(|(index, (devices, busiest))| StagePlan {
        devices: devices.iter().map(|device| fleet.name(*device)).collect(),
        regions: regions(fleet, devices),
        all_reduce: busiest.time.as_secs_f64(),
        busiest: fleet.name(busiest.device),
        slowest: slowest(devices, busiest.device),
        onward: onward(index),
    });
    Plan {
        stages: stages.collect(),
        total: found.cost.total().as_secs_f64(),
        data_parallel: found.cost.data_parallel.as_secs_f64(),
        pipeline: found.cost.pipeline.as_secs_f64(),
        random,
    }
}

fn regions(fleet: &Fleet, devices: &[Device]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for device in devices {
        *counts.entry(fleet.region(fleet.home(*device).0).to_owned()).or_default() += 1;
    }
    counts
}

/// The cheapest plan as a table with an explanation, and a line for each other plan.
fn text(plans: &[Plan]) -> String {
    let mut text = String::new();
    for (index, plan) in plans.iter().enumerate() {
        let number = plan.stages.len();
        let each = plan.stages.first().map_or(0, |stage| stage.devices.len());
        let _ = writeln!(
            text,
            "{} of {}: {:.2} s of a step on links = {:.2} all-reduce + {:.2} \
             between stages; random placement: {:.2} s",
            stages_of(number),
            devices(each),
            plan.total,
            plan.data_parallel,
            plan.pipeline,
            plan.random
        );
        if index == 0 {
            table(plan, &mut text);
        }
    }
    text
}

fn table(plan: &Plan, text: &mut String) {
    let places = |stage: &StagePlan| {
        let all = stage.regions.iter().map(|(region, count)| format!("{count} {region}"));
        all.collect::<Vec<_>>().join(", ")
    };
    let widest = plan.stages.iter().map(|stage| places(stage).chars().count()).max().unwrap_or(0);
    let widest = widest.max("devices".len());
    let _ = writeln!(
        text,
        "  stage  {:widest$}  all-reduce, waits for       to the next stage, slowest pair",
        "devices"
    );
    for (number, stage) in plan.stages.iter().enumerate() {
        let _ = write!(
            text,
            "  {number:5}  {:widest$}  {:7.2} s  {:16}",
            places(stage),
            stage.all_reduce,
            stage.busiest
        );
        if let Some(onward) = &stage.onward {
            let _ = write!(text, "  {:7.2} s  {}", onward.seconds, onward.link);
        }
        let _ = writeln!(text);
    }
    bottlenecks(plan, text);
}

/// Names the links that the plan waits for.
fn bottlenecks(plan: &Plan, text: &mut String) {
    let slowest =
        plan.stages.iter().enumerate().max_by(|a, b| a.1.all_reduce.total_cmp(&b.1.all_reduce));
    if let Some((number, link)) =
        slowest.and_then(|(number, it)| Some((number, it.slowest.as_ref()?)))
    {
        let _ = writeln!(text, "  All-reduces wait for stage {number}, most for {link}.");
    }
    let onward = plan.stages.iter().filter_map(|stage| stage.onward.as_ref());
    if let Some(slowest) = onward.max_by(|a, b| a.seconds.total_cmp(&b.seconds)) {
        let _ = writeln!(text, "  The slowest boundary waits for {}.", slowest.link);
    }
}

#[cfg(test)]
mod tests {
    use shoal_scheduler::planner::cases::{CASES, Case, STAGES, TRAFFIC};

    use super::*;

    const FILES: [&str; 3] = [
        include_str!("../../../docs/fleets/dt-fm-3.toml"),
        include_str!("../../../docs/fleets/dt-fm-4.toml"),
        include_str!("../../../docs/fleets/dt-fm-5.toml"),
    ];

    fn same_links(fleet: &Network, case: &Case) -> bool {
        let published = case.network().expect("a case is a network");
        let devices = || (0..published.devices()).map(Device);
        let mut pairs = devices().flat_map(|from| devices().map(move |to| (from, to)));
        pairs.all(|(from, to)| fleet.link(from, to) == published.link(from, to))
    }

    #[test]
    fn the_example_files_are_the_published_cases() {
        for (file, case) in FILES.iter().zip(&CASES) {
            let fleet = Fleet::parse(file).expect(case.name);
            assert_eq!(fleet.traffic(STAGES), TRAFFIC);
            assert!(same_links(&fleet.network().expect(case.name), case), "{}", case.name);
        }
    }

    #[test]
    fn a_plan_states_its_cost_and_bottlenecks() {
        let fleet = Fleet::parse(FILES[0]).expect("a fleet");
        let plans = plans(&fleet, 1).expect("a plan");
        let [plan] = plans.as_slice() else { panic!("one number of stages: {plans:?}") };
        assert!((plan.total - 16.09).abs() < 0.01 && plan.random > plan.total, "{plan:?}");
        let all: usize = plan.stages.iter().flat_map(|stage| stage.regions.values()).sum();
        assert_eq!((plan.stages.len(), all), (8, 64));
        assert!(plan.stages[7].onward.is_none());
        let text = text(&plans);
        for words in
            ["8 stages of 8 devices: 16.09 s", "All-reduces wait for stage", "Virginia", "MB/s"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    /// Six devices in two places, of which a budget has room for four.
    const FOR_A_RUN: &str = r#"
within = { delay = 0.001, bandwidth = 1e9 }
between = { delay = 0.05, bandwidth = 2e7 }
region = [{ name = "near", devices = 4, price = 1.0 }, { name = "far", devices = 2, price = 2.0 }]
[device]
flops = 1e9
memory = 8e9
budget = 4.0
"#;

    #[test]
    fn a_run_tells_what_a_fleet_computes() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = folder.path().join("run.toml");
        let defaults = RunConfig::default();
        std::fs::write(&config, defaults.to_toml()).expect("it can be written");
        let work = work_of(&config).expect("the default configuration trains");
        let (model, training) = (&defaults.model, &defaults.training);
        let tokens = training.microbatches * training.microbatch_size * model.context;
        assert_eq!((work.tokens, work.sequence), (tokens.into(), model.context.into()));
        assert_eq!(work.layers, model.layers as usize);
        assert!(work.backward == 2.0 * work.forward && work.kept > 0.0 && work.state > 0.0);

        let fleet = Fleet::for_run(FOR_A_RUN, &work).expect("a fleet");
        // The default model has four layers, and four does not divide six devices.
        assert!(fleet.stages().into_iter().eq([1, 2, 3]));
        let mut searches = Searches::new(&fleet, 1);
        let training = fleet.training().expect("it follows from the run");
        let choices = choices(&mut searches, training).expect("a choice");
        let best = choices.first().expect("devices have room");
        assert_eq!((taken(&fleet, 0, best), taken(&fleet, 1, best)), (4, 0));
        let part = fleet.part(&[4, 0]).with_stages(best.stages);
        let plans = super::plans(&part, 1).expect("a plan");
        let text = to_do(&fleet, &work, best, &plans[0]);
        for words in
            ["shoal join ADDRESS --stage 0", "2 devices in far are idle", "exceed the budget"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn what_follows_from_a_run_is_not_given_twice() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = folder.path().join("run.toml");
        std::fs::write(&config, RunConfig::default().to_toml()).expect("it can be written");
        let work = work_of(&config).expect("the default configuration trains");
        let without_device = FOR_A_RUN.split("[device]").next().expect("a part").to_owned();
        for (text, reason) in [
            (format!("gradient = 1e9\n{FOR_A_RUN}"), "`gradient` follows from the run"),
            (without_device.clone(), "--for run.toml"),
            (FOR_A_RUN.replace("flops = 1e9", "flops = 0"), "flops are operations a second"),
            (FOR_A_RUN.replace("8e9", "nan"), "sizes up to"),
        ] {
            let error = Fleet::for_run(&text, &work).expect_err(&text).to_string();
            assert!(error.contains(reason), "{error}: {reason}");
        }
        let adapted = RunWork { is_adapted: true, ..work };
        let swaps = FOR_A_RUN.replace("budget = 4.0", "host_link = 1e9");
        let error = Fleet::for_run(&swaps, &adapted).expect_err("adapters").to_string();
        assert!(error.contains("not for adapters"), "{error}");
        let error = Fleet::parse(FOR_A_RUN).expect_err("no run").to_string();
        assert!(error.contains("--for run.toml"), "{error}");
        let error = Fleet::parse(&without_device).expect_err("no stages").to_string();
        assert!(error.contains("`stages` is missing"), "{error}");
    }

    #[test]
    fn the_cheapest_number_of_stages_is_first() {
        let text = FILES[0].replace("stages = [8]", "stages = [4, 2]");
        let plans = plans(&Fleet::parse(&text).expect("a fleet"), 1).expect("plans");
        assert!(plans.len() == 2 && plans[0].total < plans[1].total, "{plans:?}");
        let uneven = FILES[0].replace("stages = [8]", "stages = [7]");
        let error = super::plans(&Fleet::parse(&uneven).expect("a fleet"), 1).expect_err("uneven");
        assert!(error.to_string().contains("leave 1 out"), "{error}");
    }
}
