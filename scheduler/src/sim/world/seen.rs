//! Passes observations of engines and events of peers to the oracles.

use shoal_protocol::ids::{Stage, StageSpan, Step};

use super::event::Event;
use super::{FIRST, Held, World};
use crate::action::{PeerEvent, PeerInput};
use crate::sim::engine::Observed;
use crate::sim::omitted_rules::Omit;
use crate::sim::watch::Seen;

impl World<'_> {
    pub(super) fn observe(&mut self, index: usize, observed: &Observed) -> Held {
        if let Observed::Copied { version, stage, weights } = *observed {
            let to = self.nodes[index].me;
            let when = self.now + self.rng.up_to(self.scenario.write);
            self.at(when, Event::Written { to, version, stage, weights });
        }
        let Some(oracles) = &mut self.oracles else { return Ok(()) };
        match observed {
            Observed::Nothing | Observed::Copied { .. } => Ok(()),
            Observed::Accumulated(key) => {
                let held = oracles.exactly_once.added(*key, self.nodes[index].me);
                self.holds("exactly once", held)
            }
            Observed::Restored(stage) => {
                oracles.exactly_once.begins_again(self.nodes[index].me, *stage);
                Ok(())
            }
            Observed::Applied { step, stage, sums, weights } => {
                let held = oracles.replicas.applied(*step, *stage, sums, *weights);
                self.holds("equal replicas", held)
            }
        }
    }

    pub(super) fn peer_event(&mut self, index: usize, event: PeerEvent) -> Held {
        let wrong = |text: String| Err::<(), String>(format!("peer {index}: {text}"));
        let me = self.nodes[index].me;
        let held = match event {
            PeerEvent::Applied { record } => {
                let held =
                    self.oracles.as_mut().map(|oracles| oracles.monotone.applied(me, record.step));
                return self.holds("never back", held.unwrap_or(Ok(())));
            }
            PeerEvent::Finished => {
                self.nodes[index].finished = true;
                Ok(())
            }
            PeerEvent::Drained | PeerEvent::Expelled { .. } => {
                self.ends(index, Some(self.scenario.faults.rebirth));
                Ok(())
            }
            PeerEvent::Refused { .. } | PeerEvent::Stopped { .. } if self.is_over() => {
                self.nodes[index].finished = true;
                Ok(())
            }
            PeerEvent::Refused { reason } | PeerEvent::Stopped { reason } => wrong(reason),
            PeerEvent::Fault(fault) => {
                self.report.faults.push(fault.clone());
                wrong(fault.to_string())
            }
            PeerEvent::Admitted { span } => {
                self.nodes[index].span = Some(span);
                Ok(())
            }
            PeerEvent::Serving { version } => {
                self.report.recovery.joined += u64::from(version.0 > 0);
                Ok(())
            }
            PeerEvent::Rewound { .. } => {
                if let Some(oracles) = &mut self.oracles {
                    oracles.monotone.begins_again(me);
                }
                Ok(())
            }
            PeerEvent::ResultLost { step, span } => {
                self.report.recovery.results_lost += 1;
                let oracles = self.oracles.as_mut();
                let held = oracles.map(|oracles| oracles.results.given_up(me, span, step));
                return self.holds("kept results", held.unwrap_or(Ok(())));
            }
            PeerEvent::Checkpoint { version, stages, oldest } => {
                return self.archives(index, version, stages.len(), oldest);
            }
            PeerEvent::Moved { to, .. } => {
                self.nodes[index].span = Some(StageSpan::one(to));
                self.report.moves += 1;
                Ok(())
            }
            PeerEvent::MoveBegun { .. } | PeerEvent::MoveCancelled { .. } => Ok(()),
            PeerEvent::Counted { key } => {
                self.show(Seen::Counted { peer: index, key });
                Ok(())
            }
            PeerEvent::View => return self.viewed(index),
        };
        if self.oracles.is_some() { self.holds("no fault", held) } else { Ok(()) }
    }

    /// A peer's view changed. Under `Omit::Readiness` views differ from the log, so they are not
    /// compared.
    fn viewed(&mut self, index: usize) -> Held {
        let node = &self.nodes[index];
        let oracles = self.oracles.as_ref().filter(|_| self.omitted_rules.omit != Omit::Readiness);
        let held = oracles.map(|oracles| oracles.views.has(node.me, node.peer.view()));
        self.holds("equal memberships", held.unwrap_or(Ok(())))
    }

    /// A checkpoint is complete: archiving peers report it, and old files are removed.
    fn archives(&mut self, index: usize, version: Step, stages: usize, oldest: Step) -> Held {
        let archives = index == FIRST || self.scenario.peers[index].archive;
        let engine = &mut self.nodes[index].engine;
        engine.forget_before(oldest);
        let whole =
            (0..stages as u16).all(|stage| engine.disk.contains_key(&(version, Stage(stage))));
        if archives && whole && self.now >= engine.disk_fails_until {
            return self.input(index, PeerInput::Archived { version });
        }
        Ok(())
    }
}
