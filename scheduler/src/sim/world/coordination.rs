//! The coordinator and its log.

use shoal_protocol::ids::ContentHash;
use shoal_protocol::message::FromCoordinator;
use shoal_protocol::units::Bytes;

use super::{Cargo, Event, HOME, Held, World};
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput};

impl World<'_> {
    pub(super) fn coordinator_input(&mut self, input: CoordinatorInput) -> Held {
        let mut actions = Vec::new();
        let now = self.reads(HOME);
        self.coordinator.handle(now, input, &mut actions);
        self.coordinate(actions)?;
        let clock = self.scenario.peers[HOME].clock;
        let due = self.coordinator.next_timeout().map(|due| clock.when(due).max(self.now));
        if let Some(due) = due
            && self.remind_at.is_none_or(|remind| remind > due)
        {
            self.remind_at = Some(due);
            self.at(due, Event::Remind);
        }
        Ok(())
    }

    pub(super) fn coordinate(&mut self, actions: Vec<CoordinatorAction>) -> Held {
        for mut action in actions {
            self.tamper.coordinator_action(&mut action);
            self.marks.coordinator(&action);
            match action {
                CoordinatorAction::Send { to, message } => {
                    if let FromCoordinator::Replay { keys } = &message {
                        self.report.recovery.replays += keys.len() as u64;
                    }
                    if let (FromCoordinator::Close(round), Some(oracles)) =
                        (&message, &mut self.oracles)
                    {
                        oracles.exactly_once.closed(round);
                    }
                    let home = self.nodes[HOME].me;
                    self.send(home, to, Cargo::Told(message));
                }
                CoordinatorAction::Append(record) => {
                    let most = self.scenario.log_delay.as_micros() as u64;
                    let down = self.now + self.dice.microseconds(0..=most);
                    self.last_append = self.last_append.max(down);
                    self.at(self.last_append, Event::Appended(record));
                }
                CoordinatorAction::Event(event) => self.coordinator_event(event)?,
            }
        }
        Ok(())
    }

    pub(super) fn coordinator_event(&mut self, event: CoordinatorEvent) -> Held {
        if let Some(oracles) = &mut self.oracles {
            oracles.progress.advanced(self.now);
        }
        match event {
            CoordinatorEvent::Committed { record, books } => {
                self.report.commits += 1;
                self.report.repeated += books.repeated;
                let Some(oracles) = &mut self.oracles else { return Ok(()) };
                let once = oracles.exactly_once.committed(&record);
                let same = oracles.replicas.committed(&record);
                self.holds("exactly once", once)?;
                self.holds("equal replicas", same)
            }
            CoordinatorEvent::CheckpointStored { version, stages, .. } => {
                let (holders, files): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
                let saved = self.oracles.as_ref().map(|o| o.replicas.saved(version, &files));
                self.holds("equal replicas", saved.unwrap_or(Ok(())))?;
                let hashes: Vec<u8> = files.iter().flatten().flat_map(|file| file.hash.0).collect();
                self.report.checkpoint = Some(ContentHash::of(&hashes));
                let size: Bytes = files.iter().flatten().map(|file| file.size).sum();
                let link = self.scenario.network.bandwidth.unwrap_or(u64::MAX);
                let transfer = size.0 * 1_000_000 / link;
                let delay = self.dice.microseconds(transfer..=transfer + 50_000);
                self.at(self.now + delay, Event::Collected { version, holders });
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
