//! The trace of all events, by which two runs are compared.

use shoal_protocol::ids::{Member, PeerId, Stage, Step};
use shoal_protocol::limits;
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::Moment;

use super::event::{Cargo, Event};
use super::peer_index::index_of;
use crate::sim::integer_model::Weights;
use crate::sim::report::Trace;

impl Trace {
    /// Adds an event to the trace.
    pub(super) fn note(&mut self, at: Moment, event: &Event) {
        self.word(at.0.as_nanos() as u64);
        let mut member_id = |member: &Member| {
            self.word(index_of(*member) as u64);
            self.word(member.incarnation.0);
        };
        let kind = match event {
            Event::Start(me) => (member_id(me), 0).1,
            Event::Arrives { to, from, connection, era, term, cargo } => {
                member_id(to);
                member_id(from);
                self.word(*connection);
                self.word(u64::from(era.0));
                self.word(term.0);
                self.cargo(cargo);
                1
            }
            Event::Kept { to, version, stage, weights }
            | Event::Fetched { to, version, stage, weights } => {
                member_id(to);
                self.file(*version, *stage, *weights);
                2
            }
            Event::LinksProbed { to, link_estimates } => {
                member_id(to);
                self.link_estimates(link_estimates);
                11
            }
            Event::EngineDone(me, device) => {
                member_id(me);
                self.word(u64::from(device.0));
                3
            }
            Event::Written { to, version, stage, weights } => {
                member_id(to);
                self.file(*version, *stage, Some(*weights));
                8
            }
            Event::Tick(me) => {
                member_id(me);
                4
            }
            Event::Appended { to, leadership, record } => {
                member_id(to);
                self.word(*leadership);
                self.message(record);
                5
            }
            Event::Deposed { at: to, leadership } | Event::Remind { to, leadership } => {
                member_id(to);
                self.word(*leadership);
                6
            }
            Event::Logged { leadership } => {
                self.word(*leadership);
                7
            }
            Event::Elect => 11,
            Event::Fault(_) => 8,
            Event::Noticed { at, other, .. } | Event::Unreached { at, other } => {
                member_id(at);
                member_id(other);
                9
            }
            Event::Reborn(index) | Event::Resume(index) => {
                self.word(*index as u64);
                10
            }
        };
        self.word(kind);
    }

    fn link_estimates(&mut self, link_estimates: &[(PeerId, LinkEstimate)]) {
        link_estimates.iter().for_each(|(_, path)| self.word(path.round_trip.as_nanos() as u64));
    }

    fn file(&mut self, version: Step, stage: Stage, weights: Option<Weights>) {
        self.word(version.0);
        self.word(u64::from(stage.0));
        self.weights(weights);
    }

    fn weights(&mut self, weights: Option<Weights>) {
        self.word(weights.map_or(0, |held| held.newest));
        for held in weights.map_or([None; limits::STALENESS as usize], |held| held.before) {
            self.word(held.unwrap_or(0));
        }
    }

    fn cargo(&mut self, cargo: &Cargo) {
        match cargo {
            Cargo::FromCoordinator(message) => self.message(message),
            Cargo::ToCoordinator(message) => self.message(message),
            Cargo::PeerMessage(message) => self.message(message),
            Cargo::CoordinatorMoved(coordinator) => self.message(coordinator),
            Cargo::Elected(proofs) => self.message(proofs),
            Cargo::Tensor { tag, content, size } => {
                self.message(tag);
                self.word(size.0);
                self.word(content.digest());
            }
        }
    }
}
