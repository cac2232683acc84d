//! Checks whether other peers can reach this peer's own UDP port.

use std::path::Path;

use shoal_formats::own_port::OwnPort;
use shoal_protocol::net::transport::ProbeReport;

use super::{Finding, State};
use crate::data_dir::shown_at;
use crate::http::client;
use crate::outward_ip::outward_ip;
use crate::reachability::judge;

const ABOUT: &str = "own port, UDP";

/// The result according to the peers that probed the port. `asks_router` is set if a router opens the
/// port when a peer starts.
pub(crate) fn by_probes(probe_reports: &[ProbeReport], asks_router: bool) -> Finding {
    finding_of(&judge(probe_reports, outward_ip()), asks_router)
}

/// The result according to the running peer of this data directory.
pub(crate) async fn of_running(data_dir: &Path) -> Finding {
    let asked = async { client::status(shown_at(data_dir)?).await };
    match asked.await {
        Ok(status) => finding_of(&status.node.own_port, false),
        Err(error) => Finding::note(ABOUT, format!("the running peer does not answer: {error:#}")),
    }
}

fn finding_of(port: &OwnPort, asks_router: bool) -> Finding {
    let text = port.to_string();
    if !port.is_closed() {
        let state = if *port == OwnPort::Unknown { State::Note } else { State::Well };
        return Finding::new(ABOUT, state, text);
    }
    if asks_router && matches!(port, OwnPort::Router { .. }) {
        return Finding::note(
            ABOUT,
            text + "; a peer asks the router to open the port when it starts",
        );
    }
    let text = format!("{text}; {}", port.meanwhile());
    Finding { fix: port.fix(), ..Finding::note(ABOUT, text) }
}

#[cfg(test)]
mod tests {
    use shoal_formats::own_port::Mapping;

    use super::*;

    #[test]
    fn a_closed_port_is_a_note_with_a_fix() {
        let at = "192.0.2.7:7410".parse().expect("an address");
        let open = finding_of(&OwnPort::Open { at }, false);
        assert_eq!((open.state, open.fix), (State::Well, None));
        let firewall = finding_of(&OwnPort::Firewall { at }, true);
        assert_eq!(firewall.state, State::Note);
        assert!(firewall.fix.is_some_and(|fix| fix.contains("open UDP port 7410")));
        let router = OwnPort::Router { port: 7410, seen: at, mapping: Mapping::ByDestination };
        let closed = finding_of(&router, false);
        assert!(closed.says.contains("symmetric NAT"), "{closed}");
        assert!(closed.fix.is_some_and(|fix| fix.contains("forward port 7410")));
        assert_eq!(finding_of(&router, true).fix, None, "the router is asked");
        assert_eq!(finding_of(&OwnPort::Unknown, false).state, State::Note);
    }
}
