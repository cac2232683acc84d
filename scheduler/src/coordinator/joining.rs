//! Newcomers while training runs: a snapshot to begin from, the results since, then serving. Who
//! moves to another stage is a newcomer there.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan, Step};
use shoal_protocol::message::{FromCoordinator, SnapshotPart};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, Phase, send};

/// Newcomers that a stage takes in at a time for each of its replicas: each costs its donors a snapshot, and
/// the results of rounds until it serves. Then it is a replica too, so that the last of a crowd waits for
/// about as many turns as the crowd doubles the stage.
const AT_A_TIME: usize = 1;

/// After so long who has its turn keeps it from nobody any more: it may be slow, or never come.
const TURN: Duration = Duration::from_secs(120);

/// Members that fetch weights: those that do not serve yet, and those that are to move.
#[derive(Debug, Default)]
pub(super) struct Newcomers {
    waiting: BTreeMap<Member, Newcomer>,
    /// Those whose turn has yet to come, in order.
    queued: VecDeque<Member>,
}

/// What a newcomer begins from.
#[derive(Debug, Clone, Copy)]
struct Newcomer {
    version: Step,
    told: bool,
    /// The membership in which it began to wait.
    view: u64,
    /// When that was.
    since: Moment,
}

impl Newcomers {
    pub(super) fn forget(&mut self, member: Member) {
        self.waiting.remove(&member);
        self.queued.retain(|other| *other != member);
    }

    pub(super) fn forget_all(&mut self) {
        self.waiting.clear();
        self.queued.clear();
    }

    /// Whether a member has yet to be told what to begin from, and hears no rounds until then.
    pub(super) fn is_queued(&self, member: Member) -> bool {
        self.queued.contains(&member)
    }

    /// Whether somebody begins from this version.
    pub(super) fn need(&self, version: Step) -> bool {
        self.waiting.values().any(|newcomer| newcomer.version == version)
    }
}

impl Coordinator {
    /// The first version that somebody who begins to listen now can begin from: it hears the rounds
    /// that are closed from here on.
    fn first_heard(&self) -> Step {
        let closed = matches!(self.phase, Phase::Closing | Phase::Committing);
        if closed || !self.rounds.is_empty() { self.version.next() } else { self.version }
    }

    /// A newcomer is in the log: it begins to listen, and hears what to begin from.
    pub(super) fn receive_newcomer(&mut self, member: Member, out: &mut Out) {
        let Some(span) = self.membership.span_of(member) else { return };
        let version = self.first_heard();
        send(member, FromCoordinator::Admitted { era: self.era, span, version }, out);
        self.begin_from(member, version, out);
    }

    /// What a newcomer was to begin from is gone, or it could not keep up: it begins anew.
    pub(super) fn begin_again(&mut self, member: Member, out: &mut Out) {
        let version = self.first_heard();
        self.begin_from(member, version, out);
    }

    /// The stages whose weights a member fetches.
    fn fetched_by(&self, member: Member) -> Option<StageSpan> {
        let moves = self.membership.fetches(member).map(StageSpan::one);
        moves.or_else(|| self.membership.span_of(member))
    }

    fn begin_from(&mut self, member: Member, version: Step, out: &mut Out) {
        let Some(span) = self.fetched_by(member) else { return };
        let has_turn = self.newcomers.waiting.contains_key(&member) || self.has_room_for(span);
        if version.0 > 0 && !has_turn {
            if !self.newcomers.is_queued(member) {
                self.newcomers.queued.push_back(member);
            }
            return;
        }
        let (view, since) = (self.logged_view.number, self.now);
        self.newcomers.waiting.insert(member, Newcomer { version, told: false, view, since });
        if version.0 > 0 {
            for stage in span.stages() {
                self.want_donors(version, stage, out);
            }
        }
        self.drop_unwanted_snapshots();
        self.tell_newcomers(out);
    }

    /// Whether these stages can take in one more at a time. Where nobody serves a stage, all get its weights
    /// from a checkpoint.
    fn has_room_for(&self, span: StageSpan) -> bool {
        span.stages().all(|stage| {
            let replicas = self.replicas_of(stage).len();
            let waiting = self.newcomers.waiting.iter();
            let fetches = |member| self.fetched_by(member).is_some_and(|span| span.contains(stage));
            let taken = waiting.filter(|(member, newcomer)| {
                self.now.since(newcomer.since) < TURN && fetches(**member)
            });
            replicas == 0 || taken.count() < replicas * AT_A_TIME
        })
    }

    /// Has those begin whose turn it is.
    pub(super) fn take_turns(&mut self, out: &mut Out) {
        for member in std::mem::take(&mut self.newcomers.queued) {
            self.begin_again(member, out);
        }
    }

    /// Tells newcomers of the snapshots that are whole.
    pub(super) fn tell_newcomers(&mut self, out: &mut Out) {
        let untold: Vec<(Member, Step)> = self
            .newcomers
            .waiting
            .iter()
            .filter(|(_, newcomer)| !newcomer.told)
            .map(|(member, newcomer)| (*member, newcomer.version))
            .collect();
        for (member, version) in untold {
            let Some(parts) = self.snapshot_for(member, version) else { continue };
            self.newcomers.waiting.entry(member).and_modify(|newcomer| newcomer.told = true);
            send(member, FromCoordinator::Snapshot { version, parts }, out);
        }
    }

    /// Where a member's stages are stored at a version; none while one is not. The initial weights
    /// are stored nowhere.
    fn snapshot_for(&self, member: Member, version: Step) -> Option<Vec<SnapshotPart>> {
        let span = self.fetched_by(member)?;
        if version.0 == 0 {
            return Some(Vec::new());
        }
        span.stages()
            .map(|stage| {
                if let Some(part) = self.archived(version, stage) {
                    return Some(part);
                }
                let stored = self.snapshots.settled(version, stage)?;
                Some(SnapshotPart { stage, stored })
            })
            .collect()
    }

    /// A newcomer holds its weights. It serves if they are the present ones; if not it will say so
    /// again.
    pub(super) fn ready(&mut self, from: Member, version: Step, view: u64, out: &mut Out) {
        let settled = !matches!(self.phase, Phase::Committing);
        let known = self.newcomers.waiting.get(&from);
        if known.is_none_or(|newcomer| view < newcomer.view) || !settled || version != self.version
        {
            return;
        }
        let since = known.map_or(self.now, |newcomer| newcomer.since);
        if self.membership.is_serving(from) {
            self.change_over(from, out);
        } else if self.membership.serves(from) {
            self.newcomers.forget(from);
            self.balance.fetched(self.now.since(since));
            self.drop_unwanted_snapshots();
            self.view_changed(out);
        }
    }

    /// A member lacks what it needs to follow.
    pub(super) fn behind(&mut self, from: Member, there: bool, out: &mut Out) {
        let moves = self.membership.is_serving(from);
        if self.newcomers.is_queued(from) {
            return;
        }
        if self.newcomers.waiting.contains_key(&from) && moves == there {
            self.begin_again(from, out);
            self.ask_holders_again(from, out);
        } else {
            self.lost(from, "it lacks a result", out);
        }
    }

    /// The writers of these are gone: what can be written again is, and who waited for the rest
    /// begins anew.
    pub(super) fn rewrite_snapshots(&mut self, lost: &[(Step, Stage)], out: &mut Out) {
        for (version, stage) in lost {
            if self.checkpoints.needs(*version) {
                self.checkpoint_spoiled(*version, out);
            }
            let waiting = self.newcomers.waiting.iter();
            let begun: Vec<Member> = waiting
                .filter(|(_, newcomer)| newcomer.version == *version)
                .map(|(member, _)| *member)
                .filter(|member| self.fetched_by(*member).is_some_and(|span| span.contains(*stage)))
                .collect();
            for member in begun {
                self.begin_again(member, out);
            }
        }
    }

    pub(super) fn drop_unwanted_snapshots(&mut self) {
        let Self { snapshots, checkpoints, newcomers, .. } = self;
        snapshots.keep(|version| checkpoints.needs(version) || newcomers.need(version));
    }
}
