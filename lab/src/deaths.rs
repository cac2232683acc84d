//! What deaths of devices cost a placement, for `shoal plan`: spot machines are taken away now and then.

use serde::Serialize;
use shoal_scheduler::planner::{Device, Placement};

use crate::fleet::Fleet;

/// Seconds between two checkpoints: the default of `[checkpoint] interval`.
const INTERVAL: f64 = 300.0;

/// The deaths of a placement's devices and what they cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Losses {
    /// Deaths in an hour.
    pub deaths: f64,
    /// Returns to a checkpoint in an hour: a stage lost its last replica.
    pub rewinds: f64,
    /// Part of the time in which steps go on.
    pub available: f64,
}

impl Losses {
    /// The losses of a placement with steps of so many seconds; none if no device has a death rate.
    ///
    /// While a device is replaced, its stage has a replica less, for which the whole pipeline waits; half a step of its
    /// work is done again. When all other replicas of a stage die meanwhile, the run stands still until one is replaced,
    /// and half an interval of checkpoints is computed again.
    pub fn of(fleet: &Fleet, placement: &Placement, step: f64) -> Option<Self> {
        let replacement = fleet.replacement();
        let (mut deaths, mut rewinds, mut lost) = (0.0, 0.0, 0.0);
        for stage in &placement.stages {
            let replicas = stage.len() as f64;
            let of_stage: f64 = stage.iter().map(|device| fleet.deaths(*device)).sum();
            deaths += of_stage;
            if stage.len() > 1 {
                lost += of_stage * (replacement + step / 2.0) / replicas;
            }
            rewinds += last_deaths(fleet, stage, replacement / 3600.0);
        }
        if deaths == 0.0 {
            return None;
        }
        lost += rewinds * (replacement + INTERVAL / 2.0);
        Some(Self { deaths, rewinds, available: 3600.0 / (3600.0 + lost) })
    }
}

/// How often in an hour a device of a stage dies and all others follow within the hours until it is replaced.
fn last_deaths(fleet: &Fleet, stage: &[Device], replacement: f64) -> f64 {
    let one = |first: usize| {
        let others = stage.iter().enumerate().filter(|(at, _)| *at != first);
        let follow: f64 =
            others.map(|(_, other)| (fleet.deaths(*other) * replacement).min(1.0)).product();
        fleet.deaths(stage[first]) * follow
    };
    (0..stage.len()).map(one).sum()
}

#[cfg(test)]
mod tests {
    use shoal_scheduler::planner::CostModel;

    use super::*;

    fn losses(devices: usize, stages: usize, more: &str) -> Option<Losses> {
        let text = format!(
            "stages = [{stages}]\nactivations = 0\ngradient = 0\n{more}\n\
             within = {{ delay = 0, bandwidth = 1e9 }}\n\
             region = [{{ name = \"spot\", devices = {devices}, deaths = 0.5 }}]\n"
        );
        let text =
            if more.contains("none") { text.replace("deaths = 0.5", "deaths = 0") } else { text };
        let fleet = Fleet::parse(&text).expect("a fleet");
        let network = fleet.network().expect("a network");
        let model = CostModel::new(&network, fleet.traffic(stages), stages).expect("a model");
        let devices: Vec<Device> = (0..devices).map(Device).collect();
        let groups: Vec<Vec<Device>> =
            devices.chunks(devices.len() / stages).map(<[Device]>::to_vec).collect();
        Losses::of(&fleet, &model.place(&groups), 10.0)
    }

    #[test]
    fn a_lone_replica_takes_the_run_back_whenever_it_dies() {
        let found = losses(2, 2, "replacement = 450.0").expect("they die");
        // Once an hour 450 s until it is replaced and 150 s that are computed again.
        assert_eq!((found.deaths, found.rewinds), (1.0, 1.0));
        assert!((found.available - 3600.0 / 4200.0).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn replicas_make_returns_rare_and_deaths_cheap() {
        let found = losses(4, 2, "").expect("they die");
        // Each stage loses its second replica within five minutes of the first once in 24 hours.
        assert!((found.deaths - 2.0).abs() < 1e-12, "{found:?}");
        assert!((found.rewinds - 2.0 * 2.0 * 0.5 * 0.5 / 12.0).abs() < 1e-12, "{found:?}");
        let lost = 2.0 * 305.0 / 2.0 + found.rewinds * 450.0;
        assert!((found.available - 3600.0 / (3600.0 + lost)).abs() < 1e-12, "{found:?}");
        let three = losses(6, 2, "").expect("they die");
        assert!(three.rewinds < found.rewinds / 4.0, "{three:?}");
    }

    #[test]
    fn machines_that_stay_lose_nothing() {
        assert_eq!(losses(2, 1, "# none"), None);
    }
}
