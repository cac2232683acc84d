//! The router between this machine and the rest.

use std::net::IpAddr;

use super::Finding;
use crate::port_map::{PortMapError, Router, behind_router};
use crate::reachability::Scope;

/// Whether it opens a port for a peer that asks; nothing where this machine has an address of its own.
pub(crate) async fn router() -> Option<Finding> {
    behind_router()?;
    let asked = async { Router::find().await?.address().await };
    Some(opens(asked.await))
}

fn opens(asked: Result<IpAddr, PortMapError>) -> Finding {
    const ABOUT: &str = "router";
    match asked {
        Ok(outer) if Scope::of(outer) == Scope::Network => {
            let says = format!(
                "it opens ports (UPnP), but is itself at {outer}, behind another one: others reach this machine \
                 through a third"
            );
            Finding::note(ABOUT, says)
        }
        Ok(outer) => {
            let says =
                format!("it opens a port for a peer that asks (UPnP): others dial in at {outer}");
            Finding::well(ABOUT, says)
        }
        Err(error) => Finding::note(ABOUT, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_router_behind_another_one_is_of_no_help() {
        let at = |address: &str| opens(Ok(address.parse().expect("an address")));
        assert_eq!(at("192.0.2.7").state, State::Well);
        for inner in ["10.1.2.3", "192.168.0.1", "100.64.0.1", "100.127.255.255"] {
            assert!(at(inner).says.contains("behind another one"), "{inner}");
        }
        assert_eq!(at("100.128.0.1").state, State::Well);
        assert!(opens(Err(PortMapError::NoRouter)).says.contains("forward the port"));
    }
}
