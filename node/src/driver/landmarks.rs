//! How far members are from a newcomer, which looks round before it is given a stage.

use std::net::SocketAddr;
use std::time::Duration;

use futures::future::join_all;
use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::net::transport::Transport;
use tokio::time::timeout;

/// How long it looks: who has not answered by then is left out, and nobody waits long for a newcomer.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the links to these members are; those that cannot be reached in time are left out. What a link
/// carries shows only when something is sent.
pub(super) async fn paths_to(
    transport: &Transport,
    at: Vec<(PeerId, Vec<SocketAddr>)>,
) -> Vec<(PeerId, LinkEstimate)> {
    let looks = at.into_iter().take(limits::LANDMARKS).map(|(peer, addresses)| async move {
        let reachable = addresses.into_iter().filter(|address| !address.ip().is_unspecified());
        let reachable: Vec<SocketAddr> = reachable.take(limits::MEMBER_ADDRESSES).collect();
        timeout(PATIENCE, transport.connect(peer, &reachable)).await.ok()?.ok()?;
        let way = transport.path_to(peer).filter(|way| !way.relayed)?;
        Some((peer, LinkEstimate { round_trip: way.shortest_round_trip, rate: None }))
    });
    join_all(looks).await.into_iter().flatten().collect()
}
