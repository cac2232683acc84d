//! Whom to ask, and when again.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::ProbeReport;
use shoal_protocol::units::Moment;

use super::classify::{judge, widest};
use super::state::{OwnPort, Scope};

/// Answers that are enough, of those that count.
const ENOUGH: usize = 2;

/// Peers that are asked in one look at most.
const ASKED: usize = 6;

/// From one look to the next: firewalls and routers are changed now and then.
const AGAIN: Duration = Duration::from_secs(10 * 60);

/// What happened.
#[derive(Debug)]
pub(crate) enum Input {
    /// A connection leads straight to this peer.
    Near(PeerId),
    /// It does no more.
    Gone(PeerId),
    /// What came of asking; nothing where it did not ring.
    Asked(PeerId, Option<ProbeReport>),
    /// A router passes on another port than before.
    Moved,
    /// Time went by.
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask this peer to ring.
    Ask(PeerId),
    /// The port stands otherwise than it did.
    Tell(OwnPort),
}

/// Finds out how this peer's own port stands.
#[derive(Debug)]
pub(crate) struct Scout {
    /// The machine's own address.
    own: IpAddr,
    near: BTreeSet<PeerId>,
    /// In this look.
    asked: BTreeSet<PeerId>,
    probe_reports: Vec<ProbeReport>,
    waits: Option<PeerId>,
    again: Option<Moment>,
    told: OwnPort,
}

impl Scout {
    pub(crate) fn new(own: IpAddr) -> Self {
        Self {
            own,
            near: BTreeSet::new(),
            asked: BTreeSet::new(),
            probe_reports: Vec::new(),
            waits: None,
            again: None,
            told: OwnPort::Unknown,
        }
    }

    /// When time matters next.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        self.again
    }

    pub(crate) fn handle(&mut self, now: Moment, input: Input) -> Vec<Action> {
        let mut actions = Vec::new();
        match input {
            Input::Near(peer) => {
                self.near.insert(peer);
            }
            Input::Gone(peer) => {
                self.near.remove(&peer);
            }
            Input::Asked(peer, probe_report) => {
                if self.waits == Some(peer) {
                    self.waits = None;
                }
                if let Some(probe_report) = probe_report {
                    self.probe_reports.push(probe_report);
                    actions.extend(self.news());
                }
            }
            Input::Moved => self.look_again(),
            Input::Tick if self.again.is_some_and(|again| again <= now) => self.look_again(),
            Input::Tick => {}
        }
        actions.extend(self.ask(now));
        actions
    }

    fn look_again(&mut self) {
        self.asked.clear();
        self.probe_reports.clear();
        self.again = None;
    }

    fn news(&mut self) -> Option<Action> {
        let found = judge(&self.probe_reports, self.own);
        let news = found != self.told;
        self.told = found;
        news.then_some(Action::Tell(found))
    }

    /// The next peer to ask, one at a time.
    fn ask(&mut self, now: Moment) -> Option<Action> {
        if self.waits.is_some() || self.asked.len() >= ASKED || self.knows_enough() {
            return None;
        }
        let peer = *self.near.difference(&self.asked).next()?;
        self.asked.insert(peer);
        self.waits = Some(peer);
        self.again = Some(Moment(now.0 + AGAIN));
        Some(Action::Ask(peer))
    }

    /// Whether more answers would change nothing. Of who sees this machine from within its own network
    /// there is none that is enough.
    fn knows_enough(&self) -> bool {
        let counted = widest(&self.probe_reports);
        let far = counted
            .first()
            .is_some_and(|probe_report| Scope::of(probe_report.seen.ip()) == Scope::World);
        let open = counted.iter().any(|probe_report| !probe_report.heard.is_empty());
        far && (open || counted.len() >= ENOUGH)
    }
}

#[cfg(test)]
mod tests {
    use super::super::classify::tests::probe_report;
    use super::*;

    const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    /// One after the other, as the machine that drives it does.
    fn told(scout: &mut Scout, now: Moment, near: &[ProbeReport]) -> (Vec<PeerId>, Vec<OwnPort>) {
        let (mut asked, mut told) = (Vec::new(), Vec::new());
        let mut inputs: Vec<Input> =
            near.iter().map(|probe_report| Input::Near(probe_report.by)).collect();
        inputs.push(Input::Tick);
        while !inputs.is_empty() {
            for action in scout.handle(now, inputs.remove(0)) {
                match action {
                    Action::Ask(peer) => {
                        asked.push(peer);
                        let probe_report =
                            near.iter().find(|probe_report| probe_report.by == peer).cloned();
                        inputs.push(Input::Asked(peer, probe_report));
                    }
                    Action::Tell(port) => told.push(port),
                }
            }
        }
        (asked, told)
    }

    #[test]
    fn one_who_gets_through_is_enough_and_two_who_do_not() {
        let mut scout = Scout::new(OWN);
        let open = [1, 2, 3].map(|by| probe_report(by, "203.0.113.9:40000", &[7410]));
        assert_eq!(told(&mut scout, at(0), &open).0, [peer(1)]);
        let mut scout = Scout::new(OWN);
        let closed = [1, 2, 3].map(|by| probe_report(by, "203.0.113.9:40000", &[]));
        let (asked, told) = told(&mut scout, at(0), &closed);
        assert_eq!((asked.len(), told.len()), (2, 2), "{told:?}");
    }

    #[test]
    fn those_within_the_network_are_asked_and_not_believed_alone() {
        let mut scout = Scout::new(OWN);
        let mut near: Vec<ProbeReport> =
            (1..4).map(|by| probe_report(by, "10.0.0.5:7410", &[7410])).collect();
        near.push(probe_report(9, "203.0.113.9:40000", &[]));
        let (asked, told) = told(&mut scout, at(0), &near);
        assert_eq!(asked.len(), 4);
        assert!(told.last().is_some_and(OwnPort::is_closed), "{told:?}");
        let mut scout = Scout::new(OWN);
        let many: Vec<ProbeReport> =
            (1..20).map(|by| probe_report(by, "10.0.0.5:7410", &[7410])).collect();
        assert_eq!(super::tests::told(&mut scout, at(0), &many).0.len(), ASKED);
    }

    #[test]
    fn it_looks_again_after_a_while_and_tells_only_news() {
        let mut scout = Scout::new(OWN);
        let closed = [1, 2].map(|by| probe_report(by, "203.0.113.9:40000", &[]));
        let (_, first) = told(&mut scout, at(0), &closed);
        assert_eq!(first.len(), 2);
        let again = scout.next_timeout().expect("it will look again");
        assert_eq!(told(&mut scout, at(1), &closed), (vec![], vec![]), "not yet");
        let (asked, news) = told(&mut scout, again, &closed);
        assert_eq!(asked.len(), 2);
        assert_eq!(news.last(), first.last().filter(|_| !news.is_empty()));
        let open = [1, 2].map(|by| probe_report(by, "203.0.113.9:40000", &[7410]));
        let later = scout.next_timeout().expect("it will look again");
        let (_, news) = told(&mut scout, later, &open);
        assert!(matches!(news[..], [OwnPort::Open { .. }]), "{news:?}");
        // A router's new port is looked at at once.
        let asks = scout.handle(later, Input::Moved);
        assert_eq!(asks, [Action::Ask(peer(1))]);
    }

    #[test]
    fn who_does_not_ring_gives_way_to_another() {
        let mut scout = Scout::new(OWN);
        assert_eq!(scout.handle(at(0), Input::Near(peer(1))), [Action::Ask(peer(1))]);
        assert_eq!(scout.handle(at(0), Input::Near(peer(2))), [], "one at a time");
        assert_eq!(scout.handle(at(1), Input::Asked(peer(1), None)), [Action::Ask(peer(2))]);
        assert_eq!(scout.handle(at(1), Input::Gone(peer(2))), []);
        assert_eq!(scout.handle(at(2), Input::Asked(peer(2), None)), [], "nobody is left");
    }
}
