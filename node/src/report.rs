//! `report.json`: the figures of a run, computed from its events.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_formats::scores::Scores;
use shoal_protocol::ids::{ContentHash, PeerId, RunId};

use crate::events::{PreferenceNumbers, RunEvent, StepReport};

/// The figures of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The run's identifier; absent before it started.
    pub run_hash: Option<RunId>,
    /// Seed of the initial weights and of the order of samples.
    pub seed: u64,
    /// Committed steps, in order.
    pub steps: Vec<StepNumbers>,
    /// Tokens trained on, divided by the duration of all steps.
    pub tokens_per_second: f64,
    /// Price of the members' time over all steps, discarded ones too, in the currency of `--price`;
    /// absent if no peer has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Tokens trained on for a unit of that currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_currency_unit: Option<f64>,
    /// The most members at one time.
    pub peers: usize,
    /// Pipeline stages.
    pub stages: u16,
    /// Peers that were killed.
    pub kills: u64,
    /// Moves of peers to another stage.
    pub moves: u64,
    /// Returns of the run to a checkpoint.
    pub rewinds: u64,
    /// Microbatches of the committed steps.
    pub microbatches: MicrobatchNumbers,
    /// Hash of the weights of the newest complete checkpoint.
    pub checkpoint_hash: Option<ContentHash>,
    /// Hashes of all complete checkpoints by version. A version has several if a rewind led to
    /// different bits.
    pub checkpoints: BTreeMap<u64, BTreeSet<ContentHash>>,
    /// Scores of checkpoints by version, as the command of `--on-checkpoint` printed them; absent without one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scores: BTreeMap<u64, Scores>,
    /// Steps that the run's guard found far out, with the reason; absent without one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outliers: BTreeMap<u64, String>,
    /// Hash of the reference's weights, if a single process trained the same run.
    pub reference_hash: Option<ContentHash>,
    /// The highest counts reported for each step, by any peer.
    #[serde(skip)]
    reported: BTreeMap<u64, StepCounts>,
    /// Tokens of all steps.
    #[serde(skip)]
    tokens: u64,
    #[serde(skip)]
    seconds: f64,
    /// Tokens of the steps that have a cost.
    #[serde(skip)]
    priced_tokens: u64,
    #[serde(skip)]
    microbatches_per_step: u64,
    #[serde(skip)]
    admitted: BTreeSet<PeerId>,
}

/// Microbatch counts of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct StepCounts {
    counted: u64,
    replayed: u64,
    duplicated: u64,
}

/// The figures of one committed step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepNumbers {
    /// The step's number.
    pub step: u64,
    /// Mean training loss, in nats per token.
    pub loss: f64,
    /// The rate of the step's update.
    #[serde(default)]
    pub learning_rate: f64,
    /// Norm of the gradient over all stages, before clipping.
    pub gradient_norm: f64,
    /// Tokens of the step's samples, all of which are computed.
    pub tokens: u64,
    /// Tokens that count towards the loss. The rest is context and padding.
    #[serde(default)]
    pub targets: u64,
    /// Tokens that are followed by padding.
    #[serde(default)]
    pub padded: u64,
    /// What the model prefers, in a run on pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferences: Option<PreferenceNumbers>,
    /// Duration of the step in seconds.
    pub seconds: f64,
    /// Price of the members' time in the step, in the currency of `--price`, if a member has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Mean loss on the held-out text before this step, if it was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
}

/// Microbatches of the committed steps, counted once per stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicrobatchNumbers {
    /// Microbatches whose weight gradient is in the committed sums, as the commits' proofs show.
    pub counted: u64,
    /// Microbatches computed again because a peer was lost or late.
    pub replayed: u64,
    /// Reports that arrived more than once and were counted once.
    pub duplicated: u64,
    /// Microbatches that should have been counted and were not.
    pub missing: i64,
}

impl Report {
    /// The report of a run that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Versions whose checkpoints differ from those of another report of the same run.
    #[must_use]
    pub fn checkpoints_unlike(&self, other: &Self) -> Vec<u64> {
        let unlike = |(version, hashes): (&u64, &BTreeSet<ContentHash>)| {
            (other.checkpoints.get(version) != Some(hashes)).then_some(*version)
        };
        self.checkpoints.iter().filter_map(unlike).collect()
    }

    /// Records an event.
    pub fn note(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Started { run, seed, stages, microbatches, .. } => {
                self.run_hash = Some(*run);
                self.seed = *seed;
                self.stages = *stages;
                self.microbatches_per_step = u64::from(*microbatches) * u64::from(*stages);
                self.peers = self.peers.max(1);
            }
            RunEvent::Admitted { peer, .. } => {
                self.admitted.insert(*peer);
                self.peers = self.peers.max(self.admitted.len());
            }
            RunEvent::Lost { peer, .. } => {
                self.admitted.remove(peer);
            }
            RunEvent::Committed(step) => self.note_step(step),
            RunEvent::Checkpoint { version, hash, .. } => {
                self.checkpoints.entry(*version).or_default().insert(*hash);
                // An archive may assemble an older checkpoint after a newer one.
                if self.checkpoints.keys().next_back() == Some(version) {
                    self.checkpoint_hash = Some(*hash);
                }
            }
            // A version that is computed again after a rewind has the same bits.
            RunEvent::Scored { version, scores, .. } => {
                self.scores.insert(*version, scores.clone());
            }
            RunEvent::Outlier { step, reason, .. } => {
                self.outliers.insert(*step, reason.clone());
            }
            RunEvent::Rewound { version, .. } => self.rewind(*version),
            RunEvent::Killed { .. } => self.kills += 1,
            RunEvent::Moves { .. } => self.moves += 1,
            RunEvent::Listening { .. }
            | RunEvent::LongStep(_)
            | RunEvent::Uploaded { .. }
            | RunEvent::UploadFailed { .. }
            | RunEvent::ScoreFailed { .. }
            | RunEvent::Continued { .. }
            | RunEvent::Moved { .. }
            | RunEvent::MoveBegun { .. }
            | RunEvent::MoveCancelled { .. }
            | RunEvent::Convicted { .. }
            | RunEvent::Waiting { .. }
            | RunEvent::Joined { .. }
            | RunEvent::Serving { .. }
            | RunEvent::BecameCoordinator { .. }
            | RunEvent::Anchors { .. }
            | RunEvent::Paused { .. }
            | RunEvent::StageLost { .. }
            | RunEvent::ConnectionRefused { .. }
            | RunEvent::OwnPort(_)
            | RunEvent::AccessList { .. }
            | RunEvent::FewAnchors { .. }
            | RunEvent::CoordinatorUnreachable { .. }
            | RunEvent::CoordinatorReachable
            | RunEvent::AwaitsPeers { .. }
            | RunEvent::Draining { .. }
            | RunEvent::Finished { .. }
            | RunEvent::Stopped { .. } => {}
        }
    }

    /// Discards the steps from a version on. They are computed again and counted then.
    fn rewind(&mut self, version: u64) {
        self.rewinds += 1;
        for step in self.reported.split_off(&version).into_values() {
            self.microbatches.counted -= step.counted;
            self.microbatches.missing -= self.microbatches_per_step as i64 - step.counted as i64;
        }
        self.steps.retain(|step| step.step < version);
        self.outliers.retain(|step, _| *step < version);
        self.tokens = self.steps.iter().map(|step| step.tokens).sum();
        self.seconds = self.steps.iter().map(|step| step.seconds).sum();
        let priced = self.steps.iter().filter(|step| step.cost.is_some());
        self.priced_tokens = priced.map(|step| step.tokens).sum();
        self.rate();
    }

    /// Whether this step is committed and was not discarded by a rewind.
    #[must_use]
    pub fn knows(&self, step: u64) -> bool {
        self.reported.contains_key(&step)
    }

    /// Records a step. Several peers may report it; the coordinator's counts are the most complete.
    fn note_step(&mut self, step: &StepReport) {
        self.peers = self.peers.max(step.peers);
        if !self.reported.contains_key(&step.step) {
            self.begin_step(step);
        }
        let known = self.reported.entry(step.step).or_default();
        let more = |known: &mut u64, reported: u64| {
            let more = reported.saturating_sub(*known);
            *known += more;
            more
        };
        let counted = more(&mut known.counted, step.counted);
        self.microbatches.counted += counted;
        self.microbatches.missing -= counted as i64;
        self.microbatches.replayed += more(&mut known.replayed, step.replayed);
        self.microbatches.duplicated += more(&mut known.duplicated, step.duplicated);
    }

    /// Records the first report of a step. Sums are updated incrementally, because a run has many
    /// steps.
    fn begin_step(&mut self, step: &StepReport) {
        let numbers = StepNumbers {
            step: step.step,
            loss: step.loss,
            learning_rate: step.learning_rate,
            gradient_norm: step.gradient_norm,
            tokens: step.tokens,
            targets: step.targets,
            padded: step.padded,
            preferences: step.preferences,
            seconds: step.seconds,
            cost: step.cost,
            held_out_loss: step.held_out_loss,
        };
        let place = self.steps.partition_point(|known| known.step < step.step);
        self.steps.insert(place, numbers);
        self.microbatches.missing += self.microbatches_per_step as i64;
        self.tokens += step.tokens;
        self.seconds += step.seconds;
        if let Some(cost) = step.cost {
            *self.cost.get_or_insert(0.0) += cost;
            self.priced_tokens += step.tokens;
        }
        self.rate();
    }

    fn rate(&mut self) {
        let known = self.seconds > 0.0;
        self.tokens_per_second = if known { self.tokens as f64 / self.seconds } else { 0.0 };
        self.tokens_per_currency_unit = tokens_per_unit(self.priced_tokens, self.cost);
    }

    /// Reads a report.
    ///
    /// # Errors
    /// If the file cannot be read or is not a report.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Writes the report as JSON, atomically.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(folder.unwrap_or(Path::new(".")))?;
        serde_json::to_writer_pretty(&file, self)?;
        file.persist(path)?;
        Ok(())
    }
}

/// Tokens for a unit of currency; `None` if nothing was paid.
pub(crate) fn tokens_per_unit(tokens: u64, cost: Option<f64>) -> Option<f64> {
    cost.filter(|cost| *cost > 0.0).map(|cost| tokens as f64 / cost)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use shoal_protocol::ids::{Stage, StageSpan};

    use super::*;

    fn started() -> RunEvent {
        RunEvent::Started {
            run: ContentHash([7; 32]),
            seed: 3,
            stages: 2,
            steps: 10,
            tokens_per_step: 1000,
            microbatches: 4,
            worker_steps: None,
        }
    }

    fn step(step: u64, counted: u64) -> StepReport {
        StepReport {
            step,
            loss: 2.5,
            held_out_loss: (step == 0).then_some(5.5),
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            tokens: 1000,
            targets: 900,
            padded: 50,
            preferences: None,
            seconds: 0.5,
            cost: None,
            counted,
            replayed: 1,
            all_reduce_seconds: Some(0.5),
            duplicated: 2,
            peers: 3,
        }
    }

    #[test]
    fn a_report_has_exactly_these_fields() {
        let mut report = Report::new();
        for event in [
            started(),
            RunEvent::Committed(step(0, 8)),
            RunEvent::Committed(step(1, 8)),
            RunEvent::Checkpoint {
                version: 2,
                directory: "checkpoint".into(),
                hash: ContentHash([9; 32]),
            },
        ] {
            report.note(&event);
        }
        let numbers = |step| json!({"step": step, "loss": 2.5, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens": 1000, "targets": 900, "padded": 50, "seconds": 0.5});
        let mut first = numbers(0);
        first["held_out_loss"] = json!(5.5);
        assert_eq!(
            serde_json::to_value(&report).expect("serializes"),
            json!({
                "run_hash": ContentHash([7; 32]),
                "seed": 3,
                "steps": [first, numbers(1)],
                "tokens_per_second": 2000.0,
                "peers": 3,
                "stages": 2,
                "kills": 0,
                "moves": 0,
                "rewinds": 0,
                "microbatches": {"counted": 16, "replayed": 2, "duplicated": 4, "missing": 0},
                "checkpoint_hash": ContentHash([9; 32]),
                "checkpoints": {"2": [ContentHash([9; 32])]},
                "reference_hash": null,
            })
        );
    }

    #[test]
    fn discarded_steps_cost_and_do_not_count() {
        let mut report = Report::new();
        report.note(&started());
        for at in [0, 1, 1] {
            report.note(&RunEvent::Committed(StepReport { cost: Some(0.25), ..step(at, 8) }));
        }
        assert_eq!((report.cost, report.tokens_per_currency_unit), (Some(0.5), Some(4000.0)));
        report.note(&RunEvent::Rewound { version: 1, steps: 1 });
        assert_eq!((report.cost, report.tokens_per_currency_unit), (Some(0.5), Some(2000.0)));
        report.note(&RunEvent::Committed(StepReport { cost: Some(0.5), ..step(1, 8) }));
        assert_eq!((report.cost, report.tokens_per_currency_unit), (Some(1.0), Some(2000.0)));
        assert_eq!(tokens_per_unit(1000, Some(0.0)), None, "a machine may be free");
    }

    #[test]
    fn several_reports_of_a_step_count_once() {
        let mut report = Report::new();
        report.note(&started());
        let late = StepReport { replayed: 0, duplicated: 0, ..step(0, 8) };
        for report_of_step in [late.clone(), step(0, 8), late] {
            report.note(&RunEvent::Committed(report_of_step));
        }
        report.note(&RunEvent::Committed(step(1, 8)));
        report.note(&RunEvent::Rewound { version: 1, steps: 1 });
        assert!(report.knows(0) && !report.knows(1));
        let expected = MicrobatchNumbers { counted: 8, replayed: 2, duplicated: 4, missing: 0 };
        assert_eq!((report.steps.len(), report.microbatches), (1, expected));
    }

    #[test]
    fn microbatches_that_were_not_counted_are_missing() {
        let mut report = Report::new();
        report.note(&started());
        report.note(&RunEvent::Committed(step(0, 5)));
        assert_eq!(report.microbatches.missing, 3);
    }

    #[test]
    fn the_newest_version_is_reported_in_any_order_of_archiving() {
        let mut report = Report::new();
        for version in [20, 30, 25] {
            let hash = ContentHash([version as u8; 32]);
            report.note(&RunEvent::Checkpoint { version, directory: String::new(), hash });
        }
        assert_eq!(report.checkpoint_hash, Some(ContentHash([30; 32])));
        assert_eq!(report.checkpoints.len(), 3);
    }

    #[test]
    fn the_most_members_at_one_time_are_reported() {
        let mut report = Report::new();
        report.note(&started());
        let span = StageSpan::one(Stage(0));
        for peer in [1, 2, 2, 3, 4] {
            report.note(&RunEvent::Admitted { peer: PeerId([peer; 32]), name: None, span });
        }
        report.note(&RunEvent::Lost {
            peer: PeerId([4; 32]),
            name: None,
            span,
            how: String::new(),
        });
        report.note(&RunEvent::Admitted { peer: PeerId([5; 32]), name: None, span });
        assert_eq!(report.peers, 4);
    }

    #[test]
    fn a_written_report_reads_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report.json");
        let mut report = Report::new();
        report.note(&started());
        report.write(&path).expect("written");
        report.microbatches_per_step = 0;
        assert_eq!(Report::read(&path).expect("read"), report);
    }
}
