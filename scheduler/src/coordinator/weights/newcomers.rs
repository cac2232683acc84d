//! Newcomers: members that fetch weights, because they do not serve yet or are to migrate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::join_queue::JoinQueue;

/// Newcomers that a stage takes in at a time for each of its replicas. Each costs its donors a snapshot, and
/// the results of rounds until it serves. Then it is a replica too, so that the last of a crowd waits for about
/// as many turns as the crowd doubles the stage.
const AT_A_TIME: usize = 1;

/// The time after which a newcomer does not keep others from their turns any more: it may be slow, or gone.
const TURN: Duration = Duration::from_secs(120);

/// Members that fetch weights: those that do not serve yet, and those that are to migrate.
#[derive(Debug, Default)]
pub(in super::super) struct Newcomers {
    fetching: BTreeMap<Member, Newcomer>,
    /// Members whose turn has yet to come.
    queued: JoinQueue,
}

/// The start of a newcomer.
#[derive(Debug, Clone, Copy)]
struct Newcomer {
    version: Step,
    /// Whether the newcomer was sent its snapshot.
    announced: bool,
    /// The membership in which it began to wait.
    view: u64,
    since: Moment,
}

impl Newcomer {
    fn has_had_its_turn(&self, now: Moment) -> bool {
        now.since(self.since) >= TURN
    }
}

/// The number of newcomers that each stage can still take in. A stage without replicas is not limited, because
/// its newcomers fetch from a checkpoint.
#[derive(Debug)]
pub(super) struct Rooms(BTreeMap<Stage, usize>);

impl Rooms {
    fn have_one_for(&self, stages: &BTreeSet<Stage>) -> bool {
        stages.iter().all(|stage| self.0.get(stage).is_none_or(|room| *room > 0))
    }

    fn take(&mut self, stages: &BTreeSet<Stage>) {
        for stage in stages {
            self.0.entry(*stage).and_modify(|room| *room = room.saturating_sub(1));
        }
    }
}

/// The stages whose weights a member fetches.
pub(super) fn fetched_stages(context: &Context, member: Member) -> Option<BTreeSet<Stage>> {
    let record = context.members.current.record(member)?;
    let migrates = context.members.current.migration_of(member).is_some();
    Some(if migrates { record.fetched_stages().collect() } else { record.span.stages().collect() })
}

impl Newcomers {
    pub(in super::super) fn forget(&mut self, member: Member) {
        self.fetching.remove(&member);
        self.queued.remove(member);
    }

    pub(super) fn forget_all(&mut self) {
        *self = Self::default();
    }

    /// Whether a member waits for its turn. Until then it receives no results of rounds.
    pub(in super::super) fn is_queued(&self, member: Member) -> bool {
        self.queued.contains(member)
    }

    /// Whether a member fetches weights, or waits for its turn.
    pub(in super::super) fn contains(&self, member: Member) -> bool {
        self.is_fetching(member) || self.is_queued(member)
    }

    /// Whether a member fetches weights.
    pub(in super::super) fn is_fetching(&self, member: Member) -> bool {
        self.fetching.contains_key(&member)
    }

    /// Whether a report of readiness in a membership is valid. A report about an earlier start is not.
    pub(in super::super) fn may_be_ready(&self, member: Member, view: u64) -> bool {
        self.fetching.get(&member).is_some_and(|newcomer| view >= newcomer.view)
    }

    /// The time for which a newcomer has been fetching.
    pub(in super::super) fn fetch_time(&self, member: Member, now: Moment) -> Option<Duration> {
        self.fetching.get(&member).map(|newcomer| now.since(newcomer.since))
    }

    /// Whether a newcomer starts from this version.
    pub(super) fn need(&self, version: Step) -> bool {
        self.fetching.values().any(|newcomer| newcomer.version == version)
    }

    /// The newcomers that start from this version.
    pub(super) fn starting_from(&self, version: Step) -> Vec<Member> {
        let all = self.fetching.iter().filter(|(_, newcomer)| newcomer.version == version);
        all.map(|(member, _)| *member).collect()
    }

    /// The number of newcomers that each stage can still take in.
    pub(super) fn rooms(&self, context: &Context) -> Rooms {
        let members = &context.members;
        let mut replicas: BTreeMap<Stage, usize> = BTreeMap::new();
        for record in members.logged.members.iter().filter(|record| record.serving) {
            let known = members.current.record(record.member);
            if let Some(known) = known.filter(|known| known.serving) {
                for stage in known.span.stages().filter(|stage| !known.leaves(*stage)) {
                    *replicas.entry(stage).or_insert(0) += AT_A_TIME;
                }
            }
        }
        let mut rooms = Rooms(replicas);
        for (member, newcomer) in &self.fetching {
            if let Some(stages) = fetched_stages(context, *member)
                && !newcomer.has_had_its_turn(context.now)
            {
                rooms.take(&stages);
            }
        }
        rooms
    }

    /// Takes a room for a member, or appends the member to the queue. Returns whether it is its turn.
    pub(super) fn take_room(
        &mut self,
        member: Member,
        stages: &BTreeSet<Stage>,
        rooms: &mut Rooms,
        now: Moment,
    ) -> bool {
        let known = self.fetching.get(&member);
        if known.is_none() && !rooms.have_one_for(stages) {
            self.queued.push(member);
            return false;
        }
        if known.is_none_or(|newcomer| newcomer.has_had_its_turn(now)) {
            rooms.take(stages);
        }
        true
    }

    /// A member starts from a version.
    pub(super) fn start(&mut self, context: &Context, member: Member, version: Step) {
        let (view, since) = (context.members.logged.number, context.now);
        self.fetching.insert(member, Newcomer { version, announced: false, view, since });
    }

    /// Takes all members out of the queue.
    pub(super) fn take_queued(&mut self) -> Option<impl Iterator<Item = Member> + use<>> {
        (!self.queued.is_empty()).then(|| std::mem::take(&mut self.queued).into_members())
    }

    /// The newcomers without a snapshot so far, their versions, and the memberships in which they began to wait.
    pub(super) fn unannounced(&self) -> Vec<(Member, Step, u64)> {
        let all = self.fetching.iter().filter(|(_, newcomer)| !newcomer.announced);
        all.map(|(member, newcomer)| (*member, newcomer.version, newcomer.view)).collect()
    }

    /// A newcomer was sent its snapshot.
    pub(super) fn set_announced(&mut self, member: Member) {
        self.fetching.entry(member).and_modify(|newcomer| newcomer.announced = true);
    }

    /// Puts a member into the queue.
    #[cfg(test)]
    pub(in super::super) fn queue(&mut self, member: Member) {
        self.queued.push(member);
    }
}
