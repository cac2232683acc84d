//! What a placement sends out of its regions, where that has a price, for `shoal plan`.

use shoal_scheduler::planner::{Device, Placement};

use crate::fleet::Fleet;

/// The prices of the bytes of a step that leave their region.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Egress {
    /// Of activations and their gradients.
    pub passes: f64,
    /// Of all-reduces.
    pub all_reduce: f64,
}

impl Egress {
    /// The prices for a placement. All-reduces are taken to go straight from each device to each other one: islands of
    /// peers send less.
    pub fn of(fleet: &Fleet, placement: &Placement) -> Self {
        let stages = &placement.stages;
        let traffic = fleet.traffic(stages.len());
        let price = |from: Device, to: Device| {
            let [from, to] = [from, to].map(|device| fleet.home(device).0);
            if from == to { 0.0 } else { fleet.egress(from) }
        };
        let pairs = stages.windows(2).flat_map(|two| two[0].iter().zip(&two[1]));
        let both_ways = pairs.map(|(one, other)| price(*one, *other) + price(*other, *one));
        let passes = both_ways.sum::<f64>() * traffic.activations.0 as f64;
        let of_stage = |devices: &Vec<Device>| {
            // A device sends each other one a part of its gradient, and its own part of the result.
            let part = 2.0 * traffic.gradient.0 as f64 / devices.len().max(1) as f64;
            let from = |one: &Device| devices.iter().map(|other| price(*one, *other)).sum::<f64>();
            part * devices.iter().map(from).sum::<f64>()
        };
        Self { passes, all_reduce: stages.iter().map(of_stage).sum() }
    }

    /// The price of a step.
    pub fn of_step(&self) -> f64 {
        self.passes + self.all_reduce
    }
}

#[cfg(test)]
mod tests {
    use shoal_scheduler::planner::CostModel;

    use super::*;

    /// Two devices in each of two regions, of which one charges 0.1 for what leaves it.
    const FLEET: &str = r#"stages = [2]
activations = 4e9
gradient = 2e9
within = { delay = 0, bandwidth = 1e9 }
between = { delay = 0, bandwidth = 1e6 }
region = [{ name = "dear", devices = 2, egress = 0.1 }, { name = "free", devices = 2 }]
"#;

    fn egress(groups: [[usize; 2]; 2]) -> Egress {
        let fleet = Fleet::parse(FLEET).expect("a fleet");
        let network = fleet.network().expect("a network");
        let model = CostModel::new(&network, fleet.traffic(2), 2).expect("a model");
        let groups = groups.map(|group| group.map(Device).to_vec());
        Egress::of(&fleet, &model.place(&groups))
    }

    #[test]
    fn activations_leave_a_region_where_it_hosts_one_stage() {
        // Each of two replicas sends 2e9 bytes there, or back.
        let by_stage = egress([[0, 1], [2, 3]]);
        assert!((by_stage.passes - 0.4).abs() < 1e-9 && by_stage.all_reduce == 0.0, "{by_stage:?}");
    }

    #[test]
    fn all_reduces_leave_a_region_where_a_stage_is_in_both() {
        // Of each stage one device sends half of 1e9 bytes of gradients, and half of the result.
        let across = egress([[0, 2], [1, 3]]);
        assert!((across.all_reduce - 0.2).abs() < 1e-9 && across.passes == 0.0, "{across:?}");
        assert_eq!(across.of_step(), across.all_reduce);
    }
}
