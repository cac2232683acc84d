//! Changing the stage: while this peer serves its own it fetches another one's weights, hears what the
//! rounds there come to and applies that. From the step on that the membership says, it hosts the
//! other stage instead.

use std::collections::{BTreeSet, VecDeque};

use shoal_protocol::ids::{ClaimKey, Member, Microbatch, Stage, StageSpan, Step};
use shoal_protocol::message::{CommitRecord, SnapshotPart, ToCoordinator};
use shoal_protocol::units::Moment;

use super::{Out, Peer};
use crate::action::{PeerAction, PeerEvent, Task};

/// Commits that the other stage's weights have not had yet: who falls further behind begins anew.
const COMMITS: usize = 1 << 10;

/// A stage that this peer fetches, to host it in place of its own.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) to: Stage,
    /// What its weights begin from, once that is known.
    begins: Option<Begins>,
    /// Commits that they have not had, from their version on; all, where it is not known yet what
    /// they begin from.
    commits: VecDeque<CommitRecord>,
    /// The step whose result they wait for, and since when nothing of it comes.
    lacks: Option<(Step, Moment)>,
    /// The first step that is served with them, once that is decided.
    at: Option<Step>,
}

/// Weights that are fetched or here.
#[derive(Debug)]
struct Begins {
    /// Their version: that of the snapshot, and later of what was applied to it.
    version: Step,
    /// Whether the engine has them.
    here: bool,
}

impl Moving {
    fn new(to: Stage) -> Self {
        Self { to, begins: None, commits: VecDeque::new(), lacks: None, at: None }
    }

    /// The version of the weights here.
    fn version(&self) -> Option<Step> {
        self.begins.as_ref().filter(|begins| begins.here).map(|begins| begins.version)
    }

    /// Whether what a round of this step comes to may be of use.
    pub(super) fn hears(&self, step: Step) -> bool {
        self.begins.as_ref().is_none_or(|begins| step >= begins.version)
    }

    /// Whether it must have had a step before this peer goes on from that step: from the moment on
    /// that it is decided, its weights are never older than those that are served.
    pub(super) fn holds_up(&self, step: Step) -> bool {
        self.at.is_some() && self.version().is_none_or(|version| version <= step)
    }

    pub(super) fn commits(&self, step: Step) -> bool {
        self.commits.iter().any(|record| record.step == step)
    }
}

impl Peer {
    /// Whether this peer hosts a stage in a step.
    pub(super) fn hosts_at(&self, stage: Stage, step: Step) -> bool {
        let moved = self.moving.as_ref().filter(|moving| moving.at.is_some_and(|at| at <= step));
        let span = moved.map(|moving| StageSpan::one(moving.to)).or(self.span);
        span.is_some_and(|span| span.contains(stage)) && self.stages.contains_key(&stage)
    }

    /// Whether this peer hosts a stage or is to host it some time, or does not know yet what it will host.
    pub(crate) fn may_host(&self, stage: Stage) -> bool {
        self.span.is_none_or(|span| span.contains(stage)) || self.is_moving_to(stage)
    }

    /// Whether this peer is to host a stage some time.
    pub(super) fn is_moving_to(&self, stage: Stage) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.to == stage)
    }

    /// Follows what the membership says of this peer's way to another stage.
    pub(super) fn follow_moves(&mut self, now: Moment, out: &mut Out) {
        let Some(record) = self.view.record(self.config.me) else { return };
        let span = record.span;
        let moves = record.moves.filter(|moves| moves.era == self.era);
        if let Some(moving) = self.moving.as_ref().filter(|moving| moving.at.is_none()) {
            let to = moving.to;
            let at = moves.filter(|moves| moves.to == to).map(|moves| moves.at);
            match at {
                // The step that it was decided for is committed: nobody needs this peer elsewhere.
                None if span.contains(to) => self.decided(now, self.version, out),
                None => {
                    self.stop_moving(out);
                    out.push(PeerAction::Event(PeerEvent::MoveCancelled { to }));
                }
                Some(None) => {}
                Some(Some(at)) => self.decided(now, at, out),
            }
        }
        let begins = moves.filter(|moves| moves.at.is_none());
        if let Some(moves) = begins
            && self.moving.is_none()
            && self.newcomer.is_none()
        {
            self.moving = Some(Moving::new(moves.to));
            out.push(PeerAction::Event(PeerEvent::MoveBegun {
                to: moves.to,
                reason: moves.reason,
            }));
        }
    }

    /// It is decided from which step on the other stage is served.
    fn decided(&mut self, now: Moment, at: Step, out: &mut Out) {
        self.moving.as_mut().expect("the caller has looked").at = Some(at);
        self.leave_work_from(now, at, out);
        self.open_other_stage(now, out);
    }

    /// Work of a step from which on this peer is elsewhere, taken in before it knew, goes to others.
    fn leave_work_from(&mut self, now: Moment, at: Step, out: &mut Out) {
        let stages: Vec<Stage> = self.stages.keys().copied().collect();
        for stage in stages {
            let hosted = self.stages.get_mut(&stage).expect("it was just listed");
            let late = hosted.offers.split_off(&(at, Microbatch(0)));
            for ((step, microbatch), offer) in late {
                self.say_busy(offer.from, ClaimKey { step, stage, microbatch }, out);
            }
        }
        let keys: Vec<ClaimKey> = self.jobs.keys().filter(|key| key.step >= at).copied().collect();
        for key in keys {
            self.turn_askers_away(key, out);
            self.abandon(key, out);
            self.admit(now, key.stage, out);
        }
    }

    /// Takes in work of the other stage as soon as its weights are not older than those that are
    /// served.
    fn open_other_stage(&mut self, now: Moment, out: &mut Out) {
        let Some(moving) = &self.moving else { return };
        let (to, served) = (moving.to, self.version);
        let level = moving.version().is_some_and(|version| version >= served);
        if moving.at.is_some() && level && !self.stages.contains_key(&to) {
            self.stages.insert(to, self.hosted(to, self.stages.len() + 1));
            self.route_by_view();
            self.welcome_early_askers(out);
        }
        self.change_over(now, out);
    }

    /// Where the weights are that this peer is to move with.
    pub(super) fn snapshot_to_move(
        &mut self,
        now: Moment,
        version: Step,
        parts: Vec<SnapshotPart>,
        out: &mut Out,
    ) {
        let Some(moving) = &mut self.moving else { return };
        let newer = moving.begins.as_ref().is_none_or(|begins| version > begins.version);
        if moving.at.is_some() || !newer {
            return;
        }
        let stage = moving.to;
        let fits = version.0 == 0 || parts.iter().map(|part| part.stage).eq([stage]);
        if !fits {
            return self.begin_moving_anew(out);
        }
        moving.begins = Some(Begins { version, here: false });
        moving.commits.retain(|record| record.step >= version);
        moving.lacks = None;
        if let Some(before) = version.0.checked_sub(1).map(Step) {
            self.forget_heard_of(stage, before, out);
        }
        if version.0 == 0 {
            out.push(PeerAction::Compute(Task::Restore { version, stage }));
        }
        for part in parts {
            out.push(PeerAction::Fetch { version, part });
        }
        self.catch_up_there(now, out);
    }

    /// Whether this peer waits for these weights to move with.
    fn moves_with(&self, version: Step, stage: Stage) -> bool {
        let begins = self.moving.as_ref().filter(|moving| moving.to == stage);
        let begins = begins.and_then(|moving| moving.begins.as_ref());
        begins.is_some_and(|begins| begins.version == version && !begins.here)
    }

    /// The files of the other stage are here, or cannot be had. Returns whether they were waited for.
    pub(super) fn fetched_to_move(
        &mut self,
        version: Step,
        stage: Stage,
        whole: bool,
        out: &mut Out,
    ) -> bool {
        let wanted = self.moves_with(version, stage);
        if wanted && whole {
            out.push(PeerAction::Compute(Task::Restore { version, stage }));
        } else if wanted {
            self.begin_moving_anew(out);
        }
        wanted
    }

    /// The engine holds the other stage at a version. Returns whether that was waited for.
    pub(super) fn restored_to_move(
        &mut self,
        now: Moment,
        version: Step,
        stage: Stage,
        out: &mut Out,
    ) -> bool {
        let wanted = self.moves_with(version, stage);
        if let Some(begins) = self.moving.as_mut().and_then(|moving| moving.begins.as_mut())
            && wanted
        {
            begins.here = true;
            self.catch_up_there(now, out);
        }
        wanted
    }

    /// A step's last word is of use to the other stage's weights too.
    pub(super) fn commit_there(&mut self, now: Moment, record: &CommitRecord, out: &mut Out) {
        let Some(moving) = &mut self.moving else { return };
        let known = moving.commits.back().is_some_and(|last| last.step >= record.step);
        if known || !moving.hears(record.step) {
            return;
        }
        if moving.commits.len() >= COMMITS {
            return self.begin_moving_anew(out);
        }
        moving.commits.push_back(record.clone());
        self.catch_up_there(now, out);
    }

    /// Applies to the other stage's weights what commits name, as far as it is here.
    pub(super) fn catch_up_there(&mut self, now: Moment, out: &mut Out) {
        while let Some(moving) = &mut self.moving
            && let Some(version) = moving.version()
            && let Some(record) = moving.commits.front()
        {
            let (step, stage) = (record.step, moving.to);
            let named = record.stages.get(usize::from(stage.0)).copied();
            if step > version && moving.at.is_none() {
                // A word of an earlier way there, or one of this way was lost: what was heard may fit what is
                // told next.
                (moving.begins, moving.lacks) = (None, None);
                return self.say_behind(true, out);
            }
            let Some((attempt, outcome)) = named.filter(|_| step == version) else {
                return self.begin_moving_anew(out);
            };
            let heard = self.hearing.get_mut(&(step, stage)).filter(|known| {
                let id = known.round().id;
                id.attempt == attempt && id.term == record.term
            });
            let Some(heard) = heard.filter(|known| known.is_whole()) else {
                moving.lacks =
                    moving.lacks.filter(|(lacking, _)| *lacking == step).or(Some((step, now)));
                return;
            };
            // All of it is here, however long the engine takes to put it together.
            moving.lacks = None;
            heard.install(out);
            match heard.outcome() {
                None => return,
                Some(other) if other != outcome => return self.begin_moving_anew(out),
                Some(_) => {}
            }
            let (round, gradient_norm) = (heard.round().id, record.gradient_norm);
            out.push(PeerAction::Compute(Task::Apply { round, gradient_norm }));
            moving.commits.pop_front();
            let begins = moving.begins.as_mut().expect("its version was just read");
            begins.version = version.next();
            self.forget_heard_of(stage, step, out);
        }
        self.open_other_stage(now, out);
        self.say_ready(out);
    }

    /// Says that the other stage's weights are level with those that are served.
    pub(super) fn say_ready_to_move(&self, out: &mut Out) {
        let level =
            |moving: &&Moving| moving.at.is_none() && moving.version() == Some(self.version);
        if self.moving.as_ref().filter(level).is_some() {
            let (version, view) = (self.version, self.view.number);
            out.push(PeerAction::ToCoordinator(ToCoordinator::Ready { version, view }));
        }
    }

    /// What was fetched or heard of the other stage is of no use: a newer snapshot is asked for. Once
    /// it is decided that it is served, there is no other way than to begin as a newcomer.
    pub(super) fn begin_moving_anew(&mut self, out: &mut Out) {
        if self.moving.is_some() {
            let may = self.may_move_anew();
            self.wait_to_move_anew(out);
            self.say_behind(may, out);
        }
    }

    /// Whether this peer is on its way to another stage, and nothing is decided yet. Later it lacks what is its
    /// own, though the membership may say already where it is to go next.
    pub(super) fn may_move_anew(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.at.is_none())
    }

    /// Forgets what the other stage's weights began from, and waits to be told of a newer snapshot.
    fn wait_to_move_anew(&mut self, out: &mut Out) {
        let Some(moving) = &mut self.moving else { return };
        let stage = moving.to;
        moving.begins = None;
        moving.commits.clear();
        moving.lacks = None;
        self.forget_heard_of(stage, Step(u64::MAX), out);
        self.early.drop_of(stage, out);
    }

    /// A new coordinator tells anew what to begin from, where nothing is decided yet.
    pub(super) fn taken_over_on_the_way(&mut self, out: &mut Out) {
        if self.may_move_anew() {
            self.wait_to_move_anew(out);
        }
    }

    /// A new coordinator does not know that this peer lacks what it was to serve: with the one before the word
    /// may be lost.
    pub(super) fn say_lost_on_the_way(&self, out: &mut Out) {
        let moving = self.moving.as_ref();
        if moving.is_some_and(|moving| moving.at.is_some() && moving.begins.is_none()) {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there: false }));
        }
    }

    /// Nothing more comes of a result that the other stage's weights wait for.
    pub(super) fn give_up_lost_result_there(&mut self, now: Moment, out: &mut Out) {
        let patience = self.lost_patience();
        let lacks = self.moving.as_ref().and_then(|moving| moving.lacks);
        if let Some((step, since)) = lacks
            && now.since(since) >= patience
        {
            let span = StageSpan::one(self.moving.as_ref().expect("it lacks something").to);
            out.push(PeerAction::Event(PeerEvent::ResultLost { step, span }));
            self.begin_moving_anew(out);
        }
    }

    /// Something of the result came that the other stage's weights wait for.
    pub(super) fn heard_there(&mut self, now: Moment, stage: Stage) {
        if let Some(moving) = self.moving.as_mut().filter(|moving| moving.to == stage) {
            moving.lacks = moving.lacks.map(|(step, _)| (step, now));
        }
    }

    /// Those who are gone send no more of what the other stage's weights wait for.
    pub(super) fn stop_waiting_there(&mut self, gone: &BTreeSet<Member>, out: &mut Out) {
        let Some(moving) = &self.moving else { return };
        let lacks = self.hearing.iter().any(|((step, stage), hearing)| {
            *stage == moving.to
                && moving.commits(*step)
                && gone.iter().any(|member| hearing.waits_for(*member))
        });
        if lacks {
            self.begin_moving_anew(out);
        }
    }

    /// Changes over as soon as the step is the next one, and the other stage's weights are level.
    pub(super) fn change_over(&mut self, now: Moment, out: &mut Out) {
        let due = |moving: &Moving| {
            moving.at.is_some_and(|at| at <= self.version) && self.stages.contains_key(&moving.to)
        };
        let Some(moving) = self.moving.take_if(|moving| due(moving)) else { return };
        let (to, at) = (moving.to, self.version);
        let from = self.span.replace(StageSpan::one(to)).expect("members host something");
        self.keep_stages(out);
        out.push(PeerAction::Event(PeerEvent::Moved { from, to, at }));
        // The membership may say already where to go from here.
        self.follow_moves(now, out);
    }

    /// Lets go of the stages that this peer hosts no more.
    pub(super) fn keep_stages(&mut self, out: &mut Out) {
        let Some(span) = self.span else { return };
        let left: Vec<Stage> =
            self.stages.keys().filter(|stage| !span.contains(**stage)).copied().collect();
        for stage in left {
            self.stages.remove(&stage);
            out.push(PeerAction::Compute(Task::Leave { stage }));
        }
        let count = span.stages().count();
        for stage in span.stages() {
            let alone = self.hosted(stage, count);
            match self.stages.get_mut(&stage) {
                Some(hosted) => hosted.largest_window = alone.largest_window,
                None => {
                    self.stages.insert(stage, alone);
                }
            }
        }
        self.route_by_view();
    }

    /// Lets go of what was fetched and heard of the other stage.
    pub(super) fn stop_moving(&mut self, out: &mut Out) {
        let Some(moving) = self.moving.take() else { return };
        self.forget_heard_of(moving.to, Step(u64::MAX), out);
        self.early.drop_of(moving.to, out);
        if moving.begins.is_some() && !self.stages.contains_key(&moving.to) {
            out.push(PeerAction::Compute(Task::Leave { stage: moving.to }));
        }
    }
}
