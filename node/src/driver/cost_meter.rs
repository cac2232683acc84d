//! The cost of a run, from the prices of its members.

use shoal_protocol::message::View;
use shoal_protocol::units::{Moment, Price};

/// Adds up what the members of a run cost during their lives, as this peer sees the membership.
#[derive(Debug, Default)]
pub(super) struct CostMeter {
    /// The sum of the members' prices, in millionths of a unit of currency for an hour; `None` if
    /// no member has one.
    hourly: Option<u64>,
    /// The moment up to which the cost is added up.
    until: Moment,
    /// Units of currency since the last step; `None` if no member had a price.
    spent: Option<f64>,
}

impl CostMeter {
    /// Takes in the membership from now on.
    pub(super) fn members(&mut self, now: Moment, view: &View) {
        self.add(now);
        let prices = view.members.iter().filter_map(|record| record.price);
        self.hourly = prices.map(Price::millionths).reduce(u64::saturating_add);
    }

    /// Returns the cost since the last step, in units of currency, and begins the next.
    pub(super) fn step(&mut self, now: Moment) -> Option<f64> {
        self.add(now);
        self.spent.take()
    }

    fn add(&mut self, now: Moment) {
        if let Some(hourly) = self.hourly {
            let hours = now.since(self.until).as_secs_f64() / 3600.0;
            *self.spent.get_or_insert(0.0) += hours * hourly as f64 / 1e6;
        }
        self.until = now;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::ids::{Incarnation, Member, PeerId, StageSpan};
    use shoal_protocol::message::MemberRecord;

    use super::*;

    fn hour(hours: u64) -> Moment {
        Moment(Duration::from_secs(hours * 3600))
    }

    fn view(prices: &[Option<&str>]) -> View {
        let record = |(number, price): (usize, &Option<&str>)| MemberRecord {
            price: price.map(|price| price.parse().expect("a price")),
            ..MemberRecord::plain(
                Member { peer: PeerId([number as u8; 32]), incarnation: Incarnation(1) },
                StageSpan::none(),
            )
        };
        let members = prices.iter().enumerate().map(record).map(Into::into).collect();
        View { number: 1, members }
    }

    #[test]
    fn a_step_costs_the_lives_of_its_members() {
        let mut meter = CostMeter::default();
        meter.members(hour(1), &view(&[Some("0.5"), None]));
        meter.members(hour(3), &view(&[Some("0.5"), None, Some("2")]));
        assert_eq!(meter.step(hour(4)), Some(3.5));
        assert_eq!(meter.step(hour(5)), Some(2.5));
        // The last member with a price leaves within the step.
        meter.members(hour(6), &view(&[None]));
        assert_eq!(meter.step(hour(9)), Some(2.5));
        assert_eq!(meter.step(hour(10)), None);
    }

    #[test]
    fn a_run_without_prices_has_no_cost() {
        let mut meter = CostMeter::default();
        meter.members(hour(1), &view(&[None, None]));
        assert_eq!(meter.step(hour(2)), None);
    }

    #[test]
    fn a_price_of_nothing_is_a_price() {
        let mut meter = CostMeter::default();
        meter.members(hour(1), &view(&[Some("0")]));
        assert_eq!(meter.step(hour(2)), Some(0.0));
    }
}
