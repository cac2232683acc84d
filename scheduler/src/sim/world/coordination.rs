//! The coordinators: the leading one, and possibly a deposed one that does not know it yet.

use shoal_protocol::message::{FromCoordinator, LogRecord, RoundId};

use super::{Cargo, Event, Held, World};
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput};
use crate::sim::watch::Seen;

impl World<'_> {
    /// Passes an input to the coordinator on a peer, if there is one.
    pub(super) fn coordinator_input(&mut self, index: usize, input: CoordinatorInput) -> Held {
        let mut actions = Vec::new();
        let now = self.reads(index);
        if self.nodes[index].seat.is_none() {
            return Ok(());
        }
        self.show(Seen::Decides { begins: true });
        if let Some(seat) = &mut self.nodes[index].seat {
            seat.coordinator.handle(now, input, &mut actions);
        }
        self.show(Seen::Decides { begins: false });
        self.coordinate(index, actions)?;
        let clock = self.scenario.peers[index].clock;
        let to = self.nodes[index].me;
        let Some(seat) = self.nodes[index].seat.as_mut() else { return Ok(()) };
        let due = seat.coordinator.next_timeout().map(|due| clock.when(due).max(self.now));
        if let Some(due) = due
            && seat.remind_at.is_none_or(|remind| remind > due)
        {
            seat.remind_at = Some(due);
            let leadership = seat.leadership;
            self.at(due, Event::Remind { to, leadership });
        }
        Ok(())
    }

    pub(super) fn coordinate(&mut self, index: usize, actions: Vec<CoordinatorAction>) -> Held {
        for mut action in actions {
            self.corruption.coordinator_action(&mut action);
            self.marks.coordinator(&action);
            let Some(leadership) = self.nodes[index].seat.as_ref().map(|seat| seat.leadership)
            else {
                return Ok(());
            };
            match action {
                CoordinatorAction::Send { to, message } => {
                    if let FromCoordinator::Replay { keys } = &message {
                        self.report.recovery.replays += keys.len() as u64;
                    }
                    if let FromCoordinator::Close { round, .. } = &message {
                        self.closes(index, *round);
                    }
                    let sender = self.nodes[index].me;
                    self.send(sender, to, Cargo::FromCoordinator(message));
                }
                CoordinatorAction::Append(record) => {
                    let commits = matches!(record, LogRecord::Commit(_));
                    self.append(leadership, record);
                    if commits {
                        self.strike()?;
                    }
                }
                CoordinatorAction::Anchors(voters) => {
                    if self.log.leader == Some(self.nodes[index].me) {
                        self.log.voters = voters;
                    }
                }
                CoordinatorAction::Event(event) => self.coordinator_event(event)?,
            }
        }
        Ok(())
    }

    /// A round begins.
    fn closes(&mut self, index: usize, id: RoundId) {
        let Self { nodes, oracles, .. } = self;
        let coordinator = nodes[index].seat.as_ref().map(|seat| &seat.coordinator);
        let round = coordinator.and_then(|coordinator| coordinator.round(id));
        if let (Some(round), Some(oracles)) = (round, oracles) {
            oracles.exactly_once.closed(round);
            oracles.results.closed(round);
        }
    }

    fn coordinator_event(&mut self, event: CoordinatorEvent) -> Held {
        self.show(Seen::Decided(&event));
        if let Some(oracles) = &mut self.oracles {
            oracles.progress.advanced(self.now);
        }
        match event {
            CoordinatorEvent::Committed { counts, .. } => {
                self.report.repeated += counts.repeated;
                Ok(())
            }
            CoordinatorEvent::Stopped { reason } => {
                let held = if self.oracles.is_some() { Err(reason.clone()) } else { Ok(()) };
                self.report.stopped = Some(reason);
                self.holds("no fault", held)
            }
            event => {
                self.report.note(&event);
                Ok(())
            }
        }
    }
}
