//! What happens on the links, and what others say.

use shoal_metrics::Refusal;
use shoal_protocol::ids::Member;
use shoal_protocol::message::{Envelope, FromCoordinator, Message, ToCoordinator};
use shoal_protocol::net::transport::TransportEvent;
use shoal_scheduler::action::{CoordinatorInput, PeerInput};
use shoal_scheduler::coordinator::Coordinator;

use super::incoming::{self, Receiver, Unusable};
use super::{Driver, Ending, Own};

impl Driver<'_> {
    pub(super) fn network_event(&mut self, event: Option<TransportEvent>) {
        match event {
            // The transport outlives the driver.
            None => self.network = None,
            Some(TransportEvent::Connected { member, address, .. }) => {
                tracing::info!(peer = %member, %address, "connected");
                self.seen_at.insert(member.peer, address);
            }
            Some(TransportEvent::Disconnected { member, reason }) => {
                tracing::info!(peer = %member, %reason, "disconnected");
                self.own.push_back(Own::Peer(PeerInput::Disconnected { member }));
                self.gone(member, &reason.to_string());
            }
            Some(TransportEvent::Unreachable { peer, error }) => {
                tracing::warn!(peer = %peer.short(), %error, "unreachable");
                if let Some(member) = self.view.get(&peer).copied() {
                    self.own.push_back(Own::Peer(PeerInput::Unreachable { member }));
                    self.gone(member, &error.to_string());
                } else if peer == self.obeys.peer {
                    self.gone(self.obeys, &error.to_string());
                }
            }
            Some(TransportEvent::Control { member, bytes }) => {
                let receiver = Receiver {
                    me: self.me,
                    era: self.era,
                    run_era: self.coordinator.as_ref().map(Coordinator::era),
                    term: self.term,
                };
                match incoming::open(&bytes, member, receiver) {
                    Ok(envelope) => self.hear(member, envelope),
                    Err(error) => self.refuse(member, &error),
                }
            }
            Some(TransportEvent::Tensor(message)) => {
                match incoming::unpack(&message.tag, &message.frames, &self.manifest) {
                    Ok((tag, tensors)) => {
                        let payload = self.payloads.keep(tensors);
                        let from = message.member;
                        self.own.push_back(Own::Peer(PeerInput::Tensor { from, tag, payload }));
                    }
                    Err(error) => self.refuse(message.member, &error),
                }
            }
        }
    }

    fn hear(&mut self, from: Member, envelope: Envelope) {
        let Envelope { era, term, message, .. } = envelope;
        match message {
            Message::ToCoordinator(message) if self.coordinator.is_some() => {
                let message = self.seen_from_here(from, message);
                self.own.push_back(Own::Coordinator(CoordinatorInput::Message { from, message }));
            }
            Message::ToCoordinator(ToCoordinator::Register { .. }) => {
                let reason = format!("this peer does not keep the run: ask {}", self.obeys.peer);
                let refused = Message::FromCoordinator(FromCoordinator::Refused { reason });
                self.send(from, refused);
            }
            Message::FromCoordinator(message) if from == self.obeys => {
                self.term = term;
                self.era = era;
                self.own.push_back(Own::Peer(PeerInput::FromCoordinator { from, message }));
            }
            Message::Between(message) => {
                self.own.push_back(Own::Peer(PeerInput::Between { from, message }));
            }
            Message::ToCoordinator(_) | Message::FromCoordinator(_) => {
                tracing::warn!(peer = %from, "a word for or from a coordinator that is none");
                self.meters.refused(Refusal::NoCoordinator);
            }
        }
    }

    /// A newcomer that listens on every address does not know which one others reach it at.
    fn seen_from_here(&self, from: Member, message: ToCoordinator) -> ToCoordinator {
        match (message, self.seen_at.get(&from.peer)) {
            (ToCoordinator::Register { choice, mut addresses, fingerprint }, Some(seen)) => {
                for address in &mut addresses {
                    if address.ip().is_unspecified() {
                        address.set_ip(seen.ip());
                    }
                }
                ToCoordinator::Register { choice, addresses, fingerprint }
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
        if self.coordinator.is_some() {
            self.own.push_back(Own::Coordinator(CoordinatorInput::Disconnected { member }));
        } else if member == self.obeys {
            self.ending.get_or_insert(Ending::Orphaned(reason.to_owned()));
        }
    }
}
