//! A pipeline with one engine per stage, and links with latency and limited rate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::Microbatch;
use shoal_protocol::units::Moment;

use super::{Pass, Schedule, all, first_window};

/// A pipeline and the work of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pipeline {
    /// Number of stages, each with its own engine.
    pub stages: usize,
    /// Microbatches per step.
    pub microbatches: usize,
    /// Duration of a forward pass of one stage.
    pub forward: Duration,
    /// Duration of a backward pass of one stage.
    pub backward: Duration,
    /// One-way latency between neighbouring stages.
    pub delay: Duration,
    /// How long an activation or its gradient occupies its direction of a link.
    pub transfer: Duration,
}

impl Pipeline {
    /// A lower bound of a step's time for any order of passes: one stage's work at the speed of its
    /// engine or its links, whichever is slower, plus the time until its first activation arrives
    /// and after its last gradient leaves.
    #[must_use]
    pub fn least(&self) -> Duration {
        let Some(rest) = (self.microbatches as u32).checked_sub(1) else { return Duration::ZERO };
        let passes = self.forward + self.backward;
        let boundaries = self.stages.saturating_sub(1) as u32;
        let service_time = if boundaries > 0 { passes.max(self.transfer) } else { passes };
        passes + service_time * rest + (passes + (self.delay + self.transfer) * 2) * boundaries
    }
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Time from its first pass to the end of its last.
    pub time: Duration,
    /// Total time that the engines ran.
    pub busy: Duration,
    /// For each stage, the maximum number of microbatches whose activations it kept.
    pub peak: Vec<usize>,
}

impl Outcome {
    /// The fraction of the time that the engines ran.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        self.busy.as_secs_f64() / (self.time.as_secs_f64() * self.peak.len() as f64)
    }
}

/// Limit of microbatches in flight at each stage, as in Shoal's peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows(Vec<usize>);

impl Windows {
    /// The initial windows of peers.
    #[must_use]
    pub fn first(stages: usize) -> Self {
        Self((0..stages).map(|stage| first_window(stages - 1 - stage)).collect())
    }

    /// The window of each stage.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.0
    }
}

/// Runs a step in the order of a table.
///
/// # Panics
/// If the pipeline has no stages.
#[must_use]
pub fn run_table(pipeline: &Pipeline, schedule: Schedule) -> Outcome {
    let table = |stage| schedule.table(pipeline.stages - 1 - stage, pipeline.microbatches);
    let tables = (0..pipeline.stages).map(table).collect();
    World::new(pipeline, Order::Tables(tables)).run().0
}

/// Runs a step as Shoal's peers do. An engine runs any possible pass, backward passes and low
/// microbatches first. A stage accepts offers as far as its window has room, and tells the previous
/// stage in time for the activation. A window that keeps work out while the engine is idle is
/// widened by one. The windows keep their final values.
///
/// # Panics
/// If the pipeline has no stages, or a different number than there are windows.
#[must_use]
pub fn run_windows(pipeline: &Pipeline, windows: &mut Windows) -> Outcome {
    assert_eq!(windows.0.len(), pipeline.stages, "a window for each stage");
    let (outcome, order) = World::new(pipeline, Order::Windows(windows.clone())).run();
    if let Order::Windows(widened) = order {
        *windows = widened;
    }
    outcome
}

/// Number of steps after which windows no longer grow.
const SETTLED: usize = 50;

/// Runs several steps like [`run_windows`]. Returns the last one and the final windows.
///
/// # Panics
/// If the pipeline has no stages.
#[must_use]
pub fn settle(pipeline: &Pipeline) -> (Outcome, Windows) {
    let mut windows = Windows::first(pipeline.stages);
    for _ in 1..SETTLED {
        let before = windows.clone();
        let outcome = run_windows(pipeline, &mut windows);
        if windows == before {
            return (outcome, windows);
        }
    }
    (run_windows(pipeline, &mut windows), windows)
}

/// How the next pass is chosen.
#[derive(Debug)]
enum Order {
    Tables(Vec<Vec<Pass>>),
    Windows(Windows),
}

/// An event at one stage.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// The first stage is offered all microbatches, the others those that the previous stage
    /// accepted.
    Offered(Microbatch),
    /// The next stage accepted the microbatch.
    Accepted(Microbatch),
    Activation(Microbatch),
    Gradient(Microbatch),
    Ended(Pass),
}

#[derive(Debug, Default)]
struct StageState {
    running: bool,
    /// Number of passes begun.
    begun: usize,
    forwards: BTreeSet<Microbatch>,
    backwards: BTreeSet<Microbatch>,
    /// Offers without room.
    offers: BTreeSet<Microbatch>,
    taken: usize,
    /// Microbatches that the next stage accepted, and those computed for it; those in both are
    /// sent.
    accepted: BTreeSet<Microbatch>,
    computed: BTreeSet<Microbatch>,
    /// When its link to the next stage, and the one to the previous stage, are free.
    onward: Moment,
    back: Moment,
    /// Number of activations kept.
    kept: usize,
    peak: usize,
    ended: bool,
}

struct World<'a> {
    pipeline: &'a Pipeline,
    order: Order,
    now: Moment,
    stages: Vec<StageState>,
    /// Future events; the number orders events of one moment.
    events: BTreeMap<(Moment, u64), (usize, Event)>,
    number: u64,
    busy: Duration,
}

impl<'a> World<'a> {
    fn new(pipeline: &'a Pipeline, order: Order) -> Self {
        assert!(pipeline.stages > 0, "a pipeline has stages");
        let stages = (0..pipeline.stages).map(|_| StageState::default()).collect();
        let now = Moment::default();
        let mut world = Self {
            pipeline,
            order,
            now,
            stages,
            events: BTreeMap::new(),
            number: 0,
            busy: Duration::ZERO,
        };
        for microbatch in all(pipeline.microbatches) {
            world.at(now, 0, Event::Offered(microbatch));
        }
        world
    }

    fn run(mut self) -> (Outcome, Order) {
        while let Some(((moment, _), _)) = self.events.first_key_value() {
            self.now = *moment;
            while let Some(next) = self.events.first_entry().filter(|next| next.key().0 == self.now)
            {
                let (stage, event) = next.remove();
                self.happens(stage, event);
            }
            for stage in 0..self.pipeline.stages {
                self.dispatch(stage);
                if std::mem::take(&mut self.stages[stage].ended) && !self.stages[stage].running {
                    self.widen(stage);
                }
            }
        }
        let begun = self.stages.iter().all(|stage| stage.begun == 2 * self.pipeline.microbatches);
        assert!(begun, "every microbatch goes through every stage");
        let peak = self.stages.iter().map(|stage| stage.peak).collect();
        (Outcome { time: self.now.0, busy: self.busy, peak }, self.order)
    }

    fn at(&mut self, moment: Moment, stage: usize, event: Event) {
        self.events.insert((moment, self.number), (stage, event));
        self.number += 1;
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.pipeline.stages
    }

    fn happens(&mut self, stage: usize, event: Event) {
        let last = self.is_last(stage);
        let state = &mut self.stages[stage];
        match event {
            Event::Offered(microbatch) => {
                state.offers.insert(microbatch);
                self.admit(stage);
            }
            Event::Accepted(microbatch) => {
                state.accepted.insert(microbatch);
                self.send(stage, microbatch);
            }
            Event::Activation(microbatch) => {
                state.forwards.insert(microbatch);
            }
            Event::Gradient(microbatch) => {
                state.backwards.insert(microbatch);
            }
            Event::Ended(pass) => {
                (state.running, state.ended) = (false, true);
                match pass {
                    Pass::Forward(microbatch) if last => {
                        state.backwards.insert(microbatch);
                    }
                    Pass::Forward(microbatch) => {
                        state.computed.insert(microbatch);
                        self.send(stage, microbatch);
                    }
                    Pass::Backward(microbatch) => {
                        state.kept -= 1;
                        state.taken -= 1;
                        self.admit(stage);
                        self.send_back(stage, microbatch);
                    }
                }
            }
        }
    }

    /// Accepts offers while there is room, and offers them to the next stage.
    fn admit(&mut self, stage: usize) {
        let room = match &self.order {
            Order::Tables(_) => usize::MAX,
            Order::Windows(windows) => windows.0[stage],
        };
        while self.stages[stage].taken < room {
            let Some(microbatch) = self.stages[stage].offers.pop_first() else { return };
            self.stages[stage].taken += 1;
            // A step's work is granted and offered while the previous step ends, so at its start
            // the offers that fit into the windows are already answered.
            let start = self.now == Moment::default();
            let there = if start { self.now } else { self.now + self.pipeline.delay };
            if stage == 0 {
                self.stages[stage].forwards.insert(microbatch);
            } else if matches!(self.order, Order::Windows(_)) {
                self.at(there, stage - 1, Event::Accepted(microbatch));
            }
            if !self.is_last(stage) {
                self.offer_onward(stage, microbatch, there);
            }
        }
    }

    /// With windows an offer takes a one-way latency; with a table there is always room.
    fn offer_onward(&mut self, stage: usize, microbatch: Microbatch, there: Moment) {
        if matches!(self.order, Order::Windows(_)) {
            self.at(there, stage + 1, Event::Offered(microbatch));
        } else {
            self.stages[stage].accepted.insert(microbatch);
            self.at(self.now, stage + 1, Event::Offered(microbatch));
        }
    }

    fn send(&mut self, stage: usize, microbatch: Microbatch) {
        let (delay, transfer) = (self.pipeline.delay, self.pipeline.transfer);
        let state = &mut self.stages[stage];
        if state.computed.contains(&microbatch) && state.accepted.contains(&microbatch) {
            state.onward = state.onward.max(self.now) + transfer;
            let there = state.onward + delay;
            self.at(there, stage + 1, Event::Activation(microbatch));
        }
    }

    fn send_back(&mut self, stage: usize, microbatch: Microbatch) {
        if stage > 0 {
            let state = &mut self.stages[stage];
            state.back = state.back.max(self.now) + self.pipeline.transfer;
            let there = state.back + self.pipeline.delay;
            self.at(there, stage - 1, Event::Gradient(microbatch));
        }
    }

    /// Begins the next pass if the engine is idle and the input is there.
    fn dispatch(&mut self, stage: usize) {
        let state = &mut self.stages[stage];
        let possible = state.backwards.first().copied().map(Pass::Backward);
        let possible = possible.or_else(|| state.forwards.first().copied().map(Pass::Forward));
        let next = match &self.order {
            Order::Windows(_) => possible,
            Order::Tables(tables) => tables[stage].get(state.begun).copied(),
        };
        let Some(pass) = next.filter(|_| !state.running) else { return };
        let (here, takes) = match pass {
            Pass::Forward(microbatch) => {
                (state.forwards.remove(&microbatch), self.pipeline.forward)
            }
            Pass::Backward(microbatch) => {
                (state.backwards.remove(&microbatch), self.pipeline.backward)
            }
        };
        if !here {
            return;
        }
        state.running = true;
        state.begun += 1;
        if matches!(pass, Pass::Forward(_)) {
            state.kept += 1;
            state.peak = state.peak.max(state.kept);
        }
        self.busy += takes;
        self.at(self.now + takes, stage, Event::Ended(pass));
    }

    /// Widens the window of a stage whose engine has run out of work, if the window keeps work out:
    /// the rule of `peer/compute`.
    fn widen(&mut self, stage: usize) {
        let Order::Windows(windows) = &mut self.order else { return };
        let state = &self.stages[stage];
        if !state.offers.is_empty() && state.taken >= windows.0[stage] {
            windows.0[stage] += 1;
            self.admit(stage);
            self.dispatch(stage);
        }
    }
}
