//! Decides which peers probe the port, and when.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use shoal_formats::own_port::{OwnPort, Scope};
use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::ProbeReport;
use shoal_protocol::units::Moment;

use super::classify::{judge, widest};

/// Reports with the widest view that suffice.
const ENOUGH: usize = 2;

/// The most peers asked per attempt.
const ASKED: usize = 6;

/// Interval of attempts: the settings of firewalls and routers change.
const AGAIN: Duration = Duration::from_secs(10 * 60);

/// An input of the state machine.
#[derive(Debug)]
pub(crate) enum Input {
    /// There is a direct connection to this peer.
    Near(PeerId),
    /// The direct connection to this peer is gone.
    Gone(PeerId),
    /// The peer's report, or none if it did not probe.
    Asked(PeerId, Option<ProbeReport>),
    /// The router forwards another port.
    Moved,
    /// Time passed.
    Tick,
}

/// An action for the caller.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask this peer to probe the port.
    Ask(PeerId),
    /// Publish the port's new state.
    Tell(OwnPort),
}

/// Finds out whether other peers can reach this peer's own port.
#[derive(Debug)]
pub(crate) struct Scout {
    /// This machine's own address.
    own: IpAddr,
    near: BTreeSet<PeerId>,
    /// Peers asked in this attempt.
    asked: BTreeSet<PeerId>,
    probe_reports: Vec<ProbeReport>,
    asking: Option<PeerId>,
    again: Option<Moment>,
    last_state: OwnPort,
}

impl Scout {
    pub(crate) fn new(own: IpAddr) -> Self {
        Self {
            own,
            near: BTreeSet::new(),
            asked: BTreeSet::new(),
            probe_reports: Vec::new(),
            asking: None,
            again: None,
            last_state: OwnPort::Unknown,
        }
    }

    /// When to send the next [`Input::Tick`].
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
                if self.asking == Some(peer) {
                    self.asking = None;
                }
                if let Some(probe_report) = probe_report {
                    self.probe_reports.push(probe_report);
                    actions.extend(self.change());
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

    fn change(&mut self) -> Option<Action> {
        let found = judge(&self.probe_reports, self.own);
        let changed = found != self.last_state;
        self.last_state = found;
        changed.then_some(Action::Tell(found))
    }

    /// The next peer to ask, one at a time.
    fn ask(&mut self, now: Moment) -> Option<Action> {
        if self.asking.is_some() || self.asked.len() >= ASKED || self.knows_enough() {
            return None;
        }
        let peer = *self.near.difference(&self.asked).next()?;
        self.asked.insert(peer);
        self.asking = Some(peer);
        self.again = Some(Moment(now.0 + AGAIN));
        Some(Action::Ask(peer))
    }

    /// Whether further reports would change nothing. Reports from within this machine's own network
    /// never suffice.
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

    /// Runs the state machine with peers that answer with these reports.
    fn run(scout: &mut Scout, now: Moment, near: &[ProbeReport]) -> (Vec<PeerId>, Vec<OwnPort>) {
        let (mut asked, mut states) = (Vec::new(), Vec::new());
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
                    Action::Tell(port) => states.push(port),
                }
            }
        }
        (asked, states)
    }

    #[test]
    fn one_probe_that_arrives_suffices_and_two_that_do_not() {
        let mut scout = Scout::new(OWN);
        let open = [1, 2, 3].map(|by| probe_report(by, "203.0.113.9:40000", &[7410]));
        assert_eq!(run(&mut scout, at(0), &open).0, [peer(1)]);
        let mut scout = Scout::new(OWN);
        let closed = [1, 2, 3].map(|by| probe_report(by, "203.0.113.9:40000", &[]));
        let (asked, states) = run(&mut scout, at(0), &closed);
        assert_eq!((asked.len(), states.len()), (2, 2), "{states:?}");
    }

    #[test]
    fn peers_within_the_network_never_suffice() {
        let mut scout = Scout::new(OWN);
        let mut near: Vec<ProbeReport> =
            (1..4).map(|by| probe_report(by, "10.0.0.5:7410", &[7410])).collect();
        near.push(probe_report(9, "203.0.113.9:40000", &[]));
        let (asked, states) = run(&mut scout, at(0), &near);
        assert_eq!(asked.len(), 4);
        assert!(states.last().is_some_and(OwnPort::is_closed), "{states:?}");
        let mut scout = Scout::new(OWN);
        let many: Vec<ProbeReport> =
            (1..20).map(|by| probe_report(by, "10.0.0.5:7410", &[7410])).collect();
        assert_eq!(run(&mut scout, at(0), &many).0.len(), ASKED);
    }

    #[test]
    fn it_repeats_the_attempt_and_publishes_only_changes() {
        let mut scout = Scout::new(OWN);
        let closed = [1, 2].map(|by| probe_report(by, "203.0.113.9:40000", &[]));
        let (_, first) = run(&mut scout, at(0), &closed);
        assert_eq!(first.len(), 2);
        let again = scout.next_timeout().expect("another attempt is due");
        assert_eq!(run(&mut scout, at(1), &closed), (vec![], vec![]), "not yet");
        let (asked, changes) = run(&mut scout, again, &closed);
        assert_eq!(asked.len(), 2);
        assert_eq!(changes.last(), first.last().filter(|_| !changes.is_empty()));
        let open = [1, 2].map(|by| probe_report(by, "203.0.113.9:40000", &[7410]));
        let later = scout.next_timeout().expect("another attempt is due");
        let (_, changes) = run(&mut scout, later, &open);
        assert!(matches!(changes[..], [OwnPort::Open { .. }]), "{changes:?}");
        // A new port of the router starts an attempt at once.
        let asks = scout.handle(later, Input::Moved);
        assert_eq!(asks, [Action::Ask(peer(1))]);
    }

    #[test]
    fn a_peer_that_does_not_probe_is_replaced() {
        let mut scout = Scout::new(OWN);
        assert_eq!(scout.handle(at(0), Input::Near(peer(1))), [Action::Ask(peer(1))]);
        assert_eq!(scout.handle(at(0), Input::Near(peer(2))), [], "one at a time");
        assert_eq!(scout.handle(at(1), Input::Asked(peer(1), None)), [Action::Ask(peer(2))]);
        assert_eq!(scout.handle(at(1), Input::Gone(peer(2))), []);
        assert_eq!(scout.handle(at(2), Input::Asked(peer(2), None)), [], "no peer is left");
    }
}
