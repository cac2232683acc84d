//! Commits that the engine applies.

use std::collections::{BTreeSet, VecDeque};

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::manifest::Verdict;
use shoal_protocol::message::CommitRecord;

use crate::action::{PeerAction, PeerEvent};
use crate::peer::Out;

/// Commits whose tasks the engine may still have. Only a peer that catches up has more than one.
const APPLYING: usize = 1 << 10;

/// Applied commits, each with the stages of which the engine still has tasks.
#[derive(Debug, Default)]
pub(super) struct Applying {
    commits: VecDeque<(CommitRecord, BTreeSet<Stage>)>,
}

impl Applying {
    /// The engine applies the results of a commit, at these stages.
    pub(super) fn begin(&mut self, record: CommitRecord, stages: BTreeSet<Stage>, out: &mut Out) {
        if stages.is_empty() {
            // A peer without stages has no task to wait for.
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        } else {
            assert!(self.commits.len() < APPLYING, "no step is committed before its tasks");
            self.commits.push_back((record, stages));
        }
    }

    /// The engine updated one stage. Updates from before a rewind and those for a migration have no
    /// commit here.
    pub(super) fn end(&mut self, step: Step, stage: Stage, verdict: Verdict, out: &mut Out) {
        let Some((record, missing)) = self.commits.front_mut() else { return };
        if record.step == step {
            missing.remove(&stage);
        }
        if missing.is_empty() {
            if verdict.outlier.is_some() {
                out.push(PeerAction::Event(PeerEvent::Judged { step, verdict }));
            }
            let (record, _) = self.commits.pop_front().expect("it was just there");
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        }
    }

    /// Forgets all commits, for a rewind.
    pub(super) fn clear(&mut self) {
        self.commits.clear();
    }
}
