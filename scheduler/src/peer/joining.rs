//! Catching up: a newcomer fetches a snapshot of its stages, hears the results of rounds meanwhile,
//! applies them, and serves when it holds what the others hold.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Era, Member, Stage, StageSpan, Step};
use shoal_protocol::message::{
    Round, RoundId, RoundOutcome, SnapshotPart, TensorTag, ToCoordinator,
};
use shoal_protocol::units::{Bytes, Moment};

use super::closing::Applying;
use super::hearing::Hearing;
use super::stage::Hosted;
use super::stores::Stores;
use super::{Out, Peer, Status};
use crate::action::{Payload, PeerAction, PeerEvent, Task, TaskResult};
use crate::round::is_next;

/// Retries without a piece of a committed result after which it is taken for lost.
const LOST: u32 = 8;

/// How far a peer is that does not serve yet.
#[derive(Debug, Default)]
pub(super) struct Newcomer {
    /// The version that it begins from, and the stages that it does not hold at that version.
    begins: Option<(Step, BTreeSet<Stage>)>,
}

/// Whether the coordinator was told of late that this peer cannot follow: who fails again and again
/// asks once in a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stale {
    #[default]
    No,
    Said,
    /// Something was of no use since.
    Again,
}

impl Newcomer {
    /// A newcomer that holds the initial weights, or waits for a snapshot.
    pub(super) fn admitted(version: Step) -> Self {
        Self { begins: (version.0 == 0).then(|| (version, BTreeSet::new())) }
    }

    fn has_weights(&self) -> bool {
        self.begins.as_ref().is_some_and(|(_, missing)| missing.is_empty())
    }
}

impl Peer {
    /// Whether the engine holds the weights of this peer's version.
    pub(super) fn has_weights(&self) -> bool {
        self.status == Status::Member && self.newcomer.as_ref().is_none_or(Newcomer::has_weights)
    }

    /// Where the weights are that this peer begins from.
    pub(super) fn snapshot(
        &mut self,
        now: Moment,
        version: Step,
        parts: Vec<SnapshotPart>,
        out: &mut Out,
    ) {
        let here = self.version;
        let Some(newcomer) = &mut self.newcomer else {
            return self.snapshot_to_move(now, version, parts, out);
        };
        // Who was told twice what to begin from may be further by now than the second word.
        let newer = newcomer.begins.as_ref().is_none_or(|(begun, missing)| {
            version > if missing.is_empty() { here } else { *begun }
        });
        if self.status != Status::Member || !newer {
            return;
        }
        let missing: BTreeSet<Stage> = parts.iter().map(|part| part.stage).collect();
        if version.0 > 0 && !missing.iter().eq(self.stages.keys()) {
            return self.fall_behind(out);
        }
        let initial = version.0 == 0;
        let missing = if initial { self.stages.keys().copied().collect() } else { missing };
        newcomer.begins = Some((version, missing));
        self.version = version;
        for stage in self.stages.keys().copied().filter(|_| initial) {
            out.push(PeerAction::Compute(Task::Restore { version, stage }));
        }
        if let Some(before) = version.0.checked_sub(1).map(Step) {
            self.forget_heard_through(before, out);
            self.early.drop_through(self.era, before, out);
        }
        for part in parts {
            out.push(PeerAction::Fetch { version, part });
        }
        self.catch_up(now, out);
        self.say_ready(out);
    }

    /// The files of a stage are here, or cannot be had.
    pub(super) fn fetched(&mut self, version: Step, stage: Stage, whole: bool, out: &mut Out) {
        if self.fetched_to_move(version, stage, whole, out) {
            return;
        }
        let begins = self.newcomer.as_ref().and_then(|newcomer| newcomer.begins.as_ref());
        let wanted =
            begins.is_some_and(|(wanted, missing)| *wanted == version && missing.contains(&stage));
        if !wanted {
            return;
        }
        if whole {
            out.push(PeerAction::Compute(Task::Restore { version, stage }));
        } else {
            self.fall_behind(out);
        }
    }

    /// The engine holds a stage at a version.
    pub(super) fn restored(&mut self, now: Moment, version: Step, stage: Stage, out: &mut Out) {
        if self.restored_to_move(now, version, stage, out) {
            return;
        }
        let begins = self.newcomer.as_mut().and_then(|newcomer| newcomer.begins.as_mut());
        if let Some((wanted, missing)) = begins
            && *wanted == version
        {
            missing.remove(&stage);
            self.store_when_due(out);
            self.catch_up(now, out);
            self.say_ready(out);
        }
    }

    /// Tells the coordinator which version a newcomer holds. Words that still wait are of steps that
    /// are over, so there is no need to say it before they are done.
    pub(super) fn say_ready(&self, out: &mut Out) {
        if self.newcomer.is_some() && self.has_weights() && self.backlog.is_empty() {
            let (version, view) = (self.version, self.view.number);
            out.push(PeerAction::ToCoordinator(ToCoordinator::Ready { version, view }));
        }
        self.say_ready_to_move(out);
    }

    /// Says again what a newcomer waits for.
    pub(super) fn repeat_readiness(&mut self, out: &mut Out) {
        self.say_ready(out);
        if std::mem::take(&mut self.behind) == Stale::Again {
            self.behind = Stale::Said;
            let there = self.may_move_anew();
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there }));
        }
    }

    /// Whether a step's results may be of use: a newcomer that does not know yet what it begins from
    /// hears everything.
    pub(super) fn is_of_use(&self, stage: Stage, step: Step) -> bool {
        let there = self.moving.as_ref().filter(|moving| moving.to == stage);
        if there.is_some_and(|moving| moving.hears(step)) {
            return true;
        }
        match &self.newcomer {
            None => self.is_open(step),
            Some(newcomer) => newcomer.begins.is_none() || step >= self.version,
        }
    }

    /// Serves from the membership on that says so.
    pub(super) fn serve_when_listed(&mut self, out: &mut Out) {
        let listed = self.view.serves(self.config.me);
        if self.status != Status::Member || self.newcomer.is_none() || !listed {
            return;
        }
        self.newcomer = None;
        out.push(PeerAction::Event(PeerEvent::Serving { version: self.version }));
        self.welcome_early_askers(out);
    }

    /// This peer cannot follow from what it has: it begins anew, from a newer snapshot.
    pub(super) fn fall_behind(&mut self, out: &mut Out) {
        // Who lacks a result of its own stage goes nowhere.
        self.moving = None;
        self.say_behind(false, out);
        self.begin_anew(out);
    }

    pub(super) fn say_behind(&mut self, there: bool, out: &mut Out) {
        if std::mem::replace(&mut self.behind, Stale::Said) == Stale::No {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there }));
        } else {
            self.behind = Stale::Again;
        }
    }

    /// This peer cannot follow at a stage, which it hosts or is to host.
    pub(super) fn fall_behind_at(&mut self, stage: Stage, out: &mut Out) {
        if self.is_moving_to(stage) {
            self.begin_moving_anew(out);
        } else {
            self.fall_behind(out);
        }
    }

    /// Forgets what it began from, and waits to be told of a newer snapshot.
    pub(super) fn begin_anew(&mut self, out: &mut Out) {
        self.stop_listening(out);
        self.early.drop_through(self.era, Step(u64::MAX), out);
        if let Some(newcomer) = &mut self.newcomer {
            newcomer.begins = None;
        }
    }

    /// Listens to a round's result.
    pub(super) fn listen(&mut self, now: Moment, round: Round, out: &mut Out) {
        let id = round.id;
        let place = (id.step, id.stage);
        let begins = self.newcomer.as_ref().and_then(|newcomer| newcomer.begins.as_ref());
        let there = self.moving.as_ref().filter(|moving| moving.to == id.stage);
        let old = match there {
            Some(moving) => !moving.hears(id.step),
            None => begins.is_some() && id.step < self.version,
        };
        let mine = there.is_some() || self.stages.contains_key(&id.stage);
        if !mine || old || !is_next(self.hearing.get(&place).map(Hearing::round), &round) {
            return;
        }
        if let Some(known) = self.hearing.get_mut(&place).filter(|known| known.round().id == id) {
            known.go_on(round, out);
        } else {
            let layout = self.layout_of(&round);
            let hearing = Hearing::new(round, layout, self.whole_proof(id));
            if let Some(failed) = self.hearing.insert(place, hearing) {
                self.retire(failed, out);
            }
        }
        for (from, tag, payload) in self.early.take(id) {
            self.round_piece(now, from, tag, payload, out);
        }
    }

    /// A piece of a result that this peer listens to.
    pub(super) fn heard_piece(
        &mut self,
        now: Moment,
        member: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) {
        let TensorTag::RoundResult { round, piece, proof, .. } = tag else {
            return out.push(PeerAction::Release(payload.id));
        };
        if self.heard_bytes() + payload.size > self.config.limits.heard {
            out.push(PeerAction::Release(payload.id));
            return self.fall_behind_at(round.stage, out);
        }
        let place = (round.step, round.stage);
        let hearing = self.hearing.get_mut(&place).expect("the caller has looked");
        hearing.result(member, piece, proof, payload, out);
        let whole = hearing.is_whole();
        self.lacks = self.lacks.map(|(step, _)| (step, now));
        self.heard_there(now, round.stage);
        if whole {
            self.catch_up_there(now, out);
            self.catch_up(now, out);
            self.say_ready(out);
        }
    }

    pub(super) fn heard_bytes(&self) -> Bytes {
        let unheard = self.unheard.iter();
        let kept: Bytes = self.hearing.values().chain(unheard).map(Hearing::held).sum();
        kept + self.early.results()
    }

    /// A task with a result that was listened to ended.
    pub(super) fn heard_computed(&mut self, now: Moment, result: TaskResult, out: &mut Out) {
        let (TaskResult::Installed { round, .. } | TaskResult::Summarised { round, .. }) = &result
        else {
            unreachable!("who listens does nothing else: {result:?}")
        };
        let hearing = self
            .hearing
            .values_mut()
            .chain(&mut self.unheard)
            .find(|known| known.round().id == *round)
            .expect("the caller has looked");
        match result {
            TaskResult::Installed { range, .. } => hearing.installed(&range, out),
            TaskResult::Summarised { hash, square_norm, .. } => {
                let proof = hearing.whole_proof();
                hearing.summarised(RoundOutcome { hash, square_norm, proof });
                self.catch_up_there(now, out);
                self.catch_up(now, out);
                self.say_ready(out);
            }
            _ => {}
        }
        self.unheard.retain(Hearing::is_busy);
    }

    /// Whether a round is, or was, only listened to here.
    pub(super) fn is_heard(&self, round: RoundId) -> bool {
        self.hearing.values().chain(&self.unheard).any(|known| known.round().id == round)
    }

    /// Lets go of a result, or waits until the engine has.
    fn retire(&mut self, hearing: Hearing, out: &mut Out) {
        if hearing.is_busy() {
            self.unheard.push(hearing);
        } else {
            hearing.let_go(out);
        }
    }

    /// The whole run goes back to a version: whatever is kept for later steps is of no more use. The
    /// engine's tasks end before it takes over other weights, and nothing of them counts.
    pub(super) fn rewind(&mut self, era: Era, version: Step, span: StageSpan, out: &mut Out) {
        let known = self.era;
        self.era = era.max(known);
        if self.status != Status::Member || era <= known {
            return;
        }
        self.drop_jobs_through(Step(u64::MAX), out);
        self.stop_moving(out);
        self.early.drop_before(era, out);
        self.stop_listening(out);
        self.abort_rounds(out);
        for key in self.compute.take_rooms() {
            if let Some(hosted) = self.stages.get_mut(&key.stage) {
                hosted.give_room_back(key.step);
            }
        }
        self.stages.values_mut().for_each(Hosted::forget_work);
        self.span = Some(span);
        self.keep_stages(out);
        self.released.clear();
        self.early_askers.clear();
        self.applying = Applying::default();
        self.stores = Stores::default();
        self.wish = None;
        self.version = version;
        self.newcomer = Some(Newcomer::default());
        out.push(PeerAction::Event(PeerEvent::Rewound { era, version }));
    }

    /// Who is gone sends no more of what this peer still needs to hear.
    pub(super) fn stop_waiting_for(&mut self, gone: &BTreeSet<Member>, out: &mut Out) {
        self.stop_waiting_there(gone, out);
        let waits = |hearing: &Hearing| gone.iter().any(|member| hearing.waits_for(*member));
        // A round that was not committed is tried again without them.
        let committed = |step: Step| self.backlog.iter().any(|word| word.commits(step));
        let mut here = self.hearing.iter().filter(|((_, stage), _)| !self.is_moving_to(*stage));
        let lacks = here.any(|((step, _), hearing)| committed(*step) && waits(hearing));
        if lacks {
            self.fall_behind(out);
        }
    }

    /// Nothing more comes of a result that was committed long ago: its pieces were lost on the way,
    /// and those who had it have applied it and hold it no more.
    pub(super) fn give_up_lost_results(&mut self, now: Moment, out: &mut Out) {
        let patience = self.lost_patience();
        let step = self.version;
        let is_late = self
            .lacks
            .is_some_and(|(lacking, since)| lacking == step && now.since(since) >= patience);
        if is_late && self.has_weights() && !self.hearing.values().any(Hearing::is_busy) {
            let span = self.span.expect("who has weights hosts stages");
            out.push(PeerAction::Event(PeerEvent::ResultLost { step, span }));
            self.fall_behind(out);
        }
    }

    /// After how long without a piece of a committed result it is taken for lost.
    pub(super) fn lost_patience(&self) -> Duration {
        self.config.limits.retry * LOST
    }

    /// Lets go of what was heard at the hosted stages of steps up to this one.
    pub(super) fn forget_heard_through(&mut self, step: Step, out: &mut Out) {
        let there = self.moving.as_ref().map(|moving| moving.to);
        self.forget_heard(|place| place.0 <= step && Some(place.1) != there, out);
    }

    /// Lets go of what was heard at a stage of steps up to this one.
    pub(super) fn forget_heard_of(&mut self, stage: Stage, step: Step, out: &mut Out) {
        self.forget_heard(|place| place.0 <= step && place.1 == stage, out);
    }

    fn forget_heard(&mut self, of_no_use: impl Fn((Step, Stage)) -> bool, out: &mut Out) {
        let hearing: BTreeMap<_, _> = std::mem::take(&mut self.hearing);
        for (place, heard) in hearing {
            if of_no_use(place) {
                self.retire(heard, out);
            } else {
                self.hearing.insert(place, heard);
            }
        }
    }

    /// Lets go of everything that waits to be applied.
    pub(super) fn stop_listening(&mut self, out: &mut Out) {
        self.backlog.clear();
        self.lacks = None;
        self.forget_heard(|_| true, out);
    }
}
