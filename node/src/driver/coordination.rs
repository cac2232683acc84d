//! The run as this peer knows it: era, membership and coordinator, and this peer's own part in
//! coordinating it.

use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Member, PeerId, RunId, Step, Term};
use shoal_protocol::limits;
use shoal_protocol::message::{
    AnchorMessage, FromCoordinator, LogRecord, Message, Signatures, StoredStage, TermProof,
    ToCoordinator, View,
};
use shoal_protocol::net::transport::{ConnectError, Refusal};
use shoal_protocol::units::Moment;
use shoal_scheduler::action::{CoordinatorAction, CoordinatorInput, PeerInput};
use shoal_scheduler::coordinator::Coordinator;
use shoal_scheduler::office::Office;

use super::anchor_role::AnchorRole;
use super::background_results::{Background, BackgroundResult};
use super::context::Context;
use super::coordinator_contact::CoordinatorContact;
use super::effect::{Effect, Effects, Stamp};
use super::incoming::{Receiver, Unusable};
use super::liveness_probe;
use super::own_pause::{OwnPause, since_boot};
use super::peer_names::PeerNames;
use super::run_files::FileHolders;
use super::shutdown::Ending;
use tokio::sync::watch;

use crate::anchor::{AnchorEvent, Heard};
use crate::fault_point::FaultPoint;

/// Era, membership and coordinator of the run.
pub(super) struct Coordination {
    me: Member,
    names: PeerNames,
    run: RunId,
    keys: Arc<dyn Signatures>,
    era: Era,
    view: View,
    /// The peers that may have files of the run, for tasks that fetch them.
    file_holders: watch::Sender<FileHolders>,
    contact: CoordinatorContact,
    anchor_role: AnchorRole,
    /// The peers that the local coordinator has shown the proof of its term.
    shown: BTreeSet<Member>,
    own_pause: OwnPause,
    /// A message for a coordinator that is not known or not in office yet. The peer repeats every
    /// message that needs an answer, so one is enough.
    pending_message: Option<ToCoordinator>,
}

impl Coordination {
    pub(super) fn new(
        context: &Context,
        coordinator: Option<Member>,
        anchor_role: AnchorRole,
        file_holders: watch::Sender<FileHolders>,
    ) -> Self {
        // The log of a peer that begins with another's answer may be of an earlier history.
        let group = anchor_role.group().filter(|_| coordinator.is_none());
        let office = Office::new(context.manifest.admission.key, group);
        Self {
            me: context.me,
            names: context.names.clone(),
            run: context.manifest.run_id(),
            keys: Arc::clone(&context.keys),
            era: Era(0),
            view: View::default(),
            file_holders,
            contact: CoordinatorContact::new(coordinator, office),
            shown: BTreeSet::new(),
            anchor_role,
            own_pause: OwnPause::default(),
            pending_message: None,
        }
    }

    /// Returns the newest membership.
    pub(super) fn view(&self) -> &View {
        &self.view
    }

    pub(super) fn contact(&self) -> &CoordinatorContact {
        &self.contact
    }

    pub(super) fn anchor_role(&self) -> &AnchorRole {
        &self.anchor_role
    }

    /// Returns the era and term that this peer's messages name.
    pub(super) fn stamp(&self) -> Stamp {
        Stamp { era: self.era, term: self.contact.term() }
    }

    /// Returns the conditions that incoming messages must meet.
    pub(super) fn receiver(&self) -> Receiver {
        Receiver { me: self.me, era: self.era, term: self.contact.term() }
    }

    /// Returns the next moment at which the coordinator wants a tick.
    pub(super) fn next_timeout(&self) -> Option<Moment> {
        self.anchor_role.coordinator().and_then(Coordinator::next_timeout)
    }

    /// Waits for the next event of the local anchor. Safe to cancel.
    pub(super) async fn next_anchor_event(&mut self) -> Option<AnchorEvent> {
        self.anchor_role.next().await
    }

    /// Enters the era that follows a rewind.
    pub(super) fn rewound(&mut self, era: Era) {
        self.era = era;
    }

    /// Takes in a membership.
    pub(super) fn members_changed(&mut self, view: View) {
        self.contact.members_changed(&view);
        self.view = view;
        self.publish_file_holders();
    }

    /// Notes the members of a membership that is in the log, and not yet in force here.
    pub(super) fn members_logged(&mut self, view: &View) {
        self.contact.members_changed(view);
    }

    /// Publishes the peers that may have files of the run.
    pub(super) fn publish_file_holders(&self) {
        let coordinator = self.contact.coordinator().map(|member| member.peer);
        let holders = FileHolders::new(&self.view, self.me.peer, coordinator);
        self.file_holders.send_replace(holders);
    }

    /// Returns the newest checkpoint in the local log.
    pub(super) fn newest_logged_checkpoint(&self) -> Option<(Step, Vec<StoredStage>)> {
        let newest = self.anchor_role.history()?.checkpoints.pop_last();
        newest.filter(|(version, _)| version.0 > 0)
    }

    /// Returns another peer that is the coordinator, to redirect `asker` to.
    pub(super) fn coordinator_for(&self, asker: Member) -> Option<Member> {
        self.contact.coordinator().filter(|member| ![self.me, asker].contains(member))
    }

    /// Sends a message to the coordinator, which may be in this process; keeps it while there is
    /// none.
    pub(super) fn send(&mut self, message: ToCoordinator, out: &mut Effects) {
        match self.contact.coordinator() {
            Some(coordinator) if coordinator == self.me => {
                if self.is_in_office() {
                    let from = self.me;
                    out.push(CoordinatorInput::Message { from, message }.into());
                } else {
                    self.pending_message = Some(message);
                }
            }
            Some(to) => {
                let (stamp, message) = (self.stamp(), Message::ToCoordinator(message));
                out.push(Effect::Send { to, stamp, message });
            }
            None => self.pending_message = Some(message),
        }
    }

    /// Sends the message that was kept while there was no coordinator.
    pub(super) fn send_pending(&mut self, out: &mut Effects) {
        let Some(coordinator) = self.contact.coordinator() else { return };
        if (coordinator != self.me || self.is_in_office())
            && let Some(message) = self.pending_message.take()
        {
            self.send(message, out);
        }
    }

    fn is_in_office(&self) -> bool {
        self.anchor_role.coordinator().is_some_and(Coordinator::is_in_office)
    }

    /// Hands the local coordinator an input.
    pub(super) fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
    ) -> Vec<CoordinatorAction> {
        self.anchor_role.handle(now, input)
    }

    /// Applies an action of the local coordinator, other than an event.
    pub(super) fn apply(&mut self, action: CoordinatorAction, out: &mut Effects) {
        match action {
            CoordinatorAction::Send { to, message } => self.send_as_coordinator(to, message, out),
            CoordinatorAction::Append(record) => {
                if matches!(record, LogRecord::Commit(_)) {
                    FaultPoint::Committing.pass();
                }
                self.anchor_role.append(record);
            }
            CoordinatorAction::Anchors(wanted) => self.anchor_role.set_wanted(wanted, out),
            CoordinatorAction::Event(_) => {}
        }
    }

    fn send_as_coordinator(&mut self, to: Member, message: FromCoordinator, out: &mut Effects) {
        let Some(coordinator) = self.anchor_role.coordinator() else { return };
        let stamp = Stamp { era: coordinator.era(), term: coordinator.term() };
        if to != self.me {
            self.show_term(to, out);
            out.push(Effect::Send { to, stamp, message: Message::FromCoordinator(message) });
        } else if let Some(from) = self.contact.admit(to, stamp.term) {
            // As for any other peer, the era comes with the coordinator's message.
            self.era = stamp.era;
            out.push(PeerInput::FromCoordinator { from, message }.into());
        }
    }

    /// Shows a peer the proof of the local coordinator's term, before its first message to that peer.
    fn show_term(&mut self, to: Member, out: &mut Effects) {
        // Each is shown again if it needs to be.
        if self.shown.len() > 2 * limits::MEMBERS {
            self.shown.clear();
        }
        if self.shown.insert(to) {
            self.tell_term(to, out);
        }
    }

    /// Sends a peer the proof of the newest term that this one knows.
    pub(super) fn tell_term(&self, to: Member, out: &mut Effects) {
        let message = Message::Elected { proofs: self.contact.proofs().to_vec() };
        out.push(Effect::Send { to, stamp: self.stamp(), message });
    }

    /// Takes in proofs of a coordinator's term. They count by their signatures, whoever sends them.
    pub(super) fn learn(&mut self, from: Member, proofs: Vec<TermProof>, out: &mut Effects) {
        self.contact.follow_log(self.anchor_role.group());
        match self.contact.learn(from.peer, (self.run, &*self.keys), proofs) {
            Ok(()) => {
                if let Some(leader) = self.contact.elected_peer() {
                    self.anchor_role.follow(self.contact.term(), leader);
                }
            }
            Err(error) => {
                tracing::warn!(peer = self.names.member(from), %error, "a term is not believed");
                out.push(Effect::Unentitled { from, what: "a proof of a term" });
            }
        }
    }

    /// Takes in a message for the coordinator.
    pub(super) fn receive_for_coordinator(
        &mut self,
        from: Member,
        sent: Stamp,
        message: ToCoordinator,
        out: &mut Effects,
    ) {
        let Some(coordinator) = self.anchor_role.coordinator() else {
            out.push(Effect::Redirect { to: from });
            return;
        };
        let newcomer = matches!(message, ToCoordinator::Register(_));
        if newcomer || sent.term != coordinator.term() {
            self.shown.remove(&from);
        }
        // The coordinator answers every other message of a peer that is no member.
        if !newcomer && coordinator.is_member(from) {
            let Stamp { era, term } = sent;
            let past = (era != coordinator.era()).then_some(Unusable::OtherEra { era });
            let past = past.or((term != coordinator.term()).then_some(Unusable::PastTerm { term }));
            if let Some(error) = past {
                self.show_term(from, out);
                out.push(Effect::Refuse { from, error });
                return;
            }
        }
        out.push(CoordinatorInput::Message { from, message }.into());
    }

    /// Takes in a message of a coordinator.
    pub(super) fn receive_from_coordinator(
        &mut self,
        from: Member,
        Stamp { era, term }: Stamp,
        message: FromCoordinator,
        out: &mut Effects,
    ) {
        if let Some(from) = self.contact.admit(from, term) {
            self.era = era;
            out.push(PeerInput::FromCoordinator { from, message }.into());
        } else {
            out.push(Effect::Unentitled { from, what: "a coordinator's message" });
        }
    }

    /// Takes in a message of another anchor.
    pub(super) fn receive_from_anchor(
        &mut self,
        from: Member,
        message: AnchorMessage,
        out: &mut Effects,
    ) {
        let known = self.contact.is_anchor(from.peer);
        match self.anchor_role.receive(from.peer, message, known) {
            Some(Heard::Taken | Heard::Dropped) => {}
            Some(Heard::NewerHistory) => {
                let reason = "the run was continued from an archive in a later history".to_owned();
                out.push(match self.anchor_role.is_outdated() {
                    true => Ending::Expelled(reason).into(),
                    false => Ending::Stopped(format!("{reason}: join that one")).into(),
                });
            }
            None => tracing::debug!(
                peer = self.names.member(from),
                "a message of a peer that is no anchor"
            ),
        }
    }

    /// Takes in the answer of a peer that is not the coordinator, with the one that is. Returns whether the sender may
    /// say that.
    pub(super) fn redirected(&mut self, from: Member, coordinator: Member) -> bool {
        coordinator != self.me && self.contact.redirect(from.peer, coordinator)
    }

    /// Notes a run of the event loop: after a pause of this process, silence of the others does not count for a while.
    pub(super) fn runs(&mut self, out: &mut Effects) {
        let now = since_boot();
        if self.anchor_role.coordinator().is_none() && !self.anchor_role.is_alone() {
            self.contact.seek(self.me, now);
        }
        if let Some(pause) = self.own_pause.run(now) {
            tracing::warn!(
                seconds = pause.as_secs(),
                "this process stood still: the others have time to reach it again"
            );
        }
        for member in self.own_pause.take_lost() {
            out.push(CoordinatorInput::Disconnected { member }.into());
        }
    }

    /// Notes a connection to a life of a peer: an earlier one has ended.
    pub(super) fn connected(&mut self, member: Member, out: &mut Effects) {
        self.shown.remove(&member);
        self.own_pause.connected(member);
        if let Some(member) = self.contact.connected(member) {
            out.push(CoordinatorInput::Disconnected { member }.into());
        }
    }

    /// Notes that a peer could not be reached for long.
    pub(super) fn unreachable(&mut self, peer: PeerId, error: &ConnectError, out: &mut Effects) {
        let member = self.view.members.iter().find(|record| record.member.peer == peer);
        let member = member.map(|record| record.member);
        let coordinator = self.contact.coordinator().filter(|member| member.peer == peer);
        if coordinator.is_some()
            && let ConnectError::Refused(Refusal::Denied(denied)) = error
            && !denied.may_pass()
        {
            // Another attempt has no chance, and the run goes on without this peer.
            out.push(Ending::Refused(denied.to_string()).into());
        }
        if let ConnectError::Refused(refusal @ Refusal::Displaced { .. }) = error {
            out.push(Ending::Refused(refusal.to_string()).into());
        }
        if let Some(member) = member {
            out.push(PeerInput::Unreachable { member }.into());
        }
        if let Some(member) = member.or(coordinator) {
            self.lost(member, &error.to_string(), out);
        }
    }

    /// Notes that a peer is gone.
    pub(super) fn lost(&mut self, member: Member, reason: &str, out: &mut Effects) {
        self.shown.remove(&member);
        if !self.own_pause.excuses(member) {
            out.push(CoordinatorInput::Disconnected { member }.into());
        }
        // A peer that is no member yet knows no other to ask.
        let knows_others = || {
            let history = self.anchor_role.history();
            history.is_some_and(|history| !history.view.members.is_empty())
        };
        if self.contact.lost(member, self.me) && self.view.members.is_empty() && !knows_others() {
            out.push(Ending::Orphaned(reason.to_owned()).into());
        }
    }

    /// Repeats changes of the anchors, and reports changes of their number.
    pub(super) fn tick(&mut self, out: &mut Effects) {
        self.anchor_role.tick(out);
    }

    /// Takes in an event of the local anchor. Its election goes to [`Self::lead`] instead.
    pub(super) fn anchor_event(
        &mut self,
        context: &Context,
        background: &Background,
        event: Option<AnchorEvent>,
        out: &mut Effects,
    ) {
        match event {
            Some(AnchorEvent::Appended(record)) => {
                if matches!(record, LogRecord::Commit(_)) {
                    FaultPoint::Committed.pass();
                }
                let begins = matches!(record, LogRecord::Term(_));
                out.push(CoordinatorInput::Appended(record).into());
                if begins {
                    // The transport reported these before, and will not again.
                    for member in self.contact.ended_lives() {
                        out.push(CoordinatorInput::Disconnected { member }.into());
                    }
                    self.probe_members(context, background);
                }
            }
            Some(AnchorEvent::Deposed) => {
                tracing::info!("another anchor leads");
                self.anchor_role.deposed();
                self.contact.try_next_anchor(self.me);
            }
            Some(AnchorEvent::Leader { peer: Some(peer), .. }) => {
                self.anchor_role.leader_found();
                if peer != self.me.peer {
                    self.contact.elected(peer);
                }
            }
            Some(AnchorEvent::Leader { peer: None, answering, voters }) => {
                self.anchor_role.leader_missing(answering, voters);
            }
            Some(AnchorEvent::Failed(error)) => {
                out.push(Ending::Stopped(error.to_string()).into());
            }
            Some(AnchorEvent::Confirmed(proof)) => self.confirmed(proof, out),
            Some(AnchorEvent::Leads { .. }) => {}
            None => out.push(Ending::Stopped("the run's log stopped".to_owned()).into()),
        }
    }

    /// Looks for members whose processes have ended unnoticed.
    fn probe_members(&self, context: &Context, background: &Background) {
        let history = self.anchor_role.history().filter(|_| context.transport.is_some());
        let Some(History { view, .. }) = history else { return };
        let me = self.me;
        background
            .spawn(async move { BackgroundResult::Gone(liveness_probe::gone(view, me).await) });
    }

    /// Returns whether the run stands still without this peer: it is the coordinator and the only
    /// anchor.
    pub(super) fn is_indispensable(&self) -> bool {
        self.anchor_role.coordinator().is_some() && self.anchor_role.is_alone()
    }

    /// Starts the local coordinator: the anchors elected this one.
    pub(super) fn lead(
        &mut self,
        context: &Context,
        (election, proof): (Term, TermProof),
        history: History,
    ) -> Vec<CoordinatorAction> {
        let actions = self.anchor_role.lead(context, election, history, &proof);
        self.shown.clear();
        self.contact.lead(self.me, proof);
        actions
    }

    /// More anchors signed for the local coordinator, or those of the group that follows: every member must know that
    /// group before another coordinator is elected by it.
    fn confirmed(&mut self, proof: TermProof, out: &mut Effects) {
        self.anchor_role.confirmed(&proof);
        let lasts = proof.vote.group.voters.len() == 1;
        self.contact.confirm(proof);
        if lasts {
            for member in std::mem::take(&mut self.shown) {
                self.show_term(member, out);
            }
        }
    }

    /// Ends the anchor and its writing.
    pub(super) async fn close(&mut self) {
        self.anchor_role.close().await;
    }
}
