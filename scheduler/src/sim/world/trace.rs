//! The trace of everything that happens, by which two runs are compared.

use shoal_protocol::ids::{Member, PeerId, Stage, Step};
use shoal_protocol::message::LinkEstimate;
use shoal_protocol::units::Moment;

use super::{Cargo, Event, index_of};
use crate::sim::integer_model::Weights;
use crate::sim::report::Trace;

impl Trace {
    /// Takes an event into the trace.
    pub(super) fn note(&mut self, at: Moment, event: &Event) {
        self.word(at.0.as_nanos() as u64);
        let mut who = |member: &Member| {
            self.word(index_of(*member) as u64);
            self.word(member.incarnation.0);
        };
        let kind = match event {
            Event::Start(me) => (who(me), 0).1,
            Event::Arrives { to, from, connection, era, term, cargo } => {
                who(to);
                who(from);
                self.word(*connection);
                self.word(u64::from(era.0));
                self.word(term.0);
                self.cargo(cargo);
                1
            }
            Event::Kept { to, version, stage, weights }
            | Event::Fetched { to, version, stage, weights } => {
                who(to);
                self.file(*version, *stage, *weights);
                2
            }
            Event::LinksProbed { to, link_estimates } => {
                who(to);
                self.link_estimates(link_estimates);
                11
            }
            Event::EngineDone(me) => {
                who(me);
                3
            }
            Event::Written { to, version, stage, weights } => {
                who(to);
                self.file(*version, *stage, Some(*weights));
                8
            }
            Event::Tick(me) => {
                who(me);
                4
            }
            Event::Appended { to, office, record } => {
                who(to);
                self.word(*office);
                self.message(record);
                5
            }
            Event::Deposed { at: to, office } | Event::Remind { to, office } => {
                who(to);
                self.word(*office);
                6
            }
            Event::Logged { office } => {
                self.word(*office);
                7
            }
            Event::Elect => 11,
            Event::Fault(_) => 8,
            Event::Noticed { at, other, .. } | Event::Unreached { at, other } => {
                who(at);
                who(other);
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
        self.word(weights.and_then(|held| held.before).unwrap_or(0));
    }

    fn cargo(&mut self, cargo: &Cargo) {
        match cargo {
            Cargo::Told(message) => self.message(message),
            Cargo::Reported(message) => self.message(message),
            Cargo::Heard(message) => self.message(message),
            Cargo::CoordinatorMoved(coordinator) => self.message(coordinator),
            Cargo::Tensor { tag, content, size } => {
                self.message(tag);
                self.word(size.0);
                self.word(content.digest());
            }
        }
    }
}
