//! Newcomers, and the beginning of training.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Era, Member, PeerId, Step};
use shoal_protocol::message::{Candidate, FromCoordinator, LogRecord, MemberRecord, ViewChange};

use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};
use crate::anchors;
use crate::membership::AdmissionError;
use crate::paging;

impl Coordinator {
    pub(super) fn register(&mut self, from: Member, candidate: Candidate, out: &mut Out) {
        let over = match &self.phase {
            Phase::Stopped { reason } => Some(format!("the run has stopped: {reason}")),
            Phase::Finished => Some("the run is over".to_owned()),
            _ => None,
        };
        if let Some(reason) = over.filter(|_| !self.membership.contains(from)) {
            return refuse(from, reason, out);
        }
        #[cfg(test)]
        if self.omit == Some(crate::sim::Omit::Lives) {
            self.membership.forget_expelled(from.peer);
        }
        // Before the first step everybody has the initial weights.
        let serving = matches!(self.phase, Phase::Gathering) && self.is_before_first_step();
        let estimates =
            self.stragglers.service_times.estimates(self.config.manifest.training.stages, self.now);
        match &candidate.link_estimates {
            None if !self.membership.contains(from) => {
                let at = self.membership.landmarks(from.peer, &candidate, &estimates);
                if !at.is_empty() {
                    return send(from, FromCoordinator::ProbeLinks { at }, out);
                }
            }
            None => {}
            Some(link_estimates) => self.link_estimates.note(from.peer, link_estimates),
        }
        let known = (&self.link_estimates, &self.config.load);
        match self.membership.admit(from, candidate, serving, &estimates, known) {
            Err(AdmissionError::Expelled) => {
                let reason = AdmissionError::Expelled.to_string();
                send(from, FromCoordinator::Expelled { reason }, out);
            }
            Err(error) => refuse(from, error.to_string(), out),
            Ok(admission) if admission.again => {
                if self.logged_view.lists(from) {
                    self.send_members(from, out);
                    self.welcome(from, out);
                }
            }
            Ok(admission) => {
                if let Some(record) = admission.replaced {
                    let MemberRecord { member, span, .. } = *record;
                    let how = "it started anew".to_owned();
                    event(CoordinatorEvent::Lost { member, span, how }, out);
                    self.lacks(&record, out);
                }
                self.balance.joined(admission.span, self.now);
                event(CoordinatorEvent::Admitted { member: from, span: admission.span }, out);
                if admission.unlike {
                    event(CoordinatorEvent::Unlike { member: from }, out);
                }
                self.view_changed(out);
            }
        }
    }

    /// Writes the membership down. While one is on its way into the log the next one waits, so that
    /// a crowd of newcomers makes few records.
    pub(super) fn view_changed(&mut self, out: &mut Out) {
        if self.view_pending {
            self.view_outdated = true;
        } else {
            self.view_pending = true;
            let change = self.membership.next_change();
            self.view_outdated = self.membership.is_ahead();
            out.push(CoordinatorAction::Append(LogRecord::View(change)));
        }
    }

    pub(super) fn view_logged(&mut self, change: ViewChange, out: &mut Out) {
        let (new, movers) = self.news_of(&change);
        let gone = self.logged_view.take(&change).expect("the log keeps its order");
        self.view_pending = false;
        let members = self.logged_view.members.iter().map(|record| record.member);
        let here: Vec<Member> =
            members.filter(|member| self.membership.contains(*member)).collect();
        for member in here {
            if new.contains(&member) {
                self.send_members(member, out);
                self.greet(member, out);
            } else {
                send(member, FromCoordinator::View(change.clone()), out);
            }
        }
        let newcomers = new.into_iter().filter(|member| {
            self.membership.contains(*member) && !self.membership.is_serving(*member)
        });
        self.begin_each(newcomers.collect::<Vec<_>>(), out);
        // After it was told that it moves: it may be told at once what to begin from.
        self.begin_moves(movers, out);
        self.choose_anchors(out);
        self.set_givers();
        self.expelled(&gone, out);
        self.take_turns(out);
        self.end_census_when_heard(out);
        self.ask_holders(out);
        self.strand_again(out);
        self.ask_for_all_copies(out);
        if std::mem::take(&mut self.view_outdated) {
            self.view_changed(out);
        }
        self.rewind_when_placed(out);
        self.open_when_gathered(out);
        self.give_out(out);
        self.replay(out);
        self.close_when_complete(out);
    }

    /// Whom a change of the log's membership brings, and who is to move in it and was not before.
    fn news_of(&self, change: &ViewChange) -> (BTreeSet<Member>, BTreeSet<Member>) {
        let (mut new, mut movers) = (BTreeSet::new(), BTreeSet::new());
        for record in &change.here {
            let known = self.logged_view.record(record.member);
            new.extend(known.is_none().then_some(record.member));
            // What the log knows of it may be a move that is over.
            let moves = record.moves.is_some_and(|moves| moves.at.is_none());
            let begins = moves && !self.newcomers.has_begun(record.member);
            movers.extend(begins.then_some(record.member));
        }
        (new, movers)
    }

    /// Tells a member of all members.
    fn send_members(&self, to: Member, out: &mut Out) {
        let number = self.logged_view.number;
        for (part, members) in paging::cut(&self.logged_view.members) {
            send(to, FromCoordinator::Members { number, part, members }, out);
        }
    }

    /// A member lacks what the present membership was made of. In a census it is asked again what it
    /// holds.
    pub(super) fn view_wanted(&mut self, from: Member, out: &mut Out) {
        self.send_members(from, out);
        if matches!(self.phase, Phase::Census(_)) {
            self.ask(from, out);
        }
    }

    /// Has the log kept by others where members came or went who would.
    fn choose_anchors(&mut self, out: &mut Out) {
        let able = self.membership.with_duty(|duties| duties.anchor);
        let able: BTreeSet<PeerId> = able.map(|member| member.peer).collect();
        let desired = anchors::desired(&self.anchors, &able);
        if desired != self.anchors {
            self.anchors.clone_from(&desired);
            out.push(CoordinatorAction::Anchors(desired));
        }
    }

    /// Tells a member what it hosts; a newcomer also what it begins from.
    fn welcome(&mut self, member: Member, out: &mut Out) {
        self.greet(member, out);
        if !self.membership.is_serving(member) {
            self.begin_again(member, out);
        }
    }

    /// Tells a member what it hosts.
    fn greet(&self, member: Member, out: &mut Out) {
        let span = self.membership.span_of(member).expect("only members are welcomed");
        if self.membership.is_serving(member) {
            send(
                member,
                FromCoordinator::Admitted { era: self.era, span, version: self.version },
                out,
            );
        } else {
            self.greet_newcomer(member, out);
        }
    }

    /// Opens the first step as soon as everybody who is waited for is in the log.
    pub(super) fn open_when_gathered(&mut self, out: &mut Out) {
        if !matches!(self.phase, Phase::Gathering) || self.view_pending {
            return;
        }
        let stages = self.membership.uncovered();
        // Members were waited for once.
        let wanted = if self.is_before_first_step() { self.config.wait_for } else { 0 };
        let members = wanted.saturating_sub(self.membership.len());
        // In a new era others host what nobody does now.
        if !self.is_before_first_step() && self.membership.can_cover_more() {
            return self.strand(out);
        }
        if !stages.is_empty() || members > 0 {
            let waiting = Some((stages.clone(), members));
            if self.waiting_said != waiting {
                self.waiting_said = waiting;
                event(CoordinatorEvent::Waiting { stages, members }, out);
            }
            return;
        }
        if self.is_last_version() {
            self.phase = Phase::Saving;
            self.start_checkpoint(out);
        } else {
            self.open_step(out);
        }
    }

    /// Whether everybody who comes has the weights: the initial ones.
    fn is_before_first_step(&self) -> bool {
        self.version == Step(0) && self.era == Era(0) && !self.begun
    }

    /// Whether training is complete.
    pub(super) fn is_last_version(&self) -> bool {
        self.version.0 == self.config.manifest.training.steps
    }
}

fn refuse(member: Member, reason: String, out: &mut Out) {
    event(CoordinatorEvent::NotAdmitted { member, reason: reason.clone() }, out);
    send(member, FromCoordinator::Refused { reason }, out);
}
