//! Checks the router between this machine and the internet.

use std::net::IpAddr;

use shoal_formats::own_port::Scope;

use super::Finding;
use crate::port_map::{PortMapError, Router, behind_router};

/// Whether the router opens a port on request. There is no finding if this machine has a public
/// address.
pub(crate) async fn router() -> Option<Finding> {
    behind_router()?;
    let answer = async { Router::find().await?.address().await };
    Some(finding_of(answer.await))
}

fn finding_of(answer: Result<IpAddr, PortMapError>) -> Finding {
    const ABOUT: &str = "router";
    match answer {
        Ok(outer) if Scope::of(outer) == Scope::Network => {
            let text = format!(
                "it opens ports (UPnP) but is behind another router, at {outer}: other peers connect through a \
                 relay"
            );
            Finding::note(ABOUT, text)
        }
        Ok(outer) => {
            let text =
                format!("it opens a port on request (UPnP): other peers can dial in at {outer}");
            Finding::well(ABOUT, text)
        }
        Err(error) => Finding::note(ABOUT, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_router_behind_another_one_is_a_note() {
        let at = |address: &str| finding_of(Ok(address.parse().expect("an address")));
        assert_eq!(at("192.0.2.7").state, State::Well);
        for inner in ["10.1.2.3", "192.168.0.1", "100.64.0.1", "100.127.255.255"] {
            assert!(at(inner).says.contains("behind another router"), "{inner}");
        }
        assert_eq!(at("100.128.0.1").state, State::Well);
        assert!(finding_of(Err(PortMapError::NoRouter)).says.contains("forward the port"));
    }
}
