//! The end of a step: all-reduce, commit, checkpoints.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use shoal_protocol::ids::{Member, Microbatch, Stage, Step};
use shoal_protocol::message::{
    CommitRecord, Round, RoundId, RoundOutcome, StoredFile, TensorTag, ToCoordinator,
};
use shoal_protocol::units::{Bytes, Moment};

use super::{Out, Peer};
use crate::action::{Fault, Payload, PeerAction, PeerEvent, Task, TaskResult};
use crate::round::{Reduction, proof_of};

/// Pieces that may come before the word that closes their step: the coordinator's word and the other
/// members' pieces travel on different connections.
const EARLY_PIECES: usize = 4096;

/// Bytes of one integer of a round.
const SUM_BYTES: u64 = 8;

/// Commits whose tasks the engine may still have to carry out.
const APPLYING: usize = 2;

/// Pieces of rounds that this peer does not know of yet.
#[derive(Debug, Default)]
pub(super) struct EarlyPieces {
    pieces: VecDeque<(Member, TensorTag, Payload)>,
    held: Bytes,
}

impl EarlyPieces {
    pub(super) fn held(&self) -> Bytes {
        self.held
    }

    /// Keeps a piece, up to so many bytes of one sender.
    fn keep(
        &mut self,
        (from, tag, payload): (Member, TensorTag, Payload),
        most: Bytes,
        out: &mut Out,
    ) {
        let of_sender = self.pieces.iter().filter(|(sender, ..)| *sender == from);
        let held: Bytes = of_sender.map(|(_, _, payload)| payload.size).sum();
        if self.pieces.len() >= EARLY_PIECES || held + payload.size > most {
            out.push(PeerAction::Release(payload.id));
            return Peer::nonsense(from, "more pieces than a round has", out);
        }
        self.held += payload.size;
        self.pieces.push_back((from, tag, payload));
    }

    /// Takes out the pieces of a round.
    fn take(&mut self, round: RoundId) -> Vec<(Member, TensorTag, Payload)> {
        let (taken, kept) =
            self.pieces.drain(..).partition(|(_, tag, _)| round_of(tag) == Some(round));
        self.pieces = kept;
        let taken: VecDeque<_> = taken;
        self.held = self.held - taken.iter().map(|(_, _, payload)| payload.size).sum();
        taken.into()
    }

    /// Lets go of pieces of steps that are over.
    pub(super) fn drop_through(&mut self, step: Step, out: &mut Out) {
        let old = |tag: &TensorTag| round_of(tag).is_some_and(|round| round.step <= step);
        let held = &mut self.held;
        self.pieces.retain(|(_, tag, payload)| {
            if old(tag) {
                *held = *held - payload.size;
                out.push(PeerAction::Release(payload.id));
            }
            !old(tag)
        });
    }
}

/// Commits taken in whose tasks the engine has not all carried out.
#[derive(Debug, Default)]
pub(super) struct Applying {
    /// Each with the number of stages still to be applied.
    records: VecDeque<(CommitRecord, usize)>,
}

/// Checkpoints asked of this peer.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// At versions that are not reached yet.
    due: BTreeSet<(Step, Stage)>,
    /// Given to the engine.
    writing: BTreeSet<(Step, Stage)>,
    /// The newest of each stage, for when the report must be said again.
    written: BTreeMap<Stage, (Step, Vec<StoredFile>)>,
}

fn round_of(tag: &TensorTag) -> Option<RoundId> {
    match tag {
        TensorTag::RoundPart { round, .. } | TensorTag::RoundResult { round, .. } => Some(*round),
        TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. } => None,
    }
}

impl Peer {
    /// A step is closed at one of this peer's stages.
    pub(super) fn close(&mut self, round: Round, out: &mut Out) {
        let id = round.id;
        let Some(hosted) = self.stages.get(&id.stage) else { return };
        if id.step != self.version || self.rounds.contains_key(&id.stage) {
            return;
        }
        let me = self.config.me;
        let Some(part) = round.members.iter().find(|part| part.member == me) else { return };
        let expected: BTreeSet<Microbatch> = part.counted.iter().copied().collect();
        if expected != hosted.counted {
            let missing = expected.difference(&hosted.counted).count();
            let surplus = hosted.counted.difference(&expected).count();
            return self.leave(Fault::AccumulatorDiffers { round: id, missing, surplus }, out);
        }
        let all = (0..self.config.manifest.training.microbatches).map(Microbatch);
        let whole_proof = proof_of(id.step, id.stage, all);
        let elements = self.config.parameters[&id.stage];
        let limits = &self.config.limits;
        let (cut, outgoing) = (limits.cut, limits.round_bytes);
        let own_proof = hosted.proof;
        let mut reduction =
            Reduction::new(round, me, elements, cut, outgoing, own_proof, whole_proof)
                .expect("this peer is a member of the round");
        let started = reduction.start(out);
        self.rounds.insert(id.stage, reduction);
        self.refuse(id, started, out);
        for (from, tag, payload) in self.early.take(id) {
            self.round_piece(from, tag, payload, out);
        }
    }

    /// A piece of a round came.
    pub(super) fn round_piece(
        &mut self,
        member: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) {
        let Some(id) = round_of(&tag) else { return };
        let known = self.rounds.get_mut(&id.stage).filter(|known| known.round().id == id);
        let Some(reduction) = known else {
            let hosted = self.span.is_none_or(|span| span.contains(id.stage));
            let closed = self.rounds.get(&id.stage).is_some_and(|known| known.round().id > id);
            if hosted && self.is_open(id.step) && !closed {
                let most = self.early_bytes();
                self.early.keep((member, tag, payload), most, out);
            } else {
                out.push(PeerAction::Release(payload.id));
            }
            return;
        };
        let taken = match tag {
            TensorTag::RoundPart { from, piece, proof, .. } => {
                reduction.part((member, from), piece, proof, payload, out)
            }
            TensorTag::RoundResult { from, piece, proof, .. } => {
                reduction.result((member, from), piece, proof, payload, out)
            }
            TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. } => Ok(()),
        };
        self.refuse(id, taken, out);
    }

    /// What one member may have on its way here before its rounds are closed here: pieces as far as
    /// its window goes, and as many results, for two steps of every stage.
    fn early_bytes(&self) -> Bytes {
        let limits = &self.config.limits;
        let window = limits.round_bytes.0 + limits.cut.piece_elements as u64 * SUM_BYTES;
        Bytes(window * 4 * u64::from(self.config.manifest.training.stages))
    }

    /// Refuses a round that would not count every microbatch once.
    fn refuse(&mut self, round: RoundId, taken: Result<(), Fault>, out: &mut Out) {
        let Err(fault) = taken else { return };
        let reason = fault.to_string();
        out.push(PeerAction::Event(PeerEvent::Fault(fault)));
        let message = ToCoordinator::RoundRefused { round, reason };
        out.push(PeerAction::ToCoordinator(message));
    }

    /// A task of a round ended.
    pub(super) fn round_computed(&mut self, result: TaskResult, out: &mut Out) {
        let round = match &result {
            TaskResult::Exported { round, .. }
            | TaskResult::Reduced { round, .. }
            | TaskResult::Installed { round, .. }
            | TaskResult::Summarised { round, .. } => *round,
            other => unreachable!("not of a round: {other:?}"),
        };
        let reduction = self.rounds.get_mut(&round.stage).filter(|known| known.round().id == round);
        let reduction = reduction.expect("rounds stay until all their tasks are done");
        match result {
            TaskResult::Exported { to, piece, payload, .. } => {
                reduction.exported(to, piece, payload, out);
            }
            TaskResult::Reduced { piece, payload, .. } => reduction.reduced(piece, payload, out),
            TaskResult::Installed { range, .. } => reduction.installed(&range, out),
            TaskResult::Summarised { hash, square_norm, .. } => {
                let outcome = reduction.summarised(hash, square_norm);
                report_outcome(round, outcome, out);
            }
            _ => {}
        }
    }

    /// Repeats what the rounds came to while no commit follows.
    pub(super) fn repeat_outcomes(&self, out: &mut Out) {
        for reduction in self.rounds.values() {
            if let Some(outcome) = reduction.outcome() {
                report_outcome(reduction.round().id, outcome, out);
            }
        }
    }

    /// The step's last word: apply the results that it names.
    pub(super) fn commit(&mut self, now: Moment, record: CommitRecord, out: &mut Out) {
        if record.step != self.version {
            return;
        }
        let named = |reduction: &Reduction| {
            let id = reduction.round().id;
            let named = record.stages.get(usize::from(id.stage.0));
            named.is_some_and(|(attempt, outcome)| {
                *attempt == id.attempt && reduction.outcome().is_some_and(|own| own == *outcome)
            })
        };
        if self.rounds.len() != self.stages.len() || !self.rounds.values().all(named) {
            return self.leave(Fault::ResultDiffers { step: record.step }, out);
        }
        assert!(self.applying.records.len() < APPLYING, "no step is committed before its tasks");
        for reduction in std::mem::take(&mut self.rounds).into_values() {
            let round = reduction.round().id;
            let gradient_norm = record.gradient_norm;
            out.push(PeerAction::Compute(Task::Apply { round, gradient_norm }));
        }
        self.drop_jobs_through(record.step, out);
        self.early.drop_through(record.step, out);
        self.version = record.step.next();
        self.applying.records.push_back((record, self.stages.len()));
        for hosted in self.stages.values_mut() {
            hosted.counted.clear();
            hosted.proof = 0;
            hosted.log_full_said = false;
            let version = self.version;
            hosted.offers.retain(|(step, _), _| *step >= version);
            hosted.refused.retain(|(step, _)| *step >= version);
        }
        self.store_when_due(out);
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            self.admit(now, stage, out);
        }
    }

    /// The engine applied one stage's result.
    pub(super) fn applied(&mut self, out: &mut Out) {
        let (_, missing) = self.applying.records.front_mut().expect("something was applied");
        *missing -= 1;
        if *missing == 0 {
            let (record, _) = self.applying.records.pop_front().expect("it was just there");
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        }
    }

    /// A stage is to be saved at a version.
    pub(super) fn store(&mut self, version: Step, stage: Stage, out: &mut Out) {
        if !self.stages.contains_key(&stage) {
            return;
        }
        if let Some((written, files)) = self.stores.written.get(&stage)
            && *written == version
        {
            let files = files.clone();
            let message = ToCoordinator::Stored { version, stage, files };
            return out.push(PeerAction::ToCoordinator(message));
        }
        if version == self.version || version == self.version.next() {
            self.stores.due.insert((version, stage));
            self.store_when_due(out);
        }
    }

    /// Tasks are carried out in order, so what is given now reads this version.
    fn store_when_due(&mut self, out: &mut Out) {
        let due: Vec<(Step, Stage)> =
            self.stores.due.range(..(self.version.next(), Stage(0))).copied().collect();
        for (version, stage) in due {
            self.stores.due.remove(&(version, stage));
            if version == self.version && self.stores.writing.insert((version, stage)) {
                out.push(PeerAction::Compute(Task::Store { version, stage }));
            }
        }
    }

    /// The engine wrote a stage.
    pub(super) fn stored(
        &mut self,
        version: Step,
        stage: Stage,
        files: Vec<StoredFile>,
        out: &mut Out,
    ) {
        self.stores.writing.remove(&(version, stage));
        self.stores.written.insert(stage, (version, files.clone()));
        let message = ToCoordinator::Stored { version, stage, files };
        out.push(PeerAction::ToCoordinator(message));
    }
}

fn report_outcome(round: RoundId, outcome: RoundOutcome, out: &mut Out) {
    out.push(PeerAction::ToCoordinator(ToCoordinator::Reduced { round, outcome }));
}
