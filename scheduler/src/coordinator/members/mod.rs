//! The members of the run: the membership as decided, and as logged.
//!
//! Registrations are in `registration`, changes of stage in `migration`, who stays away for a while in `absence`.

mod absence;
pub(crate) mod membership;
mod migration;
mod registration;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Era, Member, PeerId, Stage, StageSpan, Step};
use shoal_protocol::message::{
    FromCoordinator, LinkEstimate, LogRecord, MemberRecord, Move, View, ViewChange,
};
use shoal_protocol::stays::Stays;
use shoal_protocol::units::Moment;

use self::absence::Absences;
pub(super) use self::registration::{Registration, Terms, refuse};
use super::{Out, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent, LossCause, MoveObstacle};
use crate::coordinator::members::membership::Membership;
use crate::coordinator::placing::anchors;
use crate::coordinator::placing::locality::LinkEstimates;
use crate::paging;

/// Reports that the last replica of a stage is unreachable, after which the reporter is expelled. If the
/// replica is dead, its broken connection shows that earlier.
const COMPLAINTS: u32 = 3;

/// The members of the run.
#[derive(Debug)]
pub(super) struct Members {
    /// The membership as decided. It may be ahead of the log.
    pub(super) current: Membership,
    /// The membership that the log holds, and that members know.
    pub(super) logged: View,
    /// Whether a change is being appended to the log.
    pending: bool,
    /// Whether another change must follow it.
    outdated: bool,
    /// The peers that were last asked to keep the log.
    anchors: BTreeSet<PeerId>,
    /// Reports by one member that it cannot reach the last replica of a stage.
    complaints: BTreeMap<(Member, Member), u32>,
    /// What members measured of their links.
    pub(super) links: LinkEstimates,
    /// Peers that may not come back yet.
    absences: Absences,
    /// Since when peers take part, and who may not any more.
    pub(super) stays: Stays,
}

/// What a logged change of the membership brings.
#[derive(Debug)]
pub(super) struct LoggedChange {
    /// All members that are still current.
    pub(super) present: Vec<Member>,
    /// Members that the log did not list before.
    pub(super) new: BTreeSet<Member>,
    /// Members whose migration begins.
    pub(super) movers: BTreeSet<Member>,
    /// Members that the log does not list any more.
    pub(super) gone: Vec<Member>,
}

impl Members {
    pub(super) fn new(
        current: Membership,
        logged: View,
        anchors: BTreeSet<PeerId>,
        stays: Stays,
    ) -> Self {
        Self {
            current,
            logged,
            pending: false,
            outdated: false,
            anchors,
            complaints: BTreeMap::new(),
            links: LinkEstimates::default(),
            absences: Absences::default(),
            stays,
        }
    }

    /// Appends the changed membership to the log. While one change is being appended the next one waits, so
    /// that a crowd of newcomers makes few records.
    pub(super) fn append_change(&mut self, out: &mut Out) {
        if self.pending {
            self.outdated = true;
        } else {
            self.pending = true;
            let change = self.current.next_change();
            self.outdated = self.current.has_unlogged_changes();
            out.push(CoordinatorAction::Append(LogRecord::View(change)));
        }
    }

    /// Whether a change is being appended to the log.
    pub(super) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Appends changes that the log does not have, such as members that have changed over.
    pub(super) fn append_unlogged(&mut self, out: &mut Out) {
        if self.current.has_unlogged_changes() {
            self.append_change(out);
        }
    }

    /// Appends a change that waited for the previous one.
    pub(super) fn append_outdated(&mut self, out: &mut Out) {
        if std::mem::take(&mut self.outdated) {
            self.append_change(out);
        }
    }

    /// A change of the membership is in the log. `is_fetching` is whether a member already waits for weights.
    pub(super) fn apply_logged(
        &mut self,
        change: &ViewChange,
        is_fetching: impl Fn(Member) -> bool,
    ) -> LoggedChange {
        let (mut new, mut movers) = (BTreeSet::new(), BTreeSet::new());
        for record in &change.here {
            self.stays.list(record.member.peer, self.current.version());
            let known = self.logged.record(record.member);
            new.extend(known.is_none().then_some(record.member));
            // The log may list a migration that is over.
            let moves = record.moves.is_some_and(|moves| moves.at.is_none());
            movers.extend((moves && !is_fetching(record.member)).then_some(record.member));
        }
        let gone = self.logged.take(change).expect("the log keeps its order");
        self.pending = false;
        let members = self.logged.members.iter().map(|record| record.member);
        let present = members.filter(|member| self.current.contains(*member)).collect();
        LoggedChange { present, new, movers, gone }
    }

    /// The run has reached a version, or gone back to one. Returns the members that begin to swap their stages or have
    /// ended that.
    pub(super) fn set_position(&mut self, era: Era, version: Step) -> Vec<Member> {
        self.current.set_position(era, version)
    }

    /// A newcomer has its weights and serves. Returns whether that is new.
    pub(super) fn begin_serving(&mut self, member: Member) -> bool {
        self.current.begin_serving(member)
    }

    /// A peer measured its links.
    pub(super) fn measure_links(&mut self, from: PeerId, links: &[(PeerId, LinkEstimate)]) {
        self.links.note(from, links);
    }

    /// Sends a member the whole logged membership.
    pub(super) fn send_all(&self, to: Member, out: &mut Out) {
        let number = self.logged.number;
        for (part, members) in paging::cut(&self.logged.members) {
            send(to, FromCoordinator::Members { number, part, members }, out);
        }
    }

    /// Sends a message to all members.
    pub(super) fn broadcast(&self, message: &FromCoordinator, out: &mut Out) {
        for member in self.current.members() {
            send(member, message.clone(), out);
        }
    }

    /// Changes the anchors if members came or went that can be anchors.
    pub(super) fn choose_anchors(&mut self, out: &mut Out) {
        let able = self.current.with_duty(|duties| duties.anchor);
        let able: BTreeSet<PeerId> = able.map(|member| member.peer).collect();
        let desired = anchors::desired(&self.anchors, &able);
        if desired != self.anchors {
            self.anchors.clone_from(&desired);
            out.push(CoordinatorAction::Anchors(desired));
        }
    }

    /// Removes a member; it is expelled as soon as the log has that. Returns the stages that lose a replica
    /// which was not known to be leaving.
    pub(super) fn remove(
        &mut self,
        member: Member,
        how: LossCause,
        (now, retry): (Moment, Duration),
        out: &mut Out,
    ) -> Option<StageSpan> {
        let span = self.current.span_of(member)?;
        event(CoordinatorEvent::Lost { member, span, how }, out);
        let mut reason = how.words().to_owned();
        if how.is_its_fault() {
            let lasts = self.absences.begin(member.peer, now, retry);
            reason.push_str(&format!("; it may come back in {lasts:?}"));
        }
        send(member, FromCoordinator::Expelled { reason }, out);
        let record = self.current.expel(member);
        let lost = record.and_then(|record| self.forget(&record, out));
        self.append_change(out);
        lost
    }

    /// Forgets the data that depends on a removed member. Returns the stages that lose a replica which was not known to
    /// be leaving.
    fn forget(&mut self, gone: &MemberRecord, out: &mut Out) -> Option<StageSpan> {
        let drained = self.current.end_drain(gone.member);
        self.links.forget(gone.member.peer);
        if let Some(moves) = gone.moves.filter(|moves| moves.at.is_none()) {
            migration_cancelled(gone.member, moves, MoveObstacle::Gone, out);
        }
        (!drained).then(|| gone.destination())
    }

    /// The log does not list a member any more.
    pub(super) fn forget_complaints(&mut self, gone: Member) {
        self.complaints.retain(|(from, about), _| *from != gone && *about != gone);
    }

    /// Whether the log lists a member that was removed: its claims are about to be revoked.
    pub(super) fn is_expelling(&self) -> bool {
        let mut logged = self.logged.members.iter();
        logged.any(|record| !self.current.contains(record.member))
    }

    /// Whether a member may be expelled because others do not reach it. The last replica of a stage may not,
    /// nor may `home`, the coordinator's own peer: its process would have failed with the coordinator.
    pub(super) fn is_expendable(&self, member: Member, home: Member) -> bool {
        let span = self.current.span_of(member);
        let replicated = |stage: Stage| self.current.replicas(stage).count() > 1;
        member != home && span.is_some_and(|span| span.stages().all(replicated))
    }

    /// Two members cannot reach each other: returns the one to expel, with the cause. One word is not enough: that is the
    /// member reported on if it is expendable and a second member that hosts a stage does not reach it either, or the
    /// coordinator's own peer does not; after several reports of one alone, that one, or the other if this is the last
    /// of its stage.
    pub(super) fn choose_unreachable(
        &mut self,
        from: Member,
        about: Member,
        home: Member,
    ) -> Option<(Member, LossCause)> {
        if !self.current.contains(about) {
            return None;
        }
        let hosts = |member| self.current.span_of(member).is_some_and(|span| !span.is_empty());
        if from != home && !hosts(from) {
            return None;
        }
        let count = self.complaints.entry((from, about)).or_insert(0);
        *count += 1;
        let insists = *count >= COMPLAINTS;
        let witnesses = self.complaints.keys().filter(|(_, of)| *of == about).count();
        let needed = insists && !self.is_expendable(from, home);
        if self.is_expendable(about, home) && (from == home || witnesses > 1 || needed) {
            return Some((about, LossCause::Unreachable));
        }
        (insists && from != home).then_some((from, LossCause::CannotReach))
    }

    /// The replicas of a stage in a step, those that the log lists as serving.
    pub(super) fn replicas_at(&self, stage: Stage, step: Step) -> Vec<Member> {
        self.logged_where(true, |member| self.current.hosts(member, stage, step))
    }

    /// The replicas of a stage that are not about to leave it.
    pub(super) fn staying_replicas(&self, stage: Stage) -> Vec<Member> {
        let staying: BTreeSet<Member> = self.current.staying(stage).collect();
        self.logged_where(true, |member| staying.contains(&member))
    }

    /// The members that will host a stage and receive the results of a step's rounds: newcomers, then members
    /// that migrate, without those whose turn to fetch has yet to come. A newcomer that is ready listens until
    /// the log lists it as serving: rounds before that do not include it, and it must miss none.
    pub(super) fn listeners_at(
        &self,
        stage: Stage,
        step: Step,
        is_queued: impl Fn(Member) -> bool,
    ) -> Vec<Member> {
        let listens = |member| !is_queued(member);
        let comes = |member| self.current.span_of(member).is_some_and(|it| it.contains(stage));
        let moves = |member| self.current.listens(member, stage, step);
        let newcomers = self.logged_where(false, |member| comes(member) && listens(member));
        let movers = self.logged_where(true, |member| moves(member) && listens(member));
        newcomers.into_iter().chain(movers).collect()
    }

    /// The members that the log lists, serving or not, for which a condition holds.
    pub(super) fn logged_where(
        &self,
        serving: bool,
        is_so: impl Fn(Member) -> bool,
    ) -> Vec<Member> {
        let logged = self.logged.members.iter().filter(|record| record.serving == serving);
        logged.map(|record| record.member).filter(|member| is_so(*member)).collect()
    }
}

fn migration_cancelled(member: Member, moves: Move, obstacle: MoveObstacle, out: &mut Out) {
    let Move { to, reason, .. } = moves;
    event(CoordinatorEvent::MoveCancelled { member, to, reason, obstacle }, out);
}
