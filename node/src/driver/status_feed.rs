//! Everything that the driver reports: events of the run, the status for observers, and metrics.

use std::time::{Duration, Instant};

use shoal_formats::own_port::OwnPort;
use shoal_metrics::{NodeState, Preemption};
use shoal_protocol::ids::{ClaimKey, Era, Member, Stage, Step};
use shoal_protocol::manifest::{Manifest, Verdict};
use shoal_protocol::message::{self, CommitRecord, Conviction, FixedLoss, View, proof_of_all};
use shoal_protocol::units::Moment;
use shoal_scheduler::action::{AuditOutcome, CoordinatorEvent, StepCounts};

use super::admission::Refusals;
use super::context::Context;
use super::coordinator_contact::PATIENCE;
use super::cost_meter::CostMeter;
use super::metrics_update::MetricsUpdate;
use super::observer::Observer;
use super::peer_names::PeerNames;
use super::step_progress::StepProgress;
use crate::events::{PreferenceNumbers, RunEvent, StepReport};
use crate::status::{Observation, StatusWatch};
use crate::step_count::StepCount;

/// Time between two updates of the status. A change of the membership updates it at once.
const UPDATE_EVERY: Duration = Duration::from_secs(1);

/// How long the coordinator is unreachable before that is reported: of several anchors another one
/// takes over sooner.
const REPORT_AFTER: Duration = Duration::from_secs(5);

/// Owns the observers of the run and the numbers that only they need.
pub(super) struct StatusFeed<'a> {
    observer: &'a mut dyn Observer,
    status_watch: StatusWatch,
    metrics: MetricsUpdate,
    /// The last update of the status, and the number of the membership in it.
    updated: Option<(Instant, u64)>,
    /// Whether it was reported that the coordinator is unreachable.
    coordinator_unreachable: bool,
    /// The beginning of the open step.
    step_began: Moment,
    cost: CostMeter,
    step_progress: StepProgress,
    /// The newest step that was reported, and its era.
    last_announced: Option<(Era, Step)>,
}

/// The status of a process without a driver is empty, however the driver ended.
impl Drop for StatusFeed<'_> {
    fn drop(&mut self) {
        self.status_watch.clear();
    }
}

impl<'a> StatusFeed<'a> {
    pub(super) fn new(observer: &'a mut dyn Observer, metrics: MetricsUpdate) -> Self {
        let status_watch = observer.status_watch().clone();
        Self {
            observer,
            status_watch,
            metrics,
            updated: None,
            coordinator_unreachable: false,
            step_began: Moment::default(),
            cost: CostMeter::default(),
            step_progress: StepProgress::default(),
            last_announced: None,
        }
    }

    /// Reports an event of the run.
    pub(super) fn note(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Scored { version, scores, .. } => self.metrics.scored(*version, scores),
            RunEvent::ScoreFailed { .. } => self.metrics.score_failed(),
            _ => {}
        }
        self.observer.note(event);
    }

    /// Reports that this process takes part in a run.
    pub(super) fn started(&mut self, manifest: &Manifest) {
        let training = &manifest.training;
        self.note(&RunEvent::Started {
            run: manifest.run_id(),
            seed: training.seed,
            stages: training.stages,
            steps: training.steps,
            tokens_per_step: manifest.tokens_per_step(),
            microbatches: training.microbatches,
            worker_steps: manifest.inner.as_ref().map(|inner| inner.steps),
        });
    }

    pub(super) fn metrics(&mut self) -> &mut MetricsUpdate {
        &mut self.metrics
    }

    /// Takes in a change of the membership.
    pub(super) fn members_changed(&mut self, context: &Context, view: &View) {
        self.cost.members(context.now(), view);
        self.metrics.members(view, context.me, &context.manifest);
        context.names.note(view);
    }

    /// The curves that this peer has, for another one.
    pub(super) fn earlier_curves(&self) -> message::Curves {
        self.status_watch.history()
    }

    /// Returns whether steps were committed of which the first ones, after a version, are not in the curves.
    pub(super) fn lacks_curves_after(&self, version: Step) -> bool {
        let begins = self.status_watch.curves_begin();
        begins.is_some_and(|begins| begins > StepCount::through(version.0).number())
    }

    /// Takes in another peer's curves of earlier steps.
    pub(super) fn add_earlier(&self, curves: message::Curves) {
        self.status_watch.add_earlier(curves);
    }

    /// Returns whether the status is old, or has another membership than this one.
    pub(super) fn is_due(&self, view: u64) -> bool {
        self.updated.is_none_or(|(at, of)| of != view || at.elapsed() >= UPDATE_EVERY)
    }

    /// Updates the status.
    pub(super) fn update(&mut self, context: &Context, mut status: Observation) {
        self.updated = Some((Instant::now(), status.view));
        let microbatches = context.manifest.training.microbatches;
        status.node.open_step = self.step_progress.open_step(microbatches);
        if let Some(open_step) = self.step_progress.due(context.now(), microbatches) {
            self.note(&RunEvent::LongStep(open_step));
        }
        self.status_watch.see(status);
        self.metrics.survival(self.status_watch.survival().as_ref());
    }

    /// Counts a microbatch that this peer has done.
    pub(super) fn counted(&mut self, context: &Context, key: ClaimKey) {
        // The others are evaluated alone.
        if key.microbatch.0 < context.manifest.training.microbatches {
            self.step_progress.counted(key);
        }
    }

    /// Reports that the run returned to a version.
    pub(super) fn rewound(&mut self, context: &Context, version: Step) {
        self.metrics.version(version);
        self.step_progress.rewound(context.now());
    }

    /// Reports that the coordinator is unreachable, or reachable again.
    pub(super) fn coordinator_unreachable_for(&mut self, time: Option<Duration>) {
        let unreachable = time.is_some_and(|time| time >= REPORT_AFTER);
        if std::mem::replace(&mut self.coordinator_unreachable, unreachable) != unreachable {
            let event = if unreachable {
                RunEvent::CoordinatorUnreachable { wait_seconds: PATIENCE.as_secs() }
            } else {
                RunEvent::CoordinatorReachable
            };
            self.note(&event);
        }
    }

    /// Reports refused connections.
    pub(super) fn refused_connections(&mut self, Refusals { counts, newest }: Refusals) {
        self.metrics.turned_away(&counts);
        for refused in newest {
            let reason = self.metrics.name_of(refused.reason).to_owned();
            let (peer, address, text) = (refused.peer, refused.address, refused.text);
            self.note(&RunEvent::ConnectionRefused { peer, address, reason, text });
        }
    }

    /// Reports the reachability of this peer's own port.
    pub(super) fn own_port(&mut self, port: OwnPort) {
        self.metrics.own_port(&port);
        self.note(&RunEvent::OwnPort(port));
    }

    /// Reports that this peer leaves in order.
    pub(super) fn draining(&mut self, preemption: Preemption, source: &str) {
        self.metrics.is(NodeState::Draining);
        self.metrics.preempted(preemption);
        self.note(&RunEvent::Draining { source: source.to_owned() });
    }

    /// Reports an event of the local coordinator, other than a commit.
    pub(super) fn coordinator_event(&mut self, context: &Context, event: CoordinatorEvent) {
        if let CoordinatorEvent::Opened { step } = event {
            self.status_watch.opened();
            // Later steps begin with the commit before.
            if context.manifest.is_initial(step) {
                self.step_began = context.now();
            }
            return;
        }
        if let CoordinatorEvent::Admitted { member, name: Some(name), .. } = &event {
            context.names.add(member.peer, name.clone());
        }
        match run_event(event, &context.names) {
            Ok(event) => self.note(&event),
            Err(event) => log(&event, &context.names),
        }
    }

    /// Reports a committed step once: the coordinator, if it is here, does so before the peer.
    /// Returns whether the step is new.
    pub(super) fn committed(
        &mut self,
        context: &Context,
        record: &CommitRecord,
        counts: Option<StepCounts>,
        members: usize,
    ) -> bool {
        if self.last_announced.is_some_and(|last| last >= (record.era, record.step)) {
            return false;
        }
        self.last_announced = Some((record.era, record.step));
        let now = context.now();
        self.step_progress.committed(now, record.step.next());
        let seconds = now.since(self.step_began).as_secs_f64();
        self.step_began = now;
        let (manifest, training) = (&context.manifest, &context.manifest.training);
        let terms = manifest.terms_per_microbatch();
        let report = StepReport {
            step: record.step.0,
            loss: record.loss.mean(terms),
            held_out_loss: record.held_out_loss.map(|loss| loss.mean(terms)),
            learning_rate: shoal_engine::learning_rate(manifest, record.step),
            gradient_norm: record.gradient_norm,
            tokens: manifest.tokens_per_step(),
            targets: record.loss.targets,
            padded: record.loss.padded,
            preferences: preferences(manifest, record),
            seconds,
            cost: self.cost.step(now),
            counted: proven(record, training.stages, training.microbatches),
            all_reduce_seconds: counts.map(|counts| counts.all_reduce.as_secs_f64()),
            replayed: counts.map_or(0, |counts| counts.replayed),
            duplicated: counts.map_or(0, |counts| counts.repeated),
            peers: members,
        };
        self.metrics.committed(record.era, &report);
        self.note(&RunEvent::Committed(report));
        true
    }
}

impl StatusFeed<'_> {
    /// The run's guard found a step far out.
    pub(super) fn judged(&mut self, step: Step, verdict: &Verdict) {
        let Some(outlier) = &verdict.outlier else { return };
        self.metrics.outlier(outlier);
        let (reason, rate) = (outlier.name().to_owned(), verdict.rate);
        let (step, text) = (step.0, outlier.to_string());
        self.note(&RunEvent::Outlier { step, reason, rate, text });
    }
}

/// What the model prefers, in a run on pairs.
fn preferences(manifest: &Manifest, record: &CommitRecord) -> Option<PreferenceNumbers> {
    manifest.training.loss.preference()?;
    Some(PreferenceNumbers {
        accuracy: record.loss.accuracy(),
        margin: record.loss.mean_margin(manifest.terms_per_microbatch()),
        held_out_accuracy: record.held_out_loss.map(FixedLoss::accuracy),
    })
}

/// Converts an event of the coordinator to one of the run. Events for the log alone come back.
fn run_event(event: CoordinatorEvent, names: &PeerNames) -> Result<RunEvent, CoordinatorEvent> {
    let name = |member: Member| names.of(member.peer);
    let numbers = |stages: Vec<Stage>| stages.into_iter().map(|stage| stage.0).collect();
    Ok(match event {
        CoordinatorEvent::Admitted { member, span, name } => {
            RunEvent::Admitted { peer: member.peer, name, span }
        }
        CoordinatorEvent::Waiting { stages, members } => {
            RunEvent::Waiting { stages: numbers(stages), members }
        }
        CoordinatorEvent::Rewound { version, steps, .. } => {
            RunEvent::Rewound { version: version.0, steps }
        }
        CoordinatorEvent::BecameCoordinator { term, claims } => {
            RunEvent::BecameCoordinator { term: term.0, claims }
        }
        CoordinatorEvent::StageLost { stages, version } => {
            RunEvent::StageLost { stages: numbers(stages), version: version.0 }
        }
        CoordinatorEvent::MoveBegun { member, from, to, reason } => {
            RunEvent::MoveBegun { peer: member.peer, name: name(member), from, to, reason }
        }
        CoordinatorEvent::Moves { member, from, to, at, reason } => {
            RunEvent::Moves { peer: member.peer, name: name(member), from, to, step: at.0, reason }
        }
        CoordinatorEvent::MoveCancelled { member, to, reason, obstacle } => {
            let obstacle = obstacle.words().to_owned();
            RunEvent::MoveCancelled { peer: member.peer, name: name(member), to, reason, obstacle }
        }
        CoordinatorEvent::Convicted(conviction) => {
            let Conviction { peer, step, stage, back, evidence } = *conviction;
            let charge = evidence.charge().to_owned();
            let (name, step, stage, back) = (names.of(peer), step.0, stage.0, back.0);
            RunEvent::Convicted { peer, name, step, stage, back, charge }
        }
        CoordinatorEvent::Lost { member, span, how } => RunEvent::Lost {
            peer: member.peer,
            name: name(member),
            span,
            how: how.words().to_owned(),
        },
        other => return Err(other),
    })
}

/// Logs an event of the coordinator that is no event of the run.
fn log(event: &CoordinatorEvent, names: &PeerNames) {
    let title = |member: &Member| names.member(*member);
    match event {
        CoordinatorEvent::NotAdmitted { member, reason } => {
            tracing::warn!(peer = title(member), reason, "not admitted");
        }
        CoordinatorEvent::RoundsAborted { step, rounds, late } => {
            tracing::info!(%step, rounds, late, "all-reduces are tried again");
        }
        CoordinatorEvent::RoundForged { round, owners } => {
            let (step, weights) = (round.step, round.weights);
            let owners: Vec<String> = owners.iter().map(title).collect();
            let owners = owners.join(", ");
            tracing::warn!(
                %step, %weights, owners,
                "what these peers added up is not the sum of what the others say that they gave: it is added up again, \
                 elsewhere"
            );
        }
        CoordinatorEvent::Audited { of, stage, step, outcome } => match outcome {
            AuditOutcome::Sound => tracing::debug!(peer = %of, %stage, %step, "its work is sound"),
            AuditOutcome::NotAudited => {
                tracing::debug!(peer = %of, %stage, %step, "no like replica could audit its work");
            }
        },
        CoordinatorEvent::RoundMended { round, gone, changed } => {
            let (step, weights) = (round.step, round.weights);
            tracing::info!(%step, %weights, gone, changed, "an all-reduce goes on without some");
        }
        CoordinatorEvent::ClaimRefused { member, key } => {
            tracing::warn!(peer = title(member), %key, "it claims what it does not hold: refused");
        }
        CoordinatorEvent::Reclaimed { member, key } => {
            tracing::info!(peer = title(member), %key, "late work is given to another");
        }
        CoordinatorEvent::Revoked { member, claims } => {
            tracing::info!(peer = title(member), claims, "claims taken back");
        }
        CoordinatorEvent::CheckpointAbandoned { version } => {
            tracing::warn!(%version, "a checkpoint was abandoned: a peer that wrote it is gone");
        }
        CoordinatorEvent::CheckpointStored { version, .. } => {
            tracing::info!(%version, "a checkpoint is complete");
        }
        CoordinatorEvent::Unlike { member } => tracing::warn!(
            peer = title(member),
            "its known answers differ from the first member's: exactly-once holds, \
             the reference's bits may not"
        ),
        // The others are events of the run. The coordinator sends the end to this process's peer too.
        CoordinatorEvent::Admitted { .. }
        | CoordinatorEvent::Waiting { .. }
        | CoordinatorEvent::Opened { .. }
        | CoordinatorEvent::Committed { .. }
        | CoordinatorEvent::Rewound { .. }
        | CoordinatorEvent::BecameCoordinator { .. }
        | CoordinatorEvent::StageLost { .. }
        | CoordinatorEvent::MoveBegun { .. }
        | CoordinatorEvent::Moves { .. }
        | CoordinatorEvent::MoveCancelled { .. }
        | CoordinatorEvent::Lost { .. }
        | CoordinatorEvent::Convicted(_)
        | CoordinatorEvent::Finished
        | CoordinatorEvent::Stopped { .. } => {}
    }
}

/// Returns the number of microbatches that the record's proofs cover, over all stages: a stage with
/// the whole batch's proof counted each of them once.
fn proven(record: &CommitRecord, stages: u16, microbatches: u32) -> u64 {
    let whole = |stage: u16| proof_of_all(record.step, Stage(stage), microbatches);
    let right = (0..stages)
        .zip(&record.rounds)
        .filter(|(stage, (_, outcome))| outcome.proof == whole(*stage))
        .count();
    right as u64 * u64::from(microbatches)
}
