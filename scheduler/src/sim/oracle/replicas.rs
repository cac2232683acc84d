//! All replicas of a stage at the same version have the same weights, namely those of a
//! single-process run, and have them only after the commit is logged.

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::message::{CommitRecord, StoredFile};

use crate::sim::integer_model::Weights;
use crate::sim::reference::Reference;

/// Compares the swarm's results with the reference.
#[derive(Debug)]
pub(in crate::sim) struct Replicas {
    reference: Reference,
    committed: usize,
    /// Whether steps may be wrong that the run takes back.
    lenient: bool,
}

impl Replicas {
    pub(super) fn new(reference: Reference) -> Self {
        Self { reference, committed: 0, lenient: false }
    }

    /// A member computes wrongly: only what is left at the end must be the reference's.
    pub(in crate::sim) fn be_lenient(&mut self) {
        self.lenient = true;
    }

    pub(in crate::sim) fn committed(&mut self, record: &CommitRecord) -> Result<(), String> {
        self.committed = self.committed.max(record.step.0 as usize + 1);
        let Some(expected) = self.reference.reach(record.step) else {
            return Err(format!("step {} is not of this run", record.step));
        };
        let same = record.gradient_norm.to_bits() == expected.gradient_norm.to_bits()
            && record.loss == expected.loss
            && record.held_out_loss == expected.held_out_loss;
        if same || self.lenient {
            Ok(())
        } else {
            Err(format!("the commit of step {} is not the reference's: {record:?}", record.step))
        }
    }

    pub(in crate::sim) fn applied(
        &self,
        step: Step,
        stage: Stage,
        sums: &[i64],
        weights: Weights,
    ) -> Result<(), String> {
        if step.0 as usize >= self.committed {
            return Err(format!("step {step} is applied but not committed"));
        }
        if self.lenient {
            return Ok(());
        }
        let expected = self.reference.reached(step).expect("it is committed");
        if self.reference.sums(expected, stage) != sums {
            return Err(format!("the gradient of step {step}, stage {stage} is not the batch's"));
        }
        if expected.weights[usize::from(stage.0)] != weights {
            return Err(format!("the weights of stage {stage} after step {step} differ"));
        }
        Ok(())
    }

    pub(in crate::sim) fn saved(
        &self,
        version: Step,
        stages: &[Vec<StoredFile>],
    ) -> Result<(), String> {
        let hashes: Vec<_> = stages.iter().flatten().map(|file| file.hash).collect();
        if self.lenient || self.reference.files(version) == Some(&hashes[..]) {
            Ok(())
        } else {
            Err(format!("the checkpoint of version {version} is not the reference's"))
        }
    }
}
