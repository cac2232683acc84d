//! Newcomers while training runs: a snapshot to begin from, the results since, then serving. Who
//! moves to another stage is a newcomer there.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan, Step};
use shoal_protocol::message::{FromCoordinator, SnapshotPart};
use shoal_protocol::units::Moment;

use super::queue::Queue;
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
    /// Those whose turn has yet to come.
    pub(super) queued: Queue,
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

/// How many more each stage can take in at a time; any number where nobody serves it, since all get its weights
/// from a checkpoint then.
struct Rooms(BTreeMap<Stage, usize>);

impl Rooms {
    fn have_one_for(&self, span: StageSpan) -> bool {
        span.stages().all(|stage| self.0.get(&stage).is_none_or(|room| *room > 0))
    }

    fn take(&mut self, span: StageSpan) {
        for stage in span.stages() {
            self.0.entry(stage).and_modify(|room| *room = room.saturating_sub(1));
        }
    }
}

impl Newcomers {
    pub(super) fn forget(&mut self, member: Member) {
        self.waiting.remove(&member);
        self.queued.remove(member);
    }

    pub(super) fn forget_all(&mut self) {
        *self = Self::default();
    }

    /// Whether a member has yet to be told what to begin from, and hears no rounds until then.
    pub(super) fn is_queued(&self, member: Member) -> bool {
        self.queued.contains(member)
    }

    /// Whether a member fetches weights, or waits for its turn to.
    pub(super) fn has_begun(&self, member: Member) -> bool {
        self.waiting.contains_key(&member) || self.is_queued(member)
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

    /// A newcomer is in the log: it hears from where on it listens.
    pub(super) fn greet_newcomer(&self, member: Member, out: &mut Out) {
        let Some(span) = self.membership.span_of(member) else { return };
        let version = self.first_heard();
        send(member, FromCoordinator::Admitted { era: self.era, span, version }, out);
    }

    /// What a newcomer was to begin from is gone, or it could not keep up: it begins anew.
    pub(super) fn begin_again(&mut self, member: Member, out: &mut Out) {
        self.begin_each([member], out);
    }

    /// The stages whose weights a member fetches.
    fn fetched_by(&self, member: Member) -> Option<StageSpan> {
        let moves = self.membership.fetches(member).map(StageSpan::one);
        moves.or_else(|| self.membership.span_of(member))
    }

    /// Has members begin in this order, those whose stages have room for one more; the others wait for their
    /// turn.
    pub(super) fn begin_each(&mut self, members: impl IntoIterator<Item = Member>, out: &mut Out) {
        let version = self.first_heard();
        let (view, since) = (self.logged_view.number, self.now);
        let mut rooms = None;
        let mut begun = false;
        for member in members {
            let Some(span) = self.fetched_by(member) else { continue };
            if version.0 > 0 {
                let rooms = rooms.get_or_insert_with(|| self.rooms());
                let known = self.newcomers.waiting.get(&member);
                if known.is_none() && !rooms.have_one_for(span) {
                    self.newcomers.queued.push(member);
                    continue;
                }
                if known.is_none_or(|newcomer| self.has_had_its_turn(newcomer)) {
                    rooms.take(span);
                }
                for stage in span.stages() {
                    self.want_donors(version, stage, out);
                }
            }
            self.newcomers.waiting.insert(member, Newcomer { version, told: false, view, since });
            begun = true;
        }
        if begun {
            self.drop_unwanted_snapshots();
            self.tell_newcomers(out);
        }
    }

    fn has_had_its_turn(&self, newcomer: &Newcomer) -> bool {
        self.now.since(newcomer.since) >= TURN
    }

    /// How many more each stage can take in at a time.
    fn rooms(&self) -> Rooms {
        let mut replicas: BTreeMap<Stage, usize> = BTreeMap::new();
        for record in self.logged_view.members.iter().filter(|record| record.serving) {
            let known = self.membership.record(record.member);
            if let Some(known) = known.filter(|known| known.serving && !known.leaves()) {
                for stage in known.span.stages() {
                    *replicas.entry(stage).or_insert(0) += AT_A_TIME;
                }
            }
        }
        let mut rooms = Rooms(replicas);
        for (member, newcomer) in &self.newcomers.waiting {
            if let Some(span) = self.fetched_by(*member)
                && !self.has_had_its_turn(newcomer)
            {
                rooms.take(span);
            }
        }
        rooms
    }

    /// Has those begin whose turn it is.
    pub(super) fn take_turns(&mut self, out: &mut Out) {
        if !self.newcomers.queued.is_empty() {
            let queued = std::mem::take(&mut self.newcomers.queued);
            self.begin_each(queued.into_members(), out);
        }
    }

    /// A member has what it fetched.
    pub(super) fn fetched(&mut self, member: Member) {
        if let Some(newcomer) = self.newcomers.waiting.get(&member) {
            self.balance.fetched(self.now.since(newcomer.since));
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
        if self.membership.is_serving(from) {
            self.change_over(from, out);
        } else if self.membership.serves(from) {
            self.fetched(from);
            self.newcomers.forget(from);
            self.drop_unwanted_snapshots();
            self.view_changed(out);
        }
    }

    /// A member lacks what it needs to follow.
    pub(super) fn behind(&mut self, from: Member, there: bool, out: &mut Out) {
        // Of who serves, what it is to serve later; what is its own it cannot lack and stay.
        let of_wait = self.membership.is_serving(from) == there;
        if of_wait && self.newcomers.is_queued(from) {
            return;
        }
        if of_wait && self.newcomers.waiting.contains_key(&from) {
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
