//! The recent history of a run: events as text, and training figures as curves.

use crate::terminal::visible;
use std::collections::{BTreeMap, VecDeque};

use shoal_protocol::ids::{ContentHash, PeerId, RunId};
use shoal_protocol::message;

use super::diff::changes;
use super::downsampled_series::Series;
use super::survival::survival;
use super::{
    CostStatus, Curves, NodeState, Observation, RunStatus, ScoredStatus, Status, StatusEvent,
    SurvivalStatus, Tone, TrainingStatus,
};
use crate::event_text::describe;
use crate::events::{RunEvent, StepReport};
use crate::report::tokens_per_unit;
use crate::step_count::StepCount;
use crate::training_rate::TrainingRate;

/// The most events that are kept.
const MAX_EVENTS: usize = 128;

/// The most characters of one event: a reason that a peer sent may be long.
const CHARACTERS: usize = 240;

/// The most causes of losses that wait until the membership shows the loss.
const CAUSES: usize = 1024;

/// A moment, in milliseconds since 1970.
pub(super) type Millis = u64;

/// The recent history of a run.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    run: Option<RunId>,
    throughput: TrainingRate,
    training: TrainingStatus,
    loss: Series,
    held_out_loss: Series,
    tokens_per_second: Series,
    /// The cost of all steps, if a member had a price.
    cost: Option<f64>,
    /// Tokens of the steps that have a cost. A step that is computed again counts once.
    priced_tokens: u64,
    status_events: VecDeque<StatusEvent>,
    /// Why members were lost, until the membership shows the loss.
    causes: BTreeMap<PeerId, String>,
    /// Why the run is paused.
    pause: Option<String>,
    draining: bool,
    ended: Option<String>,
    /// Version and hash of the newest checkpoint that this node assembled.
    saved: Option<(u64, ContentHash)>,
    /// The newest checkpoint that this node scored.
    scored: Option<ScoredStatus>,
    observation: Observation,
}

impl EventLog {
    /// Records an event of the run.
    pub(super) fn note(&mut self, at: Millis, event: &RunEvent) {
        let text = describe(event).map(|text| plain(&text));
        match event {
            RunEvent::Started { run, .. } => self.begin(*run),
            RunEvent::Committed(step) => self.step(at, step),
            RunEvent::Waiting { .. } | RunEvent::Paused { .. } | RunEvent::StageLost { .. } => {
                if self.pause == text {
                    return;
                }
                self.pause.clone_from(&text);
            }
            RunEvent::BecameCoordinator { .. } => self.pause = None,
            RunEvent::Convicted { .. } => {}
            // The membership shows joins, losses and moves, to every member alike.
            RunEvent::Admitted { .. }
            | RunEvent::MoveBegun { .. }
            | RunEvent::Moves { .. }
            | RunEvent::MoveCancelled { .. } => return,
            RunEvent::Lost { peer, how, .. } => {
                if self.causes.len() < CAUSES {
                    self.causes.insert(*peer, how.clone());
                }
                return;
            }
            // The state of the node and of its members shows these.
            RunEvent::LongStep(_)
            | RunEvent::FewAnchors { .. }
            | RunEvent::CoordinatorUnreachable { .. }
            | RunEvent::CoordinatorReachable
            | RunEvent::AwaitsPeers { .. } => return,
            // Every message carries the era.
            RunEvent::Rewound { .. } => return,
            RunEvent::Draining { .. } => self.draining = true,
            RunEvent::Checkpoint { version, hash, .. } => {
                if self.saved.is_none_or(|(newest, _)| newest <= *version) {
                    self.saved = Some((*version, *hash));
                }
            }
            RunEvent::Scored { version, scores, .. } => {
                if self.scored.as_ref().is_none_or(|newest| newest.version <= *version) {
                    self.scored = Some(ScoredStatus { version: *version, scores: scores.clone() });
                }
            }
            RunEvent::Finished { .. } | RunEvent::Stopped { .. } => self.ended.clone_from(&text),
            RunEvent::Listening { .. }
            | RunEvent::Uploaded { .. }
            | RunEvent::UploadFailed { .. }
            | RunEvent::ScoreFailed { .. }
            | RunEvent::Outlier { .. }
            | RunEvent::Continued { .. }
            | RunEvent::ConnectionRefused { .. }
            | RunEvent::OwnPort(_)
            | RunEvent::AccessList { .. }
            | RunEvent::Moved { .. }
            | RunEvent::Joined { .. }
            | RunEvent::Serving { .. }
            | RunEvent::Anchors { .. }
            | RunEvent::Killed { .. } => {}
        }
        if let Some(text) = text {
            self.push(at, tone(event), &text);
        }
    }

    /// Records that a step began in the run that this peer coordinates, which ends every pause.
    pub(super) fn opened(&mut self) {
        self.pause = None;
    }

    /// Records the driver's observation, and the differences to the previous one as events.
    pub(super) fn see(&mut self, at: Millis, observation: Observation) {
        for (tone, text) in changes(&self.observation, &observation, &mut self.causes) {
            self.push(at, tone, &text);
        }
        self.observation = observation;
    }

    /// Records that the driver has ended: the node has no state, stages or links.
    pub(super) fn clear(&mut self) {
        self.observation.node.ready = false;
        self.observation.node.state = NodeState::Joining;
        self.observation.node.stages = None;
        self.observation.members.iter_mut().for_each(|member| member.link = None);
    }

    /// Whether the node serves the role that it has in the run, and is not leaving.
    pub(super) fn is_ready(&self) -> bool {
        self.observation.node.ready && !self.draining && self.ended.is_none()
    }

    /// The current status.
    pub(super) fn status(&self, at: Millis) -> Status {
        let mut node = self.observation.node.clone();
        (node.state, node.why) = self.state();
        node.ready = self.is_ready();
        let mut run = self.observation.run.clone();
        if let Some(checkpoint) = run.as_mut().and_then(|run| run.checkpoint.as_mut()) {
            let saved = self.saved.filter(|(version, _)| *version == checkpoint.version);
            checkpoint.hash = saved.map(|(_, hash)| hash);
        }
        let training = TrainingStatus {
            seconds_left: run.as_ref().and_then(|run| {
                let steps = run.steps.saturating_sub(run.version);
                Some(steps as f64 * self.training.seconds_per_step?)
            }),
            ..self.training.clone()
        };
        let survival = run.as_ref().and_then(|run| self.survival(run));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            at_ms: at,
            node,
            run,
            members: self.observation.members.clone(),
            training,
            survival,
            cost: self.cost(),
            scored: self.scored.clone(),
            curves: Curves {
                loss: self.loss.points(),
                held_out_loss: self.held_out_loss.points(),
                tokens_per_second: self.tokens_per_second.points(),
            },
            events: self.status_events.iter().cloned().collect(),
        }
    }

    fn survival(&self, run: &RunStatus) -> Option<SurvivalStatus> {
        survival(run, &self.observation.members, self.training.seconds_per_step)
    }

    /// The deaths that the run survives.
    pub(super) fn current_survival(&self) -> Option<SurvivalStatus> {
        self.survival(self.observation.run.as_ref()?)
    }

    fn cost(&self) -> Option<CostStatus> {
        let prices = || self.observation.members.iter().filter_map(|member| member.price);
        if self.cost.is_none() && prices().next().is_none() {
            return None;
        }
        Some(CostStatus {
            per_hour: prices().map(f64::from).sum(),
            total: self.cost.unwrap_or(0.0),
            tokens_per_currency_unit: tokens_per_unit(self.priced_tokens, self.cost),
        })
    }

    fn state(&self) -> (NodeState, Option<String>) {
        let seen = &self.observation.node;
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

    /// Starts another incarnation of the peer. The history of the same run stays.
    fn begin(&mut self, run: RunId) {
        if self.run != Some(run) {
            let status_events = std::mem::take(&mut self.status_events);
            *self = Self { run: Some(run), status_events, ..Self::default() };
        }
        self.pause = None;
        self.draining = false;
        self.ended = None;
    }

    fn step(&mut self, at: Millis, step: &StepReport) {
        let count = StepCount::through(step.step).number();
        self.pause = None;
        let number = |value: f64| value.is_finite().then_some(value);
        // A newcomer receives many commits at once. Their intervals say nothing about the steps'
        // durations.
        if self.observation.node.ready {
            self.throughput.note(step);
            self.tokens_per_second.push(count, step.tokens_per_second());
            self.training.tokens_per_second = number(self.throughput.tokens_per_second);
            self.training.seconds_per_step = number(self.throughput.seconds_per_step);
        }
        if let Some(cost) = step.cost.and_then(number) {
            *self.cost.get_or_insert(0.0) += cost;
            let new = self.training.step.is_none_or(|newest| newest < count);
            self.priced_tokens += if new && self.observation.node.ready { step.tokens } else { 0 };
        }
        // The driver's next observation may come up to a second later.
        if let Some(run) = &mut self.observation.run {
            run.version = run.version.max(count);
        }
        let training = &mut self.training;
        training.step = Some(count);
        training.loss = number(step.loss);
        training.gradient_norm = number(step.gradient_norm);
        training.committed_at_ms = Some(at);
        self.loss.push(count, step.loss);
        if let Some(loss) = step.held_out_loss {
            training.held_out_loss = number(loss);
            self.held_out_loss.push(count, loss);
        }
    }

    /// The curves, for a peer that joined later.
    pub(super) fn history(&self) -> message::Curves {
        message::Curves {
            loss: self.loss.history(),
            held_out_loss: self.held_out_loss.history(),
            tokens_per_second: self.tokens_per_second.history(),
        }
    }

    /// The first step of the curves, if a step was committed.
    pub(super) fn curves_begin(&self) -> Option<u64> {
        self.loss.begins()
    }

    /// Takes in another peer's curves of steps before those that this one has seen.
    pub(super) fn add_earlier(&mut self, curves: message::Curves) {
        self.loss.add_earlier(&curves.loss);
        self.held_out_loss.add_earlier(&curves.held_out_loss);
        self.tokens_per_second.add_earlier(&curves.tokens_per_second);
        let newest = self.held_out_loss.points().last().map(|point| point.1);
        self.training.held_out_loss = self.training.held_out_loss.or(newest);
    }

    fn push(&mut self, at_ms: Millis, tone: Tone, text: &str) {
        self.status_events.push_back(StatusEvent { at_ms, tone, text: plain(text) });
        if self.status_events.len() > MAX_EVENTS {
            self.status_events.pop_front();
        }
    }
}

/// Cuts a text to one short line without what a terminal would obey. The text may come from a peer.
fn plain(text: &str) -> String {
    visible(text).chars().take(CHARACTERS).collect()
}

fn tone(event: &RunEvent) -> Tone {
    match event {
        RunEvent::Serving { .. }
        | RunEvent::Checkpoint { .. }
        | RunEvent::Scored { .. }
        | RunEvent::Finished { .. } => Tone::Good,
        RunEvent::Paused { .. }
        | RunEvent::StageLost { .. }
        | RunEvent::Outlier { .. }
        | RunEvent::Stopped { .. } => Tone::Bad,
        _ => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{ContentHash, Stage, StageSpan};
    use shoal_protocol::message::MoveReason;

    use super::*;
    use crate::status::{MemberState, MoveStatus, NodeStatus, Point, RunStatus, example};

    fn started() -> RunEvent {
        RunEvent::Started {
            run: ContentHash([7; 32]),
            seed: 3,
            stages: 3,
            steps: 10,
            tokens_per_step: 1000,
            microbatches: 4,
            worker_steps: None,
        }
    }

    fn committed(step: u64, loss: f64) -> RunEvent {
        RunEvent::Committed(StepReport {
            step,
            loss,
            held_out_loss: (step == 0).then_some(5.5),
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            tokens: 1000,
            targets: 900,
            padded: 50,
            preferences: None,
            seconds: 0.5,
            cost: None,
            counted: 12,
            replayed: 0,
            all_reduce_seconds: None,
            duplicated: 0,
            peers: 3,
        })
    }

    /// The observation of a serving node's driver.
    fn observation() -> Observation {
        let example = example::status();
        let node = NodeStatus { state: NodeState::Serving, why: None, ..example.node };
        Observation { node, run: example.run, view: 1, members: example.members }
    }

    fn texts(event_log: &EventLog) -> Vec<&str> {
        event_log.status_events.iter().map(|status_event| status_event.text.as_str()).collect()
    }

    #[test]
    fn steps_become_numbers_and_curves() {
        let mut event_log = EventLog::default();
        event_log.note(0, &started());
        // Before it serves, a node receives many commits at once, and learns no durations from them.
        event_log.note(1, &committed(0, 5.0));
        event_log.see(2, observation());
        event_log.note(3, &committed(1, 4.0));
        let status = event_log.status(4);
        assert_eq!(status.curves.loss.len(), 2);
        assert_eq!(status.curves.held_out_loss.len(), 1);
        assert_eq!(status.curves.tokens_per_second, [Point(2, 2000.0)]);
        assert_eq!(status.training.loss, Some(4.0));
        assert_eq!(status.training.held_out_loss, Some(5.5));
        assert_eq!(status.training.committed_at_ms, Some(3));
        // Version 40 of 200, at half a second a step.
        assert_eq!(status.training.seconds_left, Some(80.0));
    }

    #[test]
    fn a_late_joiner_has_the_curves_of_the_steps_before() {
        let (mut first, mut late) = (EventLog::default(), EventLog::default());
        for log in [&mut first, &mut late] {
            log.note(0, &started());
            log.see(0, observation());
        }
        assert_eq!(late.curves_begin(), None);
        for step in 0..100 {
            first.note(step, &committed(step, 9.0 - step as f64 / 100.0));
        }
        for step in 70..100 {
            late.note(step, &committed(step, 9.0 - step as f64 / 100.0));
        }
        assert_eq!((late.curves_begin(), first.curves_begin()), (Some(71), Some(1)));
        late.add_earlier(first.history());
        assert_eq!(late.curves_begin(), Some(1));
        let [first, late] = [first, late].map(|log| log.status(100));
        // What travels has fewer digits.
        let near =
            |(one, other): (&Point, &Point)| one.0 == other.0 && (one.1 - other.1).abs() < 1e-5;
        let alike = |one: &[Point], other: &[Point]| {
            one.len() == other.len() && one.iter().zip(other).all(near)
        };
        assert!(alike(&late.curves.loss, &first.curves.loss), "{:?}", late.curves.loss);
        assert!(alike(&late.curves.held_out_loss, &first.curves.held_out_loss));
        assert!(alike(&late.curves.tokens_per_second, &first.curves.tokens_per_second));
        assert_eq!(late.training.held_out_loss, Some(5.5));
    }

    #[test]
    fn steps_have_a_cost_where_members_have_a_price() {
        let mut event_log = EventLog::default();
        let paid = |at, cost| match committed(at, 4.0) {
            RunEvent::Committed(step) => RunEvent::Committed(StepReport { cost, ..step }),
            other => other,
        };
        let mut now = observation();
        now.members.iter_mut().for_each(|member| member.price = None);
        event_log.see(1, now.clone());
        event_log.note(2, &paid(0, None));
        assert_eq!(event_log.status(2).cost, None);
        now.members[0].price = Some("0.5".parse().expect("a price"));
        now.members[1].price = Some("2".parse().expect("a price"));
        event_log.see(3, now.clone());
        for at in [1, 2, 2] {
            event_log.note(4, &paid(at, Some(0.25)));
        }
        let expected = CostStatus {
            per_hour: 2.5,
            total: 0.75,
            tokens_per_currency_unit: Some(2000.0 / 0.75),
        };
        assert_eq!(event_log.status(5).cost, Some(expected));
        // What was paid stays when the members are gone.
        now.members.clear();
        event_log.see(6, now);
        assert_eq!(event_log.status(6).cost, Some(CostStatus { per_hour: 0.0, ..expected }));
    }

    #[test]
    fn a_loss_that_is_not_a_number_can_be_serialized() {
        let mut event_log = EventLog::default();
        event_log.note(0, &committed(0, f64::NAN));
        let status = event_log.status(1);
        let text = serde_json::to_string(&status).expect("plain data");
        assert_eq!(serde_json::from_str::<Status>(&text).expect("it parses"), status);
        assert_eq!(status.training.loss, None);
    }

    #[test]
    fn a_run_is_paused_until_a_step_begins() {
        let mut event_log = EventLog::default();
        event_log.note(0, &started());
        event_log.see(0, observation());
        let waiting = RunEvent::Waiting { stages: vec![2], members: 0 };
        event_log.note(1, &waiting);
        event_log.note(2, &waiting);
        let node = event_log.status(3).node;
        assert_eq!(node.state, NodeState::Paused);
        assert_eq!(node.why.as_deref(), Some("waits for a host of stage 2"));
        assert_eq!(texts(&event_log).len(), 2, "{:?}", texts(&event_log));
        event_log.opened();
        assert_eq!(event_log.status(4).node.state, NodeState::Serving);
        event_log.note(5, &waiting);
        event_log.note(6, &committed(0, 5.0));
        assert_eq!(event_log.status(7).node.state, NodeState::Serving);
    }

    #[test]
    fn a_leaving_node_is_not_ready_and_its_next_incarnation_may_be() {
        let mut event_log = EventLog::default();
        event_log.note(0, &started());
        event_log.see(0, observation());
        assert!(event_log.is_ready());
        event_log.note(1, &RunEvent::Draining { source: "SIGTERM".into() });
        assert!(!event_log.is_ready());
        assert_eq!(event_log.status(1).node.state, NodeState::Draining);
        event_log.clear();
        event_log.note(2, &started());
        assert!(!event_log.is_ready());
        event_log.see(3, observation());
        assert!(event_log.is_ready());
        event_log.note(4, &RunEvent::Stopped { reason: "no room".into() });
        assert_eq!(event_log.status(5).node.why.as_deref(), Some("the run stopped: no room"));
    }

    #[test]
    fn joins_and_losses_are_events_with_their_causes() {
        let mut event_log = EventLog::default();
        let mut now = observation();
        event_log.see(0, now.clone());
        let lost = now.members.remove(1);
        let how = "its connection broke".to_owned();
        let span = StageSpan::none();
        event_log.note(1, &RunEvent::Lost { peer: lost.peer, name: None, span, how });
        now.members[1].state = MemberState::Serving;
        now.view = 2;
        event_log.see(2, now.clone());
        let expected = [
            format!("{} is gone from stage 1: its connection broke", lost.title()),
            format!("{} serves stage 1", now.members[1].title()),
        ];
        assert_eq!(texts(&event_log), expected);

        now.members.push(lost);
        now.view = 3;
        let run: &mut RunStatus = now.run.as_mut().expect("there is one");
        (run.era, run.version) = (2, 35);
        event_log.see(3, now.clone());
        let expected = [
            "the run goes back to step 35".to_owned(),
            format!("{} hosts stage 1", now.members[3].title()),
        ];
        assert_eq!(texts(&event_log)[2..], expected);
        // Differences to another run are no events.
        now.run.as_mut().expect("there is one").id = ContentHash([8; 32]);
        now.members.clear();
        event_log.see(4, now);
        assert_eq!(texts(&event_log).len(), 4);
    }

    #[test]
    fn a_change_of_stage_is_an_event_with_its_reason() {
        let mut event_log = EventLog::default();
        let mut now = observation();
        event_log.see(0, now.clone());
        let peer = now.members[1].title();
        let reason = MoveReason::MembersGone;
        // An event that only the coordinator has is not reported twice.
        let (from, to) = (StageSpan::one(Stage(1)), StageSpan::one(Stage(2)));
        let peer_id = now.members[1].peer;
        let begun = RunEvent::MoveBegun { peer: peer_id, name: None, from, to, reason };
        event_log.note(1, &begun);
        let begins = MoveStatus { to, reason };
        for (view, moves, stage) in
            [(2, Some(begins), 1), (3, None, 1), (4, Some(begins), 1), (5, None, 2)]
        {
            now.members[1].moves = moves;
            now.members[1].stages = StageSpan::one(Stage(stage));
            now.view = view;
            event_log.see(view, now.clone());
        }
        let moves_away = format!("{peer} moves from stage 1 to stage 2: members of it are gone");
        let stays = format!("{peer} stays at stage 1");
        let hosts = format!("{peer} hosts stage 2 instead of stage 1");
        assert_eq!(texts(&event_log), [moves_away.clone(), stays, moves_away, hosts]);
    }

    #[test]
    fn events_are_bounded_and_without_control_characters() {
        let mut event_log = EventLog::default();
        for step in 0..3 * MAX_EVENTS {
            let source = format!("{step} \u{1b}[2J\r\n{}", "x".repeat(10_000));
            event_log.note(0, &RunEvent::Draining { source });
        }
        assert_eq!(event_log.status_events.len(), MAX_EVENTS);
        for text in texts(&event_log) {
            assert!(
                text.chars().count() <= CHARACTERS && !text.contains(char::is_control),
                "{text}"
            );
        }
    }
}
