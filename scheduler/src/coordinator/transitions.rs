//! Changes of the membership, and the transitions of the run that follow from them: members that are admitted,
//! start to serve, change their stage or are expelled; the beginning of a term and of an era.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Era, Member, Stage, StageSpan, Step};
use shoal_protocol::message::{
    Candidate, FromCoordinator, HeldClaim, LogRecord, MemberRecord, ViewChange, is_stopped,
};

use super::census::Census;
use super::config::CoordinatorConfig;
use super::context::Context;
use super::lost_stage::{Found, Search};
use super::members::{LoggedChange, Registration, Terms, refuse};
use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent, LossCause};

/// Membership.
impl Coordinator {
    /// A peer registers.
    pub(super) fn register(&mut self, from: Member, candidate: Candidate, out: &mut Out) {
        let over = match &self.context.progress.phase {
            Phase::Stopped { reason } => Some(format!("the run has stopped: {reason}")),
            Phase::Finished => Some("the run is over".to_owned()),
            _ => None,
        };
        if let Some(reason) = over.filter(|_| !self.is_member(from)) {
            return refuse(from, reason, out);
        }
        #[cfg(test)]
        if self.omit == Some(crate::sim::Omit::Lives) {
            self.context.members.current.forget_expelled(from.peer);
        }
        // Before the first step all newcomers have the weights: the initial ones.
        let gathering = matches!(self.context.progress.phase, Phase::Gathering);
        let serving = gathering && self.context.progress.is_before_first_step();
        let estimates = self.work.estimates(&self.context);
        let CoordinatorConfig { load, wait_for, .. } = &self.context.config;
        let (now, wait_for) = (self.context.now, *wait_for);
        let terms = Terms { now, serving, estimates: &estimates, load, wait_for };
        match self.context.members.register(from, candidate, &terms, out) {
            Registration::Rejected => {}
            Registration::Repeated if self.context.members.logged.lists(from) => {
                self.context.members.send_all(from, out);
                self.context.send_admission(from, self.listens_from(), out);
                if !self.context.members.current.is_serving(from) {
                    self.start_fetching([from], out);
                }
            }
            Registration::Repeated => {}
            Registration::Admitted { lost, span } => {
                self.stages_lost(lost);
                self.balance.joined(span, self.context.now);
            }
        }
    }

    /// Removes a member; it is expelled as soon as the log has that.
    pub(super) fn member_lost(&mut self, member: Member, how: LossCause, out: &mut Out) {
        if !self.context.progress.is_over() {
            let Context { members, now, config, .. } = &mut self.context;
            let lost = members.remove(member, how, (*now, config.retry), out);
            self.stages_lost(lost);
        }
    }

    fn stages_lost(&mut self, lost: Option<StageSpan>) {
        if let Some(stages) = lost {
            self.balance.lost(stages, self.context.now);
        }
    }

    /// A member cannot reach another: one of them is removed.
    pub(super) fn unreachable(&mut self, from: Member, about: Member, out: &mut Out) {
        let home = self.context.config.home;
        let chosen = self.context.members.choose_unreachable(from, about, home);
        #[cfg(test)]
        let chosen = chosen.or_else(|| {
            let omitted = self.omit == Some(crate::sim::Omit::Witnesses);
            let believed = omitted && self.context.members.is_expendable(about, home);
            believed.then_some((about, LossCause::Unreachable))
        });
        if let Some((member, how)) = chosen {
            self.member_lost(member, how, out);
        }
    }

    /// A member is about to leave.
    pub(super) fn draining(&mut self, member: Member, out: &mut Out) {
        let Some(drain) = self.context.members.begin_drain(member, out) else { return };
        self.balance.lost(drain.stages, self.context.now);
        if drain.cancelled {
            self.weights.stop_fetching(member);
        }
        let current = &self.context.members.current;
        let is_left = |stage| current.staying(stage).all(|host| current.is_draining(host));
        let saves = self.context.config.manifest.checkpoint.interval > 0;
        let is_only_anchor = current.with_duty(|duties| duties.anchor).eq([member]);
        let is_lost = is_only_anchor || drain.stages.stages().any(is_left);
        if saves && !self.context.progress.is_suspended() && is_lost {
            self.weights.save_before_leave(&self.context, member, out);
        }
    }

    /// A change of the membership is in the log.
    pub(super) fn view_logged(&mut self, change: ViewChange, out: &mut Out) {
        let Self { context, weights, .. } = self;
        let is_fetching = |member| weights.newcomers().contains(member);
        let logged = context.members.apply_logged(&change, is_fetching);
        let LoggedChange { present, new, movers, gone } = logged;
        for member in present {
            if new.contains(&member) {
                self.context.members.send_all(member, out);
                self.context.send_admission(member, self.listens_from(), out);
            } else {
                send(member, FromCoordinator::View(change.clone()), out);
            }
        }
        let current = &self.context.members.current;
        let is_newcomer =
            |member: &Member| current.contains(*member) && !current.is_serving(*member);
        let newcomers: Vec<Member> = new.into_iter().filter(is_newcomer).collect();
        let migrates = |member: &Member| current.migration_of(*member).is_some();
        let movers: Vec<Member> = movers.into_iter().filter(migrates).collect();
        self.start_fetching(newcomers, out);
        // Only after the change that lists the migration, since this may send the snapshot at once.
        self.start_fetching(movers, out);
        self.context.members.choose_anchors(out);
        self.work.update_hosts(&self.context);
        self.expelled(&gone, out);
        self.weights.take_turns(&self.context, self.listens_from(), out);
        self.end_census_when_complete(out);
        self.continue_search(out);
        self.search_again(out);
        self.weights.ask_for_copies(&self.context, out);
        self.context.members.append_outdated(out);
        self.rewind_when_placed(out);
        self.open_when_gathered(out);
        self.work.grant(&self.context, out);
        self.work.replay(&self.context, out);
        self.close_when_complete(out);
    }

    /// Revokes the claims and files of members that the log does not list any more.
    fn expelled(&mut self, gone: &[Member], out: &mut Out) {
        let committing = matches!(self.context.progress.phase, Phase::Committing);
        let committing = committing.then_some(self.context.progress.version);
        let mut lost = Vec::new();
        for member in gone {
            #[cfg(test)]
            if self.omit == Some(crate::sim::Omit::Revocation) {
                continue;
            }
            let revoked = self.work.expel(*member, committing);
            event(CoordinatorEvent::Revoked { member: *member, claims: revoked.claims }, out);
            self.context.members.forget_complaints(*member);
            lost.extend(self.weights.forget_member(&self.context, *member, out));
            #[cfg(test)]
            if self.omit == Some(crate::sim::Omit::Abort) {
                continue;
            }
            self.tear_rounds(*member);
        }
        if !gone.is_empty() && self.is_stage_lost() {
            return self.begin_search(out);
        }
        self.weights.replace_lost(&self.context, &lost, self.listens_from(), out);
        self.judge_snapshots(out);
        self.end_when_saved(out);
    }

    /// A member lacks the membership that the present one was made of. In a census it is asked again which
    /// claims it holds.
    pub(super) fn send_view(&self, from: Member, out: &mut Out) {
        self.context.members.send_all(from, out);
        if matches!(self.context.progress.phase, Phase::Census(_)) {
            self.context.send_census(from, out);
        }
    }

    /// The first version that a member which begins to listen can start from: it receives the rounds that
    /// close from here on.
    pub(super) fn listens_from(&self) -> Step {
        let version = self.context.progress.version;
        let closed = self.context.progress.is_closed() || !self.rounds.is_empty();
        if closed { version.next() } else { version }
    }

    fn start_fetching(&mut self, members: impl IntoIterator<Item = Member>, out: &mut Out) {
        self.weights.start_fetching(&self.context, members, self.listens_from(), out);
    }

    /// A newcomer has the weights of a version. It serves, or changes over, if that is the present version;
    /// otherwise it reports again.
    pub(super) fn ready(&mut self, from: Member, version: Step, view: u64, out: &mut Out) {
        let settled = !matches!(self.context.progress.phase, Phase::Committing);
        let present = version == self.context.progress.version;
        if !settled || !present || !self.weights.newcomers().may_be_ready(from, view) {
            return;
        }
        if self.context.members.current.is_serving(from) {
            self.change_over(from, out);
        } else if self.context.members.begin_serving(from) {
            self.end_fetching(from);
            self.context.members.append_change(out);
        }
    }

    /// A member has the weights of the stages that it migrates to.
    fn change_over(&mut self, member: Member, out: &mut Out) {
        // The change must be in the log before the step that it is about is committed.
        let open = matches!(self.context.progress.phase, Phase::Open | Phase::Closing);
        let members = &self.context.members;
        if members.is_pending() || !open || members.current.migration_of(member).is_none() {
            return;
        }
        self.end_fetching(member);
        let leaves = self.context.members.current.record(member).map(MemberRecord::left_stages);
        let leaves: BTreeSet<Stage> = leaves.into_iter().flatten().collect();
        let at = self.work.first_uncounted(member, &leaves, self.context.progress.version);
        let changes = self.context.members.end_migration(member, at, out);
        if changes && leaves.contains(&Stage(0)) {
            self.work.forget_requests_from(member, at);
        }
    }

    fn end_fetching(&mut self, member: Member) {
        if let Some(took) = self.weights.end_fetching(member, self.context.now) {
            self.balance.fetched(took);
        }
    }

    /// A member lacks a result that it needs: at its next stage if `there` is set, where it starts again. At the
    /// stage that it serves it cannot stay.
    pub(super) fn stale(&mut self, from: Member, there: bool, out: &mut Out) {
        let as_newcomer = self.context.members.current.is_serving(from) == there;
        if as_newcomer && self.weights.newcomers().is_queued(from) {
            return;
        }
        if as_newcomer && self.weights.newcomers().is_fetching(from) {
            self.start_fetching([from], out);
            let progress = &self.context.progress;
            let span = self.context.members.current.span_of(from);
            if let Some(span) = span.filter(|_| matches!(progress.phase, Phase::Gathering)) {
                let (archive, version) = (self.weights.archive(), progress.version);
                archive.ask_holders(&self.context.members, version, span, out);
            }
        } else {
            self.member_lost(from, LossCause::LacksResult, out);
        }
    }

    /// Compares the stages' throughput when that is due, and has members migrate where it pays.
    pub(super) fn rebalance(&mut self, out: &mut Out) {
        for (member, to, reason) in self.balance.migrations(&self.context, &self.work) {
            self.context.members.begin_migration(member, to, reason, out);
        }
    }
}

/// The beginning of a term.
impl Coordinator {
    /// The term is in the log, and so is all that earlier coordinators decided.
    pub(super) fn begin_census(&mut self, out: &mut Out) {
        let home = self.context.config.home;
        let current = &self.context.members.current;
        if let Some(earlier) = current.member_of(home.peer).filter(|life| *life != home) {
            self.member_lost(earlier, LossCause::ProcessEnded, out);
        }
        let members: Vec<Member> = self.context.members.current.members().collect();
        for member in &members {
            self.context.send_census(*member, out);
        }
        let census = Census::new(members, self.context.retry_at());
        self.context.progress.enter(Phase::Census(census));
        self.end_census_when_complete(out);
    }

    /// Asks members again whose report may be lost.
    pub(super) fn retry_census(&mut self, out: &mut Out) {
        let again = self.context.retry_at();
        let Phase::Census(census) = &mut self.context.progress.phase else { return };
        for member in census.retry(self.context.now, again) {
            self.context.send_census(member, out);
        }
    }

    /// A member reports the claims that it holds.
    pub(super) fn claims_held(
        &mut self,
        from: Member,
        claims: &[HeldClaim],
        (part, last): (u32, bool),
        out: &mut Out,
    ) {
        let Phase::Census(census) = &mut self.context.progress.phase else { return };
        if !census.take(from, part, last) {
            return;
        }
        if part == 0 {
            self.work.forget_claims(from);
        }
        for claim in claims {
            if !self.work.restore(&self.context, from, claim) {
                event(CoordinatorEvent::ClaimRefused { member: from, key: claim.key }, out);
                return self.member_lost(from, LossCause::ImpossibleClaim, out);
            }
        }
        self.end_census_when_complete(out);
    }

    /// The term goes on as soon as all members that could hold claims have reported, or are out of the log.
    fn end_census_when_complete(&mut self, out: &mut Out) {
        let Phase::Census(census) = &self.context.progress.phase else { return };
        #[cfg(test)]
        let omitted = self.omit == Some(crate::sim::Omit::Census);
        #[cfg(not(test))]
        let omitted = false;
        let complete = omitted || census.is_complete(|member| self.is_member(member));
        if !complete || self.context.members.is_expelling() {
            return;
        }
        let claims = self.work.held();
        let term = self.context.progress.term;
        event(CoordinatorEvent::BecameCoordinator { term, claims }, out);
        self.context.progress.gather(claims > 0);
        self.weights.make_up_for_missing(&self.context);
        self.work.update_hosts(&self.context);
        self.work.watch_restored(&self.context);
        self.context.members.broadcast(&FromCoordinator::TakenOver, out);
        self.compare_all_handovers(out);
        let members = &self.context.members;
        // Without a commit in this era, newcomers can fetch the weights that it began with. If no member serves,
        // the earlier coordinator died in a rewind, which members learn of only when it is in the log.
        let committed = self.context.progress.last_commit.is_some();
        if self.context.progress.is_tainted() {
            return self.go_back(out);
        }
        let rewinding = committed || is_stopped(members.current.records());
        if rewinding && !members.current.uncovered().is_empty() {
            return self.begin_search(out);
        }
        let current = &members.current;
        let fetches = |member: &Member| {
            !current.is_serving(*member) || current.migration_of(*member).is_some()
        };
        let newcomers: Vec<Member> = current.members().filter(fetches).collect();
        self.start_fetching(newcomers, out);
        self.open_when_gathered(out);
        self.work.grant(&self.context, out);
        self.close_when_complete(out);
    }

    /// Opens the first step as soon as all members that it waits for are in the log.
    pub(super) fn open_when_gathered(&mut self, out: &mut Out) {
        let gathering = matches!(self.context.progress.phase, Phase::Gathering);
        if !gathering || self.context.members.is_pending() {
            return;
        }
        let current = &self.context.members.current;
        let stages = current.uncovered();
        let first = self.context.progress.is_before_first_step();
        // The run waits for a number of members only once.
        let wanted = if first { self.context.config.wait_for } else { 0 };
        let members = wanted.saturating_sub(current.len());
        // In a new era, other members host the stages without a replica.
        if !first && current.can_cover_more(false) {
            return self.begin_search(out);
        }
        let lacks = members == 0 && current.lacks_hosts();
        let (now, most) = (self.context.now, self.context.config.extend_after);
        let is_late = self.context.progress.wait_for_hosts(now, lacks, most);
        if is_late && current.can_cover_more(true) {
            self.context.progress.extends = true;
            return self.begin_search(out);
        }
        if !stages.is_empty() || members > 0 {
            return self.context.progress.report_waiting(stages, members, out);
        }
        if self.context.is_last_version() {
            self.save_last_version(out);
        } else {
            self.open_step(out);
        }
    }
}

/// The rewind to a checkpoint.
impl Coordinator {
    /// Whether a stage of a run that trains has lost its last replica.
    fn is_stage_lost(&self) -> bool {
        let progress = &self.context.progress;
        let mut stages = self.context.config.manifest.stages();
        (progress.is_training() || matches!(progress.phase, Phase::Saving))
            && stages.any(|stage| self.context.members.staying_replicas(stage).is_empty())
    }

    /// A stage is lost: the run waits until it is known which checkpoint it can rewind to.
    fn begin_search(&mut self, out: &mut Out) {
        let stages = self.context.members.current.uncovered();
        let version = self.weights.archive().newest();
        event(CoordinatorEvent::StageLost { stages, version }, out);
        self.search(version, out);
    }

    /// The run goes back to a checkpoint, since what was computed after it is wrong.
    pub(super) fn go_back(&mut self, out: &mut Out) {
        // Where a rewind is on its way to the log, it is looked at again behind it.
        if !matches!(self.context.progress.phase, Phase::Rewinding { .. }) {
            self.search(self.weights.archive().newest(), out);
        }
    }

    /// Searches for a version to go back to, from this one on.
    fn search(&mut self, version: Step, out: &mut Out) {
        let until = self.context.now + self.context.config.return_trip;
        self.context.progress.enter(Phase::LostStage(Search::new(version, until)));
        self.continue_search(out);
    }

    /// Asks for the stages that the search lacks. Rewinds to the version that is found.
    fn continue_search(&mut self, out: &mut Out) {
        let context = &mut self.context;
        while let Phase::LostStage(search) = &mut context.progress.phase {
            let (config, members, now) = (&context.config, &context.members, context.now);
            match search.advance(config, members, self.weights.archive(), now, out) {
                None => return,
                Some(Found::Older(version)) => {
                    let until = now + config.return_trip;
                    context.progress.enter(Phase::LostStage(Search::new(version, until)));
                }
                Some(Found::Version(version)) => {
                    context.progress.enter(Phase::Rewinding { version, logging: false });
                    context.members.assign_next_era(context.progress.extends, out);
                }
            }
        }
    }

    /// Gives up the version that the search waits for, when its time is over.
    pub(super) fn end_late_search(&mut self, out: &mut Out) {
        if let Phase::LostStage(search) = &self.context.progress.phase
            && self.context.now >= search.until()
        {
            self.continue_search(out);
        }
    }

    /// A member answers whether it has a stage of a checkpoint.
    pub(super) fn copied(
        &mut self,
        from: Member,
        (version, stage, whole): (Step, Stage, bool),
        out: &mut Out,
    ) {
        if self.weights.copied(&self.context, from, (version, stage, whole), out) {
            return;
        }
        self.weights.set_holder(from, (version, stage, whole));
        let searched = match &mut self.context.progress.phase {
            Phase::LostStage(search) => search.record(from, version, stage, whole),
            _ => false,
        };
        if searched {
            self.continue_search(out);
        } else {
            self.search_again(out);
        }
    }

    /// Searches again if the weights that the era began with are lost, and a stage still lacks them.
    fn search_again(&mut self, out: &mut Out) {
        let progress = &self.context.progress;
        let version = progress.version;
        let initial = self.context.config.manifest.is_initial(version);
        let waits = matches!(progress.phase, Phase::Gathering) && !initial;
        if !waits || progress.last_commit.is_some() {
            return;
        }
        let members = &self.context.members;
        let archive = self.weights.archive();
        let lost = |stage: &Stage| !archive.is_available(members, version, *stage);
        if members.current.uncovered().iter().any(lost) {
            self.begin_search(out);
        }
    }

    /// Appends the rewind to the log once the next era's membership is in it.
    fn rewind_when_placed(&mut self, out: &mut Out) {
        if !self.context.members.is_pending()
            && let Some((era, version)) = self.context.progress.begin_logging_rewind()
        {
            out.push(CoordinatorAction::Append(LogRecord::Rewind { era, version }));
        }
    }

    /// The rewind is in the log: all members start again in the new era.
    pub(super) fn rewound(&mut self, era: Era, version: Step, out: &mut Out) {
        let steps = self.context.progress.rewind(era, version);
        self.context.members.report_era_moves(version, out);
        let others = self.context.members.set_position(era, version);
        self.balance.set_level();
        self.work.rewind();
        self.work.forget_service_times(&others);
        self.rounds.end_step();
        self.weights.rewind(version);
        self.audits.begin_step(self.context.now);
        self.context.members.stays.rewind(version);
        event(CoordinatorEvent::Rewound { era, version, steps }, out);
        let members: Vec<Member> = self.context.members.current.members().collect();
        for member in &members {
            let span = self.context.members.current.span_of(*member).expect("it was just listed");
            send(*member, FromCoordinator::Rewind { era, version, span }, out);
        }
        if self.context.progress.is_tainted() {
            return self.go_back(out);
        }
        self.start_fetching(members, out);
        self.open_when_gathered(out);
    }
}
