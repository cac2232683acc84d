//! Placements with known cost, and properties of all placements.

use std::time::Duration;

use proptest::prelude::*;
use shoal_protocol::units::{Bytes, Rate};

use super::cases::{CASES, Case, STAGES, TRAFFIC};
use super::*;
use crate::rng::Rng;

fn model(case: &Case) -> CostModel {
    let network = case.network().expect("a case is a network");
    CostModel::new(&network, TRAFFIC, STAGES).expect("a case can be planned")
}

fn seconds(cost: Duration) -> f64 {
    cost.as_secs_f64()
}

#[test]
fn placement_by_region_has_the_published_cost() {
    let parts = [(1.83, 15.81), (4.62, 34.62), (4.62, 54.82)];
    for (case, (data_parallel, pipeline)) in CASES.iter().zip(parts) {
        let cost = model(case).place(&case.by_region()).cost;
        assert!((seconds(cost.data_parallel) - data_parallel).abs() < 0.01, "{cost:?}");
        assert!((seconds(cost.pipeline) - pipeline).abs() < 0.01, "{cost:?}");
        assert!((seconds(cost.total()) - case.published.by_region).abs() < 0.01, "{cost:?}");
    }
}

#[test]
fn random_placements_have_about_the_published_cost() {
    for case in &CASES {
        let (model, mut rng) = (model(case), Rng::new(1));
        let total = |rng: &mut Rng| seconds(model.place(&random_groups(&model, rng)).cost.total());
        let mean = (0..200).map(|_| total(&mut rng)).sum::<f64>() / 200.0;
        // The published value is a mean of few, and the placements of a case differ by tens of
        // percent.
        assert!((mean / case.published.random - 1.0).abs() < 0.05, "{}: {mean}", case.name);
    }
}

#[test]
fn a_short_search_is_as_good_as_the_published_one() {
    for case in &CASES[..2] {
        let found = search(&model(case), &Effort::default(), &mut Rng::new(1));
        assert!(seconds(found.cost.total()) < case.published.best + 0.01, "{:?}", found.cost);
    }
}

#[test]
fn a_short_search_beats_placement_by_region_worldwide() {
    let model = model(&CASES[2]);
    let effort = Effort { population: 6, children: 12, exchanges: 4096 };
    let found = search(&model, &effort, &mut Rng::new(1));
    assert!(found.cost.total() < model.place(&CASES[2].by_region()).cost.total());
}

#[test]
fn impossible_placements_are_refused() {
    let link = |_, _| Link { delay: Duration::ZERO, rate: Rate(1) };
    let refused = |devices, stages| {
        let network = Network::new(devices, link).expect("links have a rate");
        CostModel::new(&network, TRAFFIC, stages).expect_err("not placed")
    };
    assert_eq!(refused(0, 1), PlanError::NoDevices);
    assert_eq!(refused(4, 0), PlanError::Stages { stages: 0 });
    assert_eq!(
        refused(MAX_STAGES + 1, MAX_STAGES + 1),
        PlanError::Stages { stages: MAX_STAGES + 1 }
    );
    let uneven = refused(10, 4);
    assert_eq!(uneven, PlanError::Uneven { devices: 10, stages: 4 });
    assert!(uneven.to_string().contains("leave 2 out"), "{uneven}");
}

/// A random network, and its number of stages.
fn random_network() -> impl Strategy<Value = (CostModel, u64)> {
    let size = (1usize..5, 1usize..4);
    (size, 0u64..1000, 1u64..4).prop_map(|((stages, replicas), seed, kinds)| {
        let mut rng = Rng::new(seed);
        let devices = stages * replicas;
        let pairs = devices * devices;
        let any: Vec<(u64, u64)> =
            (0..pairs).map(|_| (rng.number() % (100 * kinds), 1 + rng.number() % 5000)).collect();
        let link = |from: Device, to: Device| {
            let (delay, rate) = any[from.0 * devices + to.0];
            Link { delay: Duration::from_millis(delay), rate: Rate(rate * 1000) }
        };
        let network = Network::new(devices, link).expect("links have a rate");
        let traffic = Traffic { activations: Bytes(1_000_000), gradient: Bytes(3_000_000) };
        (CostModel::new(&network, traffic, stages).expect("stages are even"), seed)
    })
}

proptest! {
    #[test]
    fn the_cost_does_not_depend_on_the_order_in_groups_or_of_groups((model, seed) in random_network()) {
        let mut rng = Rng::new(seed);
        let mut groups = random_groups(&model, &mut rng);
        let before = model.place(&groups);
        rng.shuffle(&mut groups);
        groups.iter_mut().for_each(|group| rng.shuffle(group));
        prop_assert_eq!(before.cost, model.place(&groups).cost);
    }

    #[test]
    fn a_placement_names_the_components_of_its_cost((model, seed) in random_network()) {
        let placed = model.place(&random_groups(&model, &mut Rng::new(seed)));
        let slowest = placed.busiest.iter().map(|one| one.time).max();
        prop_assert_eq!(slowest, Some(placed.cost.data_parallel));
        let boundaries: Duration = placed.boundaries.iter().map(|one| one.time).sum();
        prop_assert_eq!(boundaries, placed.cost.pipeline);
        // Placing a placement again changes nothing.
        prop_assert_eq!(model.place(&placed.stages).cost, placed.cost);
    }

    #[test]
    fn the_search_is_deterministic_and_no_worse_than_grouping_near_devices((model, seed) in random_network()) {
        let effort = Effort { population: 3, children: 5, exchanges: 64 };
        let found = search(&model, &effort, &mut Rng::new(seed));
        prop_assert_eq!(&found, &search(&model, &effort, &mut Rng::new(seed)));
        let mut there: Vec<usize> = found.stages.iter().flatten().map(|one| one.0).collect();
        there.sort_unstable();
        prop_assert_eq!(there, (0..model.devices()).collect::<Vec<_>>());
        // The search starts from it and never gets worse.
        let together = model.place(&super::search::nearest_together(&model));
        prop_assert!(found.cost.total() <= together.cost.total());
    }
}
