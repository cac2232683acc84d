//! Measures round-trip times from a newcomer to members, before it is assigned a stage.

use std::net::SocketAddr;
use std::time::Duration;

use futures::future::join_all;
use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::net::transport::Transport;
use tokio::time::timeout;

/// The time for all measurements together. A member that has not answered by then is left out.
const PATIENCE: Duration = Duration::from_secs(1);

/// Measures the links to these members, without those that are unreachable or need a relay. The
/// throughput of a link shows only once data is sent over it.
pub(super) async fn links_to(
    transport: &Transport,
    members: Vec<(PeerId, Vec<SocketAddr>)>,
) -> Vec<(PeerId, LinkEstimate)> {
    let probes =
        members.into_iter().take(limits::PROBED_MEMBERS).map(|(peer, addresses)| async move {
            let reachable = addresses.into_iter().filter(|address| !address.ip().is_unspecified());
            let reachable: Vec<SocketAddr> = reachable.take(limits::MEMBER_ADDRESSES).collect();
            timeout(PATIENCE, transport.connect(peer, &reachable)).await.ok()?.ok()?;
            let way = transport.path_to(peer).filter(|way| !way.relayed)?;
            Some((peer, LinkEstimate { round_trip: way.shortest_round_trip, rate: None }))
        });
    join_all(probes).await.into_iter().flatten().collect()
}
