//! Compares DT-FM's published placements with Shoal's: prints the table of docs/benchmarks/swarms.md.
//!
//! Arguments: the searches of each case (5), the orders in which peers arrive (10), and the number of cases (3).

use std::time::{Duration, Instant};

use shoal_protocol::units::Bytes;
use shoal_scheduler::planner::cases::{CASES, Case, STAGES, TRAFFIC};
use shoal_scheduler::planner::{Cost, CostModel, Effort, PlanError, random_groups, search};
use shoal_scheduler::rng::Rng;
use shoal_scheduler::sim::{self, Mark, Regional};

/// Number of random placements in the mean.
const RANDOM: u32 = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (seeds, orders, cases) = (next(5)?, next(10)?, next(CASES.len() as u64)?);
    let cases = &CASES[..CASES.len().min(cases as usize)];
    println!("DT-FM's cases of 64 devices: modelled seconds of a step (data parallel + pipeline)");
    println!("beside the published ones (Yuan et al. 2022, arXiv 2206.01288).");
    for case in cases {
        print_case(case, seeds)?;
    }
    print_regional(cases, orders)
}

fn print_case(case: &Case, seeds: u64) -> Result<(), PlanError> {
    let model = CostModel::new(&case.network()?, TRAFFIC, STAGES)?;
    println!("\ncase {}, {}", case.number, case.name);
    let mut rng = Rng::new(1);
    let mut totals: Vec<f64> = (0..RANDOM)
        .map(|_| model.place(&random_groups(&model, &mut rng)).cost.total().as_secs_f64())
        .collect();
    totals.sort_by(f64::total_cmp);
    let mean = totals.iter().sum::<f64>() / totals.len() as f64;
    let published = case.published;
    println!(
        "  random, mean of {RANDOM}  {mean:6.2} (from {:.1} to {:.1})   published {:.1}",
        totals[0],
        totals[totals.len() - 1],
        published.random
    );
    let fixed = model.place(&case.by_region()).cost;
    println!("  stage in a region      {}   published {}", text(&fixed), published.by_region);
    for seed in 0..seeds {
        let start = Instant::now();
        let found = search(&model, &Effort::default(), &mut Rng::new(seed)).cost;
        let took = start.elapsed().as_secs_f64();
        println!(
            "  search, seed {seed}         {}   published {}   {took:.1} s of search",
            text(&found),
            published.best
        );
    }
    Ok(())
}

/// Swarms that place themselves, in the regions of each case.
fn print_regional(cases: &[Case], orders: u64) -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "\nSwarms in these regions, 4 stages, peers that arrive in any order: seconds of a step, mean of"
    );
    println!(
        "{orders} orders, without locality and with it; then the peers that changed their stages."
    );
    for (case, peers) in cases.iter().zip([8, 4, 4]) {
        for (what, weighs) in [
            ("gradients weigh most", (Bytes(1 << 20), Bytes(400_000_000))),
            ("activations weigh most", (Bytes(8 << 20), Bytes(4_000_000))),
        ] {
            let steps = (32 * (peers * case.regions.len() / 16) as u32, 60);
            let forward = Duration::from_millis(100);
            let regional = Regional { case, peers, stages: 4, steps, weighs, forward };
            let (mut times, mut moves) = ([0.0; 2], 0);
            for seed in 0..orders {
                for (time, near) in times.iter_mut().zip([false, true]) {
                    let report = sim::run(&regional.scenario(seed, near))?;
                    *time += report.step_time().as_secs_f64() / orders as f64;
                    moves += report.marks[Mark::Moved];
                }
            }
            let [without, with] = times;
            println!(
                "  {:13}  {:2} peers  {what:22}  {without:6.2}  {with:6.2}  {:.3}  {:.1}",
                case.name,
                peers * case.regions.len(),
                with / without,
                moves as f64 / orders as f64
            );
        }
    }
    Ok(())
}

fn text(cost: &Cost) -> String {
    format!(
        "{:6.2} = {:5.2} + {:5.2}",
        cost.total().as_secs_f64(),
        cost.data_parallel.as_secs_f64(),
        cost.pipeline.as_secs_f64()
    )
}
