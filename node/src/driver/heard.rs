//! What happens on the links, and what others say.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use shoal_protocol::ids::{Era, Member, PeerId, Term};
use shoal_protocol::message::{Envelope, Message, SavedCheckpoint, ToCoordinator};
use shoal_protocol::net::transport::{ConnectError, Refusal, TransportEvent};
use shoal_scheduler::action::{CoordinatorInput, PeerInput};

use super::incoming::{self, Receiver, Unusable};
use super::unpacker::Unpacked;
use super::{Driver, Ending, Own};

impl Driver<'_> {
    pub(super) fn network_event(&mut self, event: Option<TransportEvent>) {
        match event {
            // The transport outlives the driver.
            None => self.network = None,
            Some(TransportEvent::Connected { member, address, .. }) => {
                tracing::info!(peer = %member, ?address, "connected");
                if let Some(address) = address {
                    self.seen_at.insert(member.peer, address);
                }
                self.own_port.connected(member.peer, address);
                self.tell_latecomer(member);
                // An earlier life of it is over.
                if let Some(member) = self.coordinator.met(member) {
                    self.own.push_back(Own::Coordinator(CoordinatorInput::Disconnected { member }));
                }
            }
            Some(TransportEvent::Disconnected { member, reason }) => {
                tracing::info!(peer = %member, %reason, "disconnected");
                self.own_port.disconnected(member.peer);
                self.own.push_back(Own::Peer(PeerInput::Disconnected { member }));
                self.gone(member, &reason.to_string());
            }
            Some(TransportEvent::Unreachable { peer, error }) => {
                tracing::warn!(peer = %peer.short(), %error, "unreachable");
                let known = self.view.members.iter().find(|record| record.member.peer == peer);
                let coordinator = self.coordinator.member().filter(|member| member.peer == peer);
                if coordinator.is_some()
                    && let ConnectError::Refused(Refusal::Denied(denied)) = &error
                    && !denied.may_pass()
                {
                    // Trying again does not help, and the run goes on without this peer.
                    self.ending.get_or_insert(Ending::Refused(denied.to_string()));
                }
                if let Some(member) = known.map(|record| record.member) {
                    self.own.push_back(Own::Peer(PeerInput::Unreachable { member }));
                    self.gone(member, &error.to_string());
                } else if let Some(member) = coordinator {
                    self.gone(member, &error.to_string());
                }
            }
            Some(TransportEvent::Control { member, bytes }) => {
                let (era, term) = (self.era, self.coordinator.term());
                let receiver = Receiver { me: self.me, era, term };
                match incoming::open(&bytes, member, receiver) {
                    Ok(envelope) => self.hear(member, envelope),
                    Err(error) => self.refuse(member, &error),
                }
            }
            Some(TransportEvent::Tensor(message)) => {
                if let Some(unpacked) = self.unpacker.take(message) {
                    self.unpacked(unpacked);
                }
            }
        }
    }

    pub(super) fn unpacked(&mut self, Unpacked { from, result }: Unpacked) {
        match result {
            Ok((tag, tensors)) => {
                let payload = self.payloads.keep(tensors);
                self.own.push_back(Own::Peer(PeerInput::Tensor { from, tag, payload }));
            }
            Err(error) => self.refuse(from, &error),
        }
    }

    fn hear(&mut self, from: Member, envelope: Envelope) {
        let Envelope { era, term, message, .. } = envelope;
        match message {
            Message::ToCoordinator(message) => {
                self.hear_for_coordinator(from, message, (era, term))
            }
            Message::FromCoordinator(message) if self.coordinator.obeys(from, term) => {
                self.era = era;
                self.own.push_back(Own::Peer(PeerInput::FromCoordinator { from, message }));
            }
            Message::FromCoordinator(_) => {
                tracing::warn!(peer = %from, %term, "a word of a coordinator that is none");
                self.meters.refused(shoal_metrics::Refusal::NoCoordinator);
            }
            Message::PeerMessage(message) => {
                self.own.push_back(Own::Peer(PeerInput::PeerMessage { from, message }));
            }
            Message::Anchor(message) => {
                let known = self.coordinator.is_anchor(from.peer);
                match &self.post.anchor {
                    Some(anchor) if known || anchor.voters().contains(&from.peer) => {
                        anchor.heard(from.peer, message);
                    }
                    _ => tracing::debug!(peer = %from, "a word of an anchor that is none"),
                }
            }
            Message::AccessList { signed } => self.handle_access_list(from, &signed),
            Message::CheckpointRequest => self.answer_checkpoint(from),
            // Only who is no member asks.
            Message::Checkpoint { .. } => {}
            Message::CoordinatorMoved { coordinator, addresses } => {
                if let Some(links) = &self.links {
                    links.transport.remember(coordinator.peer, &addresses);
                }
                if coordinator != self.me {
                    self.coordinator.is(coordinator);
                }
            }
        }
    }

    /// A word for the coordinator, which may be another's.
    fn hear_for_coordinator(
        &mut self,
        from: Member,
        message: ToCoordinator,
        (era, term): (Era, Term),
    ) {
        let Some(coordinator) = self.post.coordinator() else {
            return self.send_elsewhere(from);
        };
        let newcomer = matches!(message, ToCoordinator::Register(_));
        // Who is no member is told so in any case.
        if !newcomer && coordinator.is_member(from) {
            let past = (era != coordinator.era()).then_some(Unusable::OtherEra { era });
            let past = past.or((term != coordinator.term()).then_some(Unusable::PastTerm { term }));
            if let Some(error) = past {
                return self.refuse(from, &error);
            }
        }
        let message = self.seen_from_here(from, message);
        self.own.push_back(Own::Coordinator(CoordinatorInput::Message { from, message }));
    }

    /// Says where the newest checkpoint is, or who may know.
    fn answer_checkpoint(&mut self, to: Member) {
        let logged = || {
            let newest = self.post.history()?.checkpoints.pop_last();
            newest.filter(|(version, _)| version.0 > 0)
        };
        let newest = match self.newest.clone().or_else(logged) {
            None if self.post.seat.is_none() => return self.send_elsewhere(to),
            None => None,
            Some((version, stages)) => {
                let holders = stages.iter().flat_map(|stored| &stored.holders);
                let holders: BTreeSet<PeerId> = holders.copied().collect();
                let places = holders.into_iter().map(|peer| (peer, self.addresses_of(peer)));
                Some(SavedCheckpoint { version, holders: places.collect(), stages })
            }
        };
        self.send(to, Message::Checkpoint { newest });
    }

    /// Where a peer listens, as far as it is known here.
    fn addresses_of(&self, peer: PeerId) -> Vec<SocketAddr> {
        if peer == self.me.peer {
            return Vec::new();
        }
        let record = self.view.members.iter().find(|record| record.member.peer == peer);
        let mut addresses = record.map_or_else(Vec::new, |record| record.addresses.clone());
        addresses.extend(self.seen_at.get(&peer));
        addresses
    }

    /// Says who keeps the run, if this peer knows of another.
    fn send_elsewhere(&mut self, to: Member) {
        let Some(coordinator) =
            self.coordinator.member().filter(|coordinator| ![self.me, to].contains(coordinator))
        else {
            return;
        };
        let addresses = self.addresses_of(coordinator.peer);
        self.send(to, Message::CoordinatorMoved { coordinator, addresses });
    }

    /// A newcomer that listens on every address does not know which one others reach it at, and one behind
    /// a router does not know its port there.
    fn seen_from_here(&self, from: Member, message: ToCoordinator) -> ToCoordinator {
        match (message, self.seen_at.get(&from.peer)) {
            (ToCoordinator::Register(mut candidate), Some(seen)) => {
                for address in &mut candidate.addresses {
                    if address.ip().is_unspecified() {
                        address.set_ip(seen.ip());
                    }
                }
                if !candidate.addresses.contains(seen) {
                    candidate.addresses.push(*seen);
                }
                ToCoordinator::Register(candidate)
            }
            (message, _) => message,
        }
    }

    fn refuse(&self, from: Member, error: &Unusable) {
        tracing::warn!(peer = %from, %error, "refused");
        self.meters.refused(error.refusal());
        if let (true, Some(links)) = (error.is_violation(), &self.links) {
            links.transport.reject(from.peer, &error.to_string());
        }
    }

    fn gone(&mut self, member: Member, reason: &str) {
        self.own.push_back(Own::Coordinator(CoordinatorInput::Disconnected { member }));
        // Who is no member yet knows nobody else to ask.
        let knows_others =
            || self.post.history().is_some_and(|history| !history.view.members.is_empty());
        if self.coordinator.lost(member, self.me) && self.view.members.is_empty() && !knows_others()
        {
            self.ending.get_or_insert(Ending::Orphaned(reason.to_owned()));
        }
    }
}
