//! Whether others get through to the peer's own UDP port.

use std::path::Path;

use shoal_protocol::net::transport::ProbeReport;

use super::{Finding, State};
use crate::data_dir::shown_at;
use crate::http::client;
use crate::outward_ip::outward_ip;
use crate::reachability::judge;
use crate::status::OwnPort;

const ABOUT: &str = "own port, UDP";

/// By the peers that rang there. `asks_router` says that a router opens the port for a peer that runs.
pub(crate) fn by_probes(probe_reports: &[ProbeReport], asks_router: bool) -> Finding {
    stands(&judge(probe_reports, outward_ip()), asks_router)
}

/// As the peer that runs with this data directory knows.
pub(crate) async fn of_running(data_dir: &Path) -> Finding {
    let asked = async { client::status(shown_at(data_dir)?).await };
    match asked.await {
        Ok(status) => stands(&status.node.own_port, false),
        Err(error) => {
            Finding::note(ABOUT, format!("the running peer, which knows, does not say: {error:#}"))
        }
    }
}

fn stands(port: &OwnPort, asks_router: bool) -> Finding {
    let says = port.to_string();
    if !port.is_closed() {
        let state = if *port == OwnPort::Unknown { State::Note } else { State::Well };
        return Finding::new(ABOUT, state, says);
    }
    if asks_router && matches!(port, OwnPort::Router { .. }) {
        return Finding::note(ABOUT, says + "; a peer asks it for the port when it starts");
    }
    let says = format!("{says}; {}", port.meanwhile());
    Finding { fix: port.fix(), ..Finding::note(ABOUT, says) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Mapping;

    #[test]
    fn a_closed_port_is_no_hindrance_and_has_its_fix() {
        let at = "192.0.2.7:7410".parse().expect("an address");
        let open = stands(&OwnPort::Open { at }, false);
        assert_eq!((open.state, open.fix), (State::Well, None));
        let firewall = stands(&OwnPort::Firewall { at }, true);
        assert_eq!(firewall.state, State::Note);
        assert!(firewall.fix.is_some_and(|fix| fix.contains("open UDP port 7410")));
        let router = OwnPort::Router { port: 7410, seen: at, mapping: Mapping::ByDestination };
        let closed = stands(&router, false);
        assert!(closed.says.contains("symmetric NAT"), "{closed}");
        assert!(closed.fix.is_some_and(|fix| fix.contains("forward port 7410")));
        assert_eq!(stands(&router, true).fix, None, "the router is asked");
        assert_eq!(stands(&OwnPort::Unknown, false).state, State::Note);
    }
}
