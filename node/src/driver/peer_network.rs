//! The links of this peer to others, and everything observed on them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use shoal_formats::own_port::OwnPort;
use shoal_metrics::{Metrics, Refusal};
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::{LinkEstimate, Message, TensorHeader, ToCoordinator, View};
use shoal_protocol::units::Rate;
use tokio::sync::mpsc;

use super::admission::{Admission, Refusals};
use super::background_results::{Background, BackgroundResult};
use super::context::Context;
use super::effect::{Effect, Effects, Stamp};
use super::incoming::{Receiver, Unusable};
use super::latency_probe;
use super::link_events::{Incoming, LinkEvent, LinkEvents};
use super::outgoing::Links;
use super::payload::Held;
use super::peer_names::PeerNames;
use super::port_watch::PortWatch;
use super::setup::Network;
use super::unpacker::Unpacker;
use crate::events::Traffic;

/// An event of the network side.
#[derive(Debug)]
pub(super) enum NetworkEvent {
    Link(Incoming),
    /// The gate changed: perhaps the access list is new.
    Admission,
    /// The reachability of this peer's own port changed.
    OwnPort(OwnPort),
}

/// Owns the links, and the state of every connection that the driver needs.
pub(super) struct PeerNetwork {
    me: Member,
    /// `None` for a peer that is alone.
    links: Option<Links>,
    events: LinkEvents,
    names: PeerNames,
    /// Addresses of direct connections: a peer does not know itself how others see it.
    observed_addresses: BTreeMap<PeerId, SocketAddr>,
    /// Takes those addresses for later lives.
    seen: Option<mpsc::Sender<(PeerId, SocketAddr)>>,
    admission: Admission,
    own_port: PortWatch,
    /// Messages of connected peers that they may not send.
    strikes: BTreeMap<PeerId, u32>,
}

/// Messages that a peer which is no member may not send, after which it is disconnected.
const STRIKES: u32 = 32;

impl PeerNetwork {
    pub(super) fn new(context: &Context, network: Option<Network>, metrics: Metrics) -> Self {
        let (manifest, names) = (&context.manifest, &context.names);
        let own_port = PortWatch::of(network.as_ref());
        let seen = network.as_ref().map(|network| network.seen.clone());
        let (links, events) = network
            .map(|Network { transport, events, packing, .. }| {
                transport.set_chunk_packing(manifest.codec.chunks);
                (Links::new(transport, packing, metrics, names.clone()), events)
            })
            .unzip();
        let gate = links.as_ref().map(|links| links.transport().gate().clone());
        Self {
            me: context.me,
            links,
            events: LinkEvents::new(events, Unpacker::new(manifest.clone()), names.clone()),
            names: names.clone(),
            observed_addresses: BTreeMap::new(),
            seen,
            admission: Admission::new(gate),
            own_port,
            strikes: BTreeMap::new(),
        }
    }

    /// Waits for the next event. Safe to cancel.
    ///
    /// # Errors
    /// When unpacking a tensor panicked.
    pub(super) async fn next(&mut self) -> anyhow::Result<NetworkEvent> {
        tokio::select! {
            incoming = self.events.next() => Ok(NetworkEvent::Link(incoming?)),
            () = self.admission.changed() => Ok(NetworkEvent::Admission),
            port = self.own_port.next() => Ok(NetworkEvent::OwnPort(port)),
        }
    }

    /// Checks an event of the links, and notes connections.
    pub(super) fn receive(&mut self, incoming: Incoming, receiver: Receiver) -> Option<LinkEvent> {
        let event = self.events.check(incoming, receiver)?;
        match &event {
            LinkEvent::Connected { member, address } => {
                if let Some(address) = address {
                    self.observed_addresses.insert(member.peer, *address);
                    if let Some(seen) = &self.seen {
                        // Where many call at once, some are enough to come back by.
                        let _ = seen.try_send((member.peer, *address));
                    }
                }
                self.own_port.connected(member.peer, *address);
            }
            LinkEvent::Disconnected { member, .. } => {
                self.own_port.disconnected(member.peer);
                self.strikes.remove(&member.peer);
            }
            _ => {}
        }
        Some(event)
    }

    /// Queues a control message. Messages to this peer's own other lives have no receiver.
    pub(super) fn send(&self, to: Member, stamp: Stamp, message: Message) {
        if let Some(links) = self.links.as_ref().filter(|_| to.peer != self.me.peer) {
            links.send(self.me, to, stamp, message);
        }
    }

    /// Sends tensors to another member.
    ///
    /// # Panics
    /// When this peer is alone, and so the only member.
    pub(super) fn send_tensors(
        &self,
        to: Member,
        header: TensorHeader,
        held: Held,
    ) -> impl Future<Output = Option<BackgroundResult>> + Send + use<> {
        let links = self.links.as_ref().expect("a peer that is alone sends to itself only");
        links.send_tensors(to, header, held)
    }

    /// Takes in a membership: the transport dials and accepts its members.
    pub(super) fn members_changed(&self, view: &View) {
        let Some(links) = &self.links else { return };
        links.transport().set_members(view.members.iter().map(|record| record.member.peer));
        for record in &view.members {
            let reachable: Vec<_> = record
                .addresses
                .iter()
                .copied()
                .filter(|address| !address.ip().is_unspecified())
                .collect();
            links.transport().remember(record.member.peer, &reachable);
        }
    }

    /// Notes addresses of a peer.
    pub(super) fn remember(&self, peer: PeerId, addresses: &[SocketAddr]) {
        if let Some(links) = &self.links {
            links.transport().remember(peer, addresses);
        }
    }

    /// Returns the known addresses of a peer; none for this peer itself.
    pub(super) fn addresses_of(&self, view: &View, peer: PeerId) -> Vec<SocketAddr> {
        if peer == self.me.peer {
            return Vec::new();
        }
        let record = view.members.iter().find(|record| record.member.peer == peer);
        let mut addresses = record.map_or_else(Vec::new, |record| record.addresses.clone());
        addresses.extend(self.observed_addresses.get(&peer));
        addresses
    }

    /// Completes the addresses of a newcomer. One that listens on every address does not know the
    /// one at which others reach it, and one behind a router does not know its port there.
    pub(super) fn with_observed_address(
        &self,
        from: Member,
        mut message: ToCoordinator,
    ) -> ToCoordinator {
        if let ToCoordinator::Register(candidate) = &mut message
            && let Some(observed) = self.observed_addresses.get(&from.peer)
        {
            for address in &mut candidate.addresses {
                if address.ip().is_unspecified() {
                    address.set_ip(observed.ip());
                }
            }
            if !candidate.addresses.contains(observed) {
                candidate.addresses.push(*observed);
            }
        }
        message
    }

    /// Returns the message without duties that the run's issuer does not grant its sender.
    pub(super) fn with_granted_duties(
        &self,
        from: Member,
        mut message: ToCoordinator,
    ) -> ToCoordinator {
        if let (ToCoordinator::Register(candidate), Some(links)) = (&mut message, &self.links)
            && candidate.duties.anchor
            && !links.transport().gate().may_be_anchor(from.peer)
        {
            tracing::warn!(
                peer = self.names.title(from.peer),
                "it may not be an anchor: its ticket does not say so"
            );
            candidate.duties.anchor = false;
        }
        message
    }

    /// Returns the measured links to the other members.
    pub(super) fn measured_links(&self, view: &View) -> BTreeMap<PeerId, LinkEstimate> {
        let Some(links) = &self.links else { return BTreeMap::new() };
        let peers = view.members.iter().map(|record| record.member.peer);
        let link = |peer| {
            let round_trip = links.transport().path_to(peer)?.shortest_round_trip;
            let rate = links.transport().rate_to(peer).map(|rate| Rate(rate as u64));
            Some((peer, LinkEstimate { round_trip, rate }))
        };
        peers.filter_map(link).collect()
    }

    /// Measures the links to these members in the background.
    pub(super) fn probe_latency(
        &self,
        background: &Background,
        members: Vec<(PeerId, Vec<SocketAddr>)>,
    ) {
        let Some(links) = &self.links else { return };
        let transport = links.transport().clone();
        background.spawn(async move {
            let links = latency_probe::links_to(&transport, members).await;
            BackgroundResult::LatencyMeasured(links)
        });
    }

    /// Drops an unusable message, and disconnects a sender that no correct peer can be. Returns the
    /// reason to count.
    pub(super) fn refuse(&self, from: Member, error: &Unusable) -> Refusal {
        tracing::warn!(peer = self.names.member(from), %error, "refused");
        if let (true, Some(links)) = (error.is_violation(), &self.links) {
            links.transport().reject(from.peer, &error.to_string());
        }
        error.refusal()
    }

    /// Notes a message that its sender may not send. A peer that is no member and goes on is disconnected; a member
    /// may know a newer membership than this peer.
    pub(super) fn strike(&mut self, from: Member, what: &str, view: &View) {
        tracing::debug!(
            peer = self.names.member(from),
            what,
            "dropped: its sender is not what it must be"
        );
        let Some(links) = self.links.as_ref().filter(|_| !view.lists(from)) else { return };
        let strikes = self.strikes.entry(from.peer).or_insert(0);
        *strikes += 1;
        if *strikes >= STRIKES {
            links.transport().reject(from.peer, "messages of a member from a peer that is none");
        }
    }

    /// Takes in an access list from a peer, and disconnects a sender of a bad one. Returns the
    /// reason to count, if any.
    pub(super) fn receive_access_list(&self, from: Member, signed: &[u8]) -> Option<Refusal> {
        let reason = self.admission.receive(signed).err()?;
        tracing::warn!(peer = self.names.member(from), %reason, "refused");
        if let Some(links) = &self.links {
            links.transport().reject(from.peer, &reason);
        }
        Some(Refusal::Malformed)
    }

    /// Announces the access list to every connected peer, if it is new.
    pub(super) fn announce_access_list(&mut self, stamp: Stamp, out: &mut Effects) {
        let Some(list) = self.admission.new_access_list() else { return };
        out.push(list.event.into());
        let connected = self.links.as_ref().map(|links| links.transport().connected());
        for to in connected.into_iter().flatten() {
            let message = Message::AccessList { signed: list.signed.clone() };
            out.push(Effect::Send { to, stamp, message });
        }
    }

    /// Returns refused connections, at most once a second.
    pub(super) fn refusals(&mut self) -> Option<Refusals> {
        self.admission.refusals()
    }

    /// Returns the last known reachability of this peer's own port.
    pub(super) fn own_port(&self) -> OwnPort {
        self.own_port.last()
    }

    /// Returns the bytes sent by this peer.
    pub(super) fn sent(&self) -> Traffic {
        self.links.as_ref().map_or_else(Traffic::default, |links| {
            let traffic = links.transport().traffic();
            Traffic {
                control: traffic.control.sent.0,
                tensor: traffic.tensor.sent.0,
                file: traffic.file.sent.0,
                relay: traffic.relay.sent.0,
            }
        })
    }

    /// Closes every connection.
    pub(super) async fn close(&mut self) {
        let Some(links) = &self.links else { return };
        let sent = links.transport().traffic();
        self.events.close().await;
        tracing::info!(tensor = %sent.tensor.sent, control = %sent.control.sent, "sent");
        links.transport().close().await;
    }
}
