//! What happened in a run so far, as much of it as is shown.

use std::collections::{BTreeMap, VecDeque};

use shoal_protocol::ids::{ContentHash, PeerId, RunId};

use super::news::news;
use super::series::Series;
use super::{Curves, Happening, NodeState, Sight, Status, Tone, TrainingStatus};
use crate::events::{RunEvent, StepReport};
use crate::progress::{Pace, describe};

/// The most happenings that are kept.
const HAPPENINGS: usize = 128;

/// The most characters of one: what a peer gives as its reason may be long.
const CHARACTERS: usize = 240;

/// The most causes of losses that wait for the membership that shows the loss.
const CAUSES: usize = 1024;

/// A moment, in milliseconds since 1970.
pub(super) type Millis = u64;

/// What happened in a run so far.
#[derive(Debug, Default)]
pub(super) struct Chronicle {
    run: Option<RunId>,
    pace: Pace,
    training: TrainingStatus,
    loss: Series,
    held_out_loss: Series,
    tokens_per_second: Series,
    happenings: VecDeque<Happening>,
    /// Why members were lost, until the membership shows that they are.
    causes: BTreeMap<PeerId, String>,
    /// Why the run stands still.
    pause: Option<String>,
    draining: bool,
    ended: Option<String>,
    /// Of the newest checkpoint that was brought together here.
    saved: Option<(u64, ContentHash)>,
    sight: Sight,
}

impl Chronicle {
    /// Takes in an event.
    pub(super) fn note(&mut self, at: Millis, event: &RunEvent) {
        let text = describe(event);
        match event {
            RunEvent::Started { run, .. } => self.begin(*run),
            RunEvent::Committed(step) => self.step(at, step),
            RunEvent::Waiting { .. } | RunEvent::Paused { .. } | RunEvent::Stranded { .. } => {
                if self.pause == text {
                    return;
                }
                self.pause.clone_from(&text);
            }
            RunEvent::TookOver { .. } => self.pause = None,
            // The membership shows who came and went, to every member alike.
            RunEvent::Admitted { .. } => return,
            RunEvent::Lost { peer, how, .. } => {
                if self.causes.len() < CAUSES {
                    self.causes.insert(*peer, how.clone());
                }
                return;
            }
            // So does the era, with every message.
            RunEvent::Rewound { .. } => return,
            RunEvent::Draining { .. } => self.draining = true,
            RunEvent::Checkpoint { version, hash, .. } => {
                if self.saved.is_none_or(|(newest, _)| newest <= *version) {
                    self.saved = Some((*version, *hash));
                }
            }
            RunEvent::Finished { .. } | RunEvent::Stopped { .. } => self.ended.clone_from(&text),
            RunEvent::Listening { .. }
            | RunEvent::Joined { .. }
            | RunEvent::Serving { .. }
            | RunEvent::Anchors { .. }
            | RunEvent::Killed { .. } => {}
        }
        if let Some(text) = text {
            self.push(at, tone(event), &text);
        }
    }

    /// A step of the run that this peer keeps has begun: nothing is waited for any more.
    pub(super) fn opened(&mut self) {
        self.pause = None;
    }

    /// Takes in what the driver sees.
    pub(super) fn see(&mut self, at: Millis, sight: Sight) {
        for (tone, text) in news(&self.sight, &sight, &mut self.causes) {
            self.push(at, tone, &text);
        }
        self.sight = sight;
    }

    /// The driver is gone: what it saw is so no more.
    pub(super) fn look_away(&mut self) {
        self.sight.node.ready = false;
        self.sight.node.state = NodeState::Joining;
        self.sight.node.stages = None;
        self.sight.members.iter_mut().for_each(|member| member.link = None);
    }

    /// Whether the node does what it is there for, and does not leave.
    pub(super) fn is_ready(&self) -> bool {
        self.sight.node.ready && !self.draining && self.ended.is_none()
    }

    /// Everything as it is now.
    pub(super) fn status(&self, at: Millis) -> Status {
        let mut node = self.sight.node.clone();
        (node.state, node.why) = self.state();
        node.ready = self.is_ready();
        let mut run = self.sight.run.clone();
        if let Some(checkpoint) = run.as_mut().and_then(|run| run.checkpoint.as_mut()) {
            let saved = self.saved.filter(|(version, _)| *version == checkpoint.version);
            checkpoint.hash = saved.map(|(_, hash)| hash);
        }
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            at_ms: at,
            node,
            run,
            members: self.sight.members.clone(),
            training: self.training.clone(),
            curves: Curves {
                loss: self.loss.points(),
                held_out_loss: self.held_out_loss.points(),
                tokens_per_second: self.tokens_per_second.points(),
            },
            events: self.happenings.iter().cloned().collect(),
        }
    }

    fn state(&self) -> (NodeState, Option<String>) {
        let seen = &self.sight.node;
        if let Some(end) = &self.ended {
            (NodeState::Over, Some(end.clone()))
        } else if self.draining {
            (NodeState::Draining, None)
        } else if seen.state == NodeState::Serving && self.pause.is_some() {
            (NodeState::Paused, self.pause.clone())
        } else {
            (seen.state, seen.why.clone())
        }
    }

    /// Another life of the peer. What is known of the same run stays.
    fn begin(&mut self, run: RunId) {
        if self.run != Some(run) {
            let happenings = std::mem::take(&mut self.happenings);
            *self = Self { run: Some(run), happenings, ..Self::default() };
        }
        self.pause = None;
        self.draining = false;
        self.ended = None;
    }

    fn step(&mut self, at: Millis, step: &StepReport) {
        self.pause = None;
        let number = |value: f64| value.is_finite().then_some(value);
        // A newcomer hears of many steps at once, which says nothing of what they took.
        if self.sight.node.ready {
            self.pace.note(step);
            let rate = step.tokens as f64 / step.seconds.max(1e-9);
            self.tokens_per_second.push(step.step, rate);
            self.training.tokens_per_second = number(self.pace.tokens_per_second);
            self.training.seconds_per_step = number(self.pace.seconds_per_step);
        }
        let training = &mut self.training;
        training.step = Some(step.step);
        training.loss = number(step.loss);
        training.gradient_norm = number(step.gradient_norm);
        training.committed_at_ms = Some(at);
        self.loss.push(step.step, step.loss);
        if let Some(loss) = step.held_out_loss {
            training.held_out_loss = number(loss);
            self.held_out_loss.push(step.step, loss);
        }
    }

    fn push(&mut self, at_ms: Millis, tone: Tone, text: &str) {
        // A peer's word may be anything, and a terminal obeys some of it.
        let text = text.chars().take(CHARACTERS);
        let text = text.map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.happenings.push_back(Happening { at_ms, tone, text });
        if self.happenings.len() > HAPPENINGS {
            self.happenings.pop_front();
        }
    }
}

fn tone(event: &RunEvent) -> Tone {
    match event {
        RunEvent::Serving { .. } | RunEvent::Checkpoint { .. } | RunEvent::Finished { .. } => {
            Tone::Good
        }
        RunEvent::Paused { .. } | RunEvent::Stranded { .. } | RunEvent::Stopped { .. } => Tone::Bad,
        _ => Tone::Plain,
    }
}
