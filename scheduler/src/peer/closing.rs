//! The end of a step: all-reduce and commit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use shoal_protocol::ids::{ClaimKey, Era, Member, Mend, Microbatch, PeerId, Stage, Step, Term};
use shoal_protocol::limits;
use shoal_protocol::message::{
    CommitRecord, LinkEstimate, Round, RoundId, RoundMember, RoundOutcome, TensorTag,
    ToCoordinator, proof_of_all,
};
use shoal_protocol::units::{Bytes, Moment};

use super::{Out, Peer, Status};
use crate::action::{Fault, Payload, PeerAction, PeerEvent, Task, TaskResult};
use crate::round::{AHEAD, Layout, Reduction, ahead, is_next, most_ahead, piece_bytes, place_in};

/// Pieces that may come before the word that closes their step: the coordinator's word and the other
/// members' pieces travel on different connections.
const EARLY_PIECES: usize = limits::MEMBERS;

/// Commits whose tasks the engine may still have to carry out: more than one only of who catches up.
const APPLYING: usize = 1 << 10;

/// Words about steps that wait for the steps before: a newcomer that falls further behind begins
/// anew.
const BACKLOG: usize = 1 << 10;

/// Pieces of rounds that this peer does not know of yet.
#[derive(Debug, Default)]
pub(super) struct EarlyPieces {
    pieces: VecDeque<(Member, TensorTag, Payload)>,
    /// Bytes of integers for a part of this peer's.
    parts: Bytes,
    /// Bytes of results that this peer listens to.
    results: Bytes,
}

impl EarlyPieces {
    pub(super) fn parts(&self) -> Bytes {
        self.parts
    }

    pub(super) fn results(&self) -> Bytes {
        self.results
    }

    /// Keeps a piece: integers up to so many bytes of one sender, results up to so many in all;
    /// returns whether it does.
    fn keep(
        &mut self,
        (from, tag, payload): (Member, TensorTag, Payload),
        (of_sender, in_all): (Bytes, Bytes),
        out: &mut Out,
    ) -> bool {
        self.forget_older(&tag, out);
        let fits = if is_result(&tag) {
            self.results + payload.size <= in_all
        } else {
            let alike = |(sender, tag, _): &&_| *sender == from && !is_result(tag);
            let held: Bytes = self.pieces.iter().filter(alike).map(|piece| piece.2.size).sum();
            held + payload.size <= of_sender
        };
        if self.pieces.len() >= EARLY_PIECES || !fits {
            out.push(PeerAction::Release(payload.id));
            return false;
        }
        *self.account(&tag) += payload.size;
        self.pieces.push_back((from, tag, payload));
        true
    }

    fn account(&mut self, tag: &TensorTag) -> &mut Bytes {
        if is_result(tag) { &mut self.results } else { &mut self.parts }
    }

    /// Lets go of pieces of the tries before this one.
    fn forget_older(&mut self, tag: &TensorTag, out: &mut Out) {
        let Some(new) = round_of(tag) else { return };
        self.drop_where(out, |old| (old.step, old.stage) == (new.step, new.stage) && old < new);
    }

    /// Takes out the pieces of a round.
    pub(super) fn take(&mut self, round: RoundId) -> Vec<(Member, TensorTag, Payload)> {
        let (taken, kept) =
            self.pieces.drain(..).partition(|(_, tag, _)| round_of(tag) == Some(round));
        self.pieces = kept;
        let taken: VecDeque<_> = taken;
        for (_, tag, payload) in &taken {
            let account = self.account(tag);
            *account = *account - payload.size;
        }
        taken.into()
    }

    /// Lets go of pieces of eras before this one.
    pub(super) fn drop_before(&mut self, era: Era, out: &mut Out) {
        self.drop_where(out, |round| round.era < era);
    }

    /// Lets go of everything of a stage.
    pub(super) fn drop_of(&mut self, stage: Stage, out: &mut Out) {
        self.drop_where(out, |round| round.stage == stage);
    }

    /// Lets go of pieces of steps that are over in this era. In a later one they may begin again.
    pub(super) fn drop_through(&mut self, era: Era, step: Step, out: &mut Out) {
        self.drop_where(out, |round| round.era <= era && round.step <= step);
    }

    fn drop_where(&mut self, out: &mut Out, old: impl Fn(RoundId) -> bool) {
        let Self { pieces, parts, results } = self;
        pieces.retain(|(_, tag, payload)| {
            let old = round_of(tag).is_some_and(&old);
            if old {
                let account = if is_result(tag) { &mut *results } else { &mut *parts };
                *account = *account - payload.size;
                out.push(PeerAction::Release(payload.id));
            }
            !old
        });
    }
}

/// Commits taken in whose tasks the engine has not all carried out.
#[derive(Debug, Default)]
pub(super) struct Applying {
    /// Each with the stages still to be applied.
    records: VecDeque<(CommitRecord, BTreeSet<Stage>)>,
}

fn round_of(tag: &TensorTag) -> Option<RoundId> {
    try_of(tag).map(|(round, _)| round)
}

/// The round that a piece is of, and how often that was mended when it was sent.
fn try_of(tag: &TensorTag) -> Option<(RoundId, Mend)> {
    match tag {
        TensorTag::RoundPart { round, mend, .. } | TensorTag::RoundResult { round, mend, .. } => {
            Some((*round, *mend))
        }
        TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. } => None,
    }
}

fn is_result(tag: &TensorTag) -> bool {
    matches!(tag, TensorTag::RoundResult { .. })
}

/// A word about a step, which waits until the steps before it are applied.
#[derive(Debug)]
pub(super) enum Word {
    Close(Round, Vec<Microbatch>),
    Commit(CommitRecord),
}

impl Word {
    /// Whether it orders a round in an earlier term than this.
    pub(super) fn is_of_term_before(&self, term: Term) -> bool {
        matches!(self, Self::Close(round, _) if round.id.term < term)
    }

    /// Whether it is the last word of this step.
    pub(super) fn commits(&self, step: Step) -> bool {
        matches!(self, Self::Commit(record) if record.step == step)
    }

    fn step(&self) -> Step {
        match self {
            Self::Close(round, _) => round.id.step,
            Self::Commit(record) => record.step,
        }
    }
}

/// What a commit finds here.
enum Results {
    /// Every stage's result is the one named: those of these rounds.
    Here(Vec<RoundId>),
    /// The engine must still put one together, or a piece must come.
    Awaited,
    /// One is another.
    Differ,
}

impl Peer {
    /// A step is closed at one of this peer's stages, where its accumulator must hold what was counted.
    pub(super) fn close(
        &mut self,
        now: Moment,
        round: Round,
        counted: Vec<Microbatch>,
        out: &mut Out,
    ) {
        if round.group.listeners.contains(&self.config.me) {
            self.listen(now, round, out);
        } else {
            self.keep_word(Word::Close(round, counted), out);
        }
        self.catch_up(now, out);
    }

    /// The step's last word.
    pub(super) fn commit(&mut self, now: Moment, record: CommitRecord, out: &mut Out) {
        self.commit_there(now, &record, out);
        self.keep_word(Word::Commit(record), out);
        self.catch_up(now, out);
    }

    fn keep_word(&mut self, word: Word, out: &mut Out) {
        let known = self.status == Status::Member;
        if !known || (self.newcomer.is_none() && word.step() < self.version) {
            return;
        }
        if self.backlog.len() >= BACKLOG {
            return self.fall_behind(out);
        }
        self.backlog.push_back(word);
    }

    /// Does what the words that wait ask for, as far as can be.
    pub(super) fn catch_up(&mut self, now: Moment, out: &mut Out) {
        while self.has_weights()
            && let Some(word) = self.backlog.front()
        {
            if word.step() > self.version {
                return;
            }
            let old = word.step() < self.version;
            let mut rounds = Vec::new();
            if let (Word::Commit(record), false) = (word, old) {
                let record = record.clone();
                let held_up =
                    self.moving.as_ref().is_some_and(|moving| moving.holds_up(record.step));
                if held_up {
                    return;
                }
                match self.results(&record, out) {
                    Results::Awaited => {
                        let known = self.lacks.filter(|(step, _)| *step == record.step);
                        self.lacks = known.or(Some((record.step, now)));
                        return;
                    }
                    Results::Differ => {
                        return self.leave(Fault::ResultDiffers { step: record.step }, out);
                    }
                    Results::Here(named) => rounds = named,
                }
            }
            match self.backlog.pop_front() {
                Some(Word::Close(round, counted)) if !old => self.reduce(now, round, counted, out),
                Some(Word::Commit(record)) if !old => self.apply(now, record, &rounds, out),
                _ => {}
            }
        }
    }

    /// Begins this peer's part in a round.
    fn reduce(&mut self, now: Moment, round: Round, counted: Vec<Microbatch>, out: &mut Out) {
        let id = round.id;
        let Some(hosted) = self.stages.get(&id.stage) else { return };
        let known = self.rounds.get(&id.stage).map(Reduction::round);
        if place_in(&round, self.config.me).is_none() || !is_next(known, &round) {
            return;
        }
        let expected: BTreeSet<Microbatch> = counted.into_iter().collect();
        let counted = hosted.counted(id.step);
        if expected != counted.microbatches {
            let missing = expected.difference(&counted.microbatches).count();
            let surplus = counted.microbatches.difference(&expected).count();
            return self.leave(Fault::AccumulatorDiffers { round: id, missing, surplus }, out);
        }
        let begun = match self.rounds.get_mut(&id.stage).filter(|known| known.round().id == id) {
            Some(known) => known.go_on(round, counted.proof, out),
            None => self.begin_round(round, counted.proof, out),
        };
        self.refuse(id, begun, out);
        for (from, tag, payload) in self.early.take(id) {
            self.round_piece(now, from, tag, payload, out);
        }
    }

    /// Begins this peer's part in a try of which there is nothing yet.
    fn begin_round(&mut self, round: Round, own_proof: u64, out: &mut Out) -> Result<(), Fault> {
        let id = round.id;
        let whole_proof = self.whole_proof(id);
        let layout = self.layout_of(&round);
        let piece = self.piece_bytes();
        let most = most_ahead(piece, self.config.limits.round_bytes, round.group.members.len());
        let link = |part: &RoundMember| self.links.get(&part.member.peer);
        let ahead = round.group.members.iter().map(|part| ahead(piece, most, link(part))).collect();
        let me = self.config.me;
        let mut reduction = Reduction::new(round, me, layout, ahead, own_proof, whole_proof)
            .expect("this peer is a member of the round");
        let started = reduction.start(out);
        if let Some(old) = self.rounds.insert(id.stage, reduction) {
            self.abort_round(old, out);
        }
        started
    }

    /// Something is about to be added to a step's sums.
    pub(super) fn sums_change(&mut self, key: ClaimKey) {
        let round = self.rounds.get_mut(&key.stage);
        if let Some(round) = round.filter(|known| known.round().id.step == key.step) {
            round.sums_change();
        }
    }

    /// Takes no further part in any round.
    pub(super) fn abort_rounds(&mut self, out: &mut Out) {
        for round in std::mem::take(&mut self.rounds).into_values() {
            self.abort_round(round, out);
        }
    }

    fn abort_round(&mut self, mut round: Reduction, out: &mut Out) {
        round.abort(out);
        if round.is_busy() {
            self.ended.push(round);
        }
    }

    /// The sum of the tags of the whole batch.
    pub(super) fn whole_proof(&self, round: RoundId) -> u64 {
        proof_of_all(round.step, round.stage, self.config.manifest.training.microbatches)
    }

    /// A piece of a round came.
    pub(super) fn round_piece(
        &mut self,
        now: Moment,
        member: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) {
        let Some((id, mend)) = try_of(&tag) else { return };
        let is_told = |known: &Round| known.id == id && known.mended.mend >= mend;
        let heard = self.hearing.get(&(id.step, id.stage));
        if heard.is_some_and(|known| is_told(known.round())) {
            return self.heard_piece(now, member, tag, payload, out);
        }
        let known = self.rounds.get_mut(&id.stage).filter(|known| is_told(known.round()));
        let Some(reduction) = known else {
            let hosted = self.may_host(id.stage);
            let closed = self.rounds.get(&id.stage).is_some_and(|known| known.round().id > id);
            // Word of a new era may come later than its first tensors.
            let open =
                id.era > self.era || (id.era == self.era && self.is_of_use(id.stage, id.step));
            if hosted && open && !closed && self.status != Status::Over {
                let heard = self.config.limits.heard - self.heard_bytes();
                let most = (self.early_bytes(), self.early.results() + heard);
                let kept = self.early.keep((member, tag, payload), most, out);
                let listens = self.newcomer.is_some() || self.is_moving_to(id.stage);
                match (kept, listens) {
                    (true, _) => {}
                    // Nobody waits for who listens.
                    (false, true) => self.fall_behind_at(id.stage, out),
                    (false, false) => Self::nonsense(member, "more pieces than a round has", out),
                }
            } else {
                out.push(PeerAction::Release(payload.id));
            }
            return;
        };
        let taken = match tag {
            TensorTag::RoundPart { piece, proof, .. } => {
                reduction.part((member, mend), piece, proof, payload, out)
            }
            TensorTag::RoundResult { piece, proof, .. } => {
                reduction.result(member, piece, proof, payload, out)
            }
            TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. } => Ok(()),
        };
        self.refuse(id, taken, out);
    }

    /// What one member may have on its way here before its rounds are closed here: pieces as far as
    /// its window may go, which is its own choice, for two steps and two tries of every stage.
    fn early_bytes(&self) -> Bytes {
        let window = self.piece_bytes().0 * u64::from(AHEAD);
        Bytes(window * 4 * u64::from(self.config.manifest.training.stages))
    }

    /// What a member's sums in one piece of a round weigh at most.
    fn piece_bytes(&self) -> Bytes {
        piece_bytes(self.config.limits.cut, self.config.manifest.codec.all_reduce)
    }

    /// How a round's vector is cut.
    pub(super) fn layout_of(&self, round: &Round) -> Layout {
        let elements = self.config.parameters[&round.id.stage];
        let codec = self.config.manifest.codec.all_reduce;
        Layout::new(round, elements, self.config.limits.cut, codec)
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
    pub(super) fn round_computed(&mut self, now: Moment, result: TaskResult, out: &mut Out) {
        let round = match &result {
            TaskResult::Exported { round, .. }
            | TaskResult::Reduced { round, .. }
            | TaskResult::Installed { round, .. }
            | TaskResult::Summarised { round, .. } => *round,
            other => unreachable!("not of a round: {other:?}"),
        };
        if self.is_heard(round) {
            return self.heard_computed(now, result, out);
        }
        let going = self.rounds.values_mut().chain(&mut self.ended);
        let reduction = going
            .into_iter()
            .find(|known| known.round().id == round)
            .expect("rounds stay until all their tasks are done");
        match result {
            TaskResult::Exported { to, piece, payload, .. } => {
                reduction.exported(to, piece, payload, out);
            }
            TaskResult::Reduced { piece, payload, .. } => reduction.reduced(piece, payload, out),
            TaskResult::Installed { range, .. } => reduction.installed(&range, out),
            TaskResult::Summarised { hash, square_norm, .. } => {
                if let Some(outcome) = reduction.summarised(hash, square_norm) {
                    let round = reduction.round();
                    out.push(reduced(round, outcome, &self.links));
                }
            }
            _ => {}
        }
        self.ended.retain(Reduction::is_busy);
    }

    /// Repeats what the rounds came to while no commit follows.
    pub(super) fn repeat_outcomes(&self, out: &mut Out) {
        for reduction in self.rounds.values() {
            if let Some(outcome) = reduction.outcome() {
                out.push(reduced(reduction.round(), outcome, &self.links));
            }
        }
    }

    /// Whether the results that a commit names are here. What was heard is put together now.
    fn results(&mut self, record: &CommitRecord, out: &mut Out) -> Results {
        let (mut rounds, mut awaited) = (Vec::new(), false);
        let hosted: Vec<Stage> = self.hosted_in(record.step).collect();
        for stage in &hosted {
            let Some((attempt, named)) = record.stages.get(usize::from(stage.0)) else {
                return Results::Differ;
            };
            let reduction = self.rounds.get(stage);
            let is_named =
                |round: &Round| round.id.attempt == *attempt && round.id.term == record.term;
            let own = reduction.filter(|known| is_named(known.round()));
            let heard = self.hearing.get_mut(&(record.step, *stage));
            let heard = heard.filter(|known| is_named(known.round()));
            let found = match (own, heard) {
                (Some(own), _) => own.outcome().map(|outcome| (own.round().id, outcome)),
                (None, Some(heard)) => {
                    if heard.is_whole() {
                        heard.install(out);
                    }
                    heard.outcome().map(|outcome| (heard.round().id, outcome))
                }
                (None, None) => None,
            };
            match found {
                Some((round, outcome)) if outcome == *named => rounds.push(round),
                Some(_) => return Results::Differ,
                None => awaited = true,
            }
        }
        if awaited { Results::Awaited } else { Results::Here(rounds) }
    }

    /// Applies the results that a commit names, which are those of these rounds.
    fn apply(&mut self, now: Moment, record: CommitRecord, rounds: &[RoundId], out: &mut Out) {
        assert!(self.applying.records.len() < APPLYING, "no step is committed before its tasks");
        for round in rounds.iter().copied() {
            let gradient_norm = record.gradient_norm;
            out.push(PeerAction::Compute(Task::Apply { round, gradient_norm }));
        }
        self.abort_rounds(out);
        self.forget_heard_through(record.step, out);
        self.drop_jobs_through(record.step, out);
        self.early.drop_through(self.era, record.step, out);
        self.version = record.step.next();
        let open = self.version;
        self.released.retain(|key, _| key.step >= open);
        let stages: BTreeSet<Stage> = rounds.iter().map(|round| round.stage).collect();
        if stages.is_empty() {
            // Who hosts nothing has no task to wait for.
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        } else {
            self.applying.records.push_back((record, stages));
        }
        self.change_over(now, out);
        for hosted in self.stages.values_mut() {
            hosted.forget_before(open);
        }
        self.store_when_due(out);
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            self.admit(now, stage, out);
        }
        self.say_ready(out);
        self.leave_drained(out);
    }

    /// The stages that are served in a step.
    fn hosted_in(&self, step: Step) -> impl Iterator<Item = Stage> + '_ {
        self.stages.keys().copied().filter(move |stage| self.hosts_at(*stage, step))
    }

    /// The engine applied one stage's result.
    pub(super) fn applied(&mut self, round: RoundId, out: &mut Out) {
        // After a rewind nobody waits for what was being applied, and what is applied to weights that
        // are not served yet is nobody's business.
        let Some((record, missing)) = self.applying.records.front_mut() else { return };
        if record.step == round.step {
            missing.remove(&round.stage);
        }
        if missing.is_empty() {
            let (record, _) = self.applying.records.pop_front().expect("it was just there");
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        }
    }
}

/// What a round came to, with what the links to its members were measured to carry.
fn reduced(
    round: &Round,
    outcome: RoundOutcome,
    known: &BTreeMap<PeerId, LinkEstimate>,
) -> PeerAction {
    let places = (0..).zip(&round.group.members);
    let rates = places
        .filter_map(|(place, part)| Some((place, known.get(&part.member.peer)?.rate?)))
        .collect();
    let (round, mend) = (round.id, round.mended.mend);
    PeerAction::ToCoordinator(ToCoordinator::Reduced { round, mend, outcome, rates })
}
