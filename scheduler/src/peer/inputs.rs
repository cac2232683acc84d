//! Inputs: hands each message, tensor and task result to the component that it concerns.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use shoal_protocol::ids::{Era, Member, PeerId, Stage, StageSpan, Step, Term};
use shoal_protocol::limits;
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, InputId, LinkEstimate, PeerMessage, TensorTag, ToCoordinator,
    ViewChange,
};
use shoal_protocol::units::Moment;

use super::senders::{Host, Listed};
use super::weights::Piece;
use super::{Out, Peer, Status, audits, context_of, report_unentitled};
use crate::action::{Payload, PeerAction, PeerEvent, PeerInput, TaskResult};
use crate::router::Routing;

/// The position of the run, as a new coordinator reports it.
struct RunPosition {
    era: Era,
    /// The version with which the era began.
    began_at: Step,
    span: StageSpan,
    commit: Option<CommitRecord>,
}

impl Peer {
    pub(super) fn handle_input(&mut self, now: Moment, input: PeerInput, out: &mut Out) {
        match input {
            PeerInput::FromCoordinator { from, message } => {
                self.contact.note_message(now, from.member());
                self.handle_coordinator_message(now, message, out);
            }
            PeerInput::PeerMessage { from, message } => {
                if let Some(early) = self.handle_peer_message(now, from, message, out)
                    && !self.membership.wait_for_view(from, early)
                {
                    report_unentitled(from, "a message of a member", out);
                }
            }
            PeerInput::Tensor { from, tag, payload } => {
                self.handle_tensor(now, from, tag, payload, out);
            }
            PeerInput::Done { result, busy } => self.handle_task_result(now, result, busy, out),
            PeerInput::Disconnected { member } => {
                self.pipeline.handle_disconnected(&context_of!(self, now), member, out);
            }
            PeerInput::Unreachable { member } => {
                self.membership.report_unreachable(member, self.contact.current(), out);
            }
            PeerInput::Fetched { version, stage, whole } => {
                let ctx = context_of!(self, now);
                self.weights.handle_fetched(&ctx, version, stage, whole, out);
            }
            PeerInput::Kept { version, stage, whole } => {
                let message = ToCoordinator::Kept { version, stage, whole };
                out.push(PeerAction::ToCoordinator(message));
            }
            PeerInput::Archived { version } => {
                out.push(PeerAction::ToCoordinator(ToCoordinator::Archived { version }));
            }
            PeerInput::Links(measured) => {
                let link_estimates = self.links.update(measured);
                self.pipeline.update_links(&context_of!(self, now));
                let by_speed = self.config.routing == Routing::BySpeed;
                if !link_estimates.is_empty() && by_speed && self.status == Status::Member {
                    out.push(PeerAction::ToCoordinator(ToCoordinator::LinkEstimates {
                        link_estimates,
                    }));
                }
            }
            PeerInput::LinksProbed(links) => self.handle_probed_links(links, out),
            PeerInput::Drain => self.drain(now, out),
            PeerInput::Tick => self.leave_when_drained(now, out),
        }
    }

    fn handle_coordinator_message(&mut self, now: Moment, message: FromCoordinator, out: &mut Out) {
        let ctx = context_of!(self, now);
        match message {
            FromCoordinator::Admitted { era, span, version } => {
                self.handle_admitted(now, era, span, version, out);
            }
            FromCoordinator::Census { term, era, began_at, span, commit, view } => {
                let position = RunPosition { era, began_at, span, commit };
                self.handle_census(now, term, position, view, out);
            }
            FromCoordinator::TakenOver => self.handle_takeover(now, out),
            FromCoordinator::Keep { version, part } => {
                out.push(PeerAction::Keep { version, part });
            }
            FromCoordinator::Checkpoint { version, stages, oldest } => {
                let event = PeerEvent::Checkpoint { version, stages, oldest };
                out.push(PeerAction::Event(event));
                if self.saving.take_if(|(saved, _)| *saved <= version).is_some() {
                    self.leave_when_drained(now, out);
                }
            }
            FromCoordinator::Refused { reason } => {
                if self.status == Status::Joining {
                    self.end(now, PeerEvent::Refused { reason }, out);
                }
            }
            FromCoordinator::Expelled { reason } => {
                self.end(now, PeerEvent::Expelled { reason }, out);
            }
            FromCoordinator::ProbeLinks { at } => self.probe_links(at, out),
            FromCoordinator::Snapshot { version, view, parts } => {
                self.handle_snapshot(now, (version, view), parts, out);
            }
            FromCoordinator::Rewind { era, version, span } => {
                self.rewind(now, era, version, span, out);
            }
            FromCoordinator::View(change) => self.handle_view_change(now, &change, out),
            FromCoordinator::Members { number, part, members } => {
                if let Some(departed) = self.membership.take_page(number, part, members) {
                    self.follow_view(now, &departed, true, out);
                }
            }
            claims @ (FromCoordinator::Replay { .. }
            | FromCoordinator::Work { .. }
            | FromCoordinator::Granted { .. }
            | FromCoordinator::Held { .. }
            | FromCoordinator::NotOpen { .. }
            | FromCoordinator::Reclaim { .. }
            | FromCoordinator::Noted { .. }) => self.pipeline.handle_claims(&ctx, claims, out),
            FromCoordinator::Close { round, group, mended, counted } => {
                let hosts = |stage| self.pipeline.hosts(stage);
                let close = (round, &group, mended);
                let listens = self.weights.handle_close(&ctx, close, counted, hosts, out);
                self.follow_close(now, listens, out);
            }
            FromCoordinator::RoundGroup { weights, number, part, here } => {
                self.weights.take_group_page(&ctx, weights, number, part, here);
            }
            FromCoordinator::Audit(order) => self.audits.order(&ctx, order, out),
            FromCoordinator::Commit(record) => self.handle_commit(now, record, out),
            FromCoordinator::Store { version, stage } => {
                let is_hosted = self.pipeline.hosts(stage);
                self.weights.handle_snapshot_request(&ctx, (version, stage), is_hosted, out);
            }
            FromCoordinator::Finished => self.end(now, PeerEvent::Finished, out),
            FromCoordinator::Stopped { reason } => {
                self.end(now, PeerEvent::Stopped { reason }, out);
            }
        }
    }

    /// Handles a message of another peer. Returns it if the view does not list its sender, or not at the stage
    /// that it needs.
    fn handle_peer_message(
        &mut self,
        now: Moment,
        from: Member,
        message: PeerMessage,
        out: &mut Out,
    ) -> Option<PeerMessage> {
        let ctx = context_of!(self, now);
        let pipeline = &mut self.pipeline;
        let Some(sender) = Listed::of(ctx.view, from) else { return Some(message) };
        match message {
            PeerMessage::Offer { key, retry, .. } => {
                let before = key.stage.0.checked_sub(1).map(Stage);
                let Some(host) = Host::of(ctx.view, from, before) else { return Some(message) };
                pipeline.handle_offer(&ctx, key, (host, retry), out);
            }
            PeerMessage::Accepted { key, wanted, service_time } => {
                let Some(host) = Host::of(ctx.view, from, [key.stage]) else {
                    return Some(message);
                };
                let key = (key, wanted);
                pipeline.handle_accepted(&ctx, host, key, service_time, out);
            }
            PeerMessage::Busy { key, service_time } => {
                pipeline.handle_busy(&ctx, sender, key, service_time, out);
            }
            PeerMessage::HeldBy { key, holder } => {
                if let Some(asked) = key.upstream().and_then(|key| pipeline.asked(sender, key, out))
                {
                    pipeline.handle_redirect(&ctx, asked, holder, out);
                }
            }
            PeerMessage::Free { stage } => {
                pipeline.handle_free(&ctx, sender, stage, out);
            }
            PeerMessage::Withdrawn { key } => pipeline.handle_withdrawn(&ctx, sender, key, out),
            PeerMessage::Recall { key, input } => {
                let Some(host) = Host::of(ctx.view, from, [key.stage]) else {
                    return Some(message);
                };
                if ctx.config.manifest.audit.is_on() {
                    audits::send_recalled(pipeline, host, InputId { key, input }, out);
                } else {
                    report_unentitled(from, "an audit in a run without audits", out);
                }
            }
            PeerMessage::Evaluated { key } => {
                if let Some(asked) = pipeline.asked(sender, key, out) {
                    pipeline.handle_evaluated(&ctx, asked, out);
                }
            }
        }
        None
    }

    /// Handles the messages that waited for the view that has just arrived.
    fn handle_waiting_messages(&mut self, now: Moment, out: &mut Out) {
        for (from, message) in self.membership.take_waiting() {
            if self.handle_peer_message(now, from, message, out).is_some() {
                report_unentitled(from, "a message of a member", out);
            }
        }
    }

    fn handle_tensor(
        &mut self,
        now: Moment,
        from: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) {
        let ctx = context_of!(self, now);
        let sender = Listed::of(ctx.view, from);
        if let Some(of) = tag.input()
            && !ctx.is_sealed(from, of, &payload)
        {
            // One of another era is merely late.
            if payload.seal.is_none_or(|seal| seal.era == ctx.position.era) {
                report_unentitled(from, "a tensor that its maker has not sealed", out);
            }
            return out.push(PeerAction::Release(payload.id));
        }
        let taken = match tag {
            TensorTag::Activation { key, exchange } => {
                let feeder = sender.and_then(|sender| self.pipeline.feeder(sender, key, out));
                feeder.map(|feeder| {
                    self.pipeline.handle_activation(&ctx, feeder, exchange, payload, out);
                })
            }
            TensorTag::ActivationGradient { key, exchange } => {
                let asked = sender.and_then(|sender| self.pipeline.asked(sender, key, out));
                asked.map(|asked| {
                    self.pipeline.handle_gradient(&ctx, asked, exchange, payload, out);
                })
            }
            TensorTag::Recalled { key, input } => {
                let of = InputId { key, input };
                let taken = sender.and_then(|sender| self.audits.awaited(sender, of));
                if taken.is_none() && sender.is_some() {
                    report_unentitled(from, "an input that was not recalled", out);
                }
                taken.map(|recalled| self.audits.take_input(recalled, payload, out))
            }
            // A round knows its members.
            TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => {
                return self.handle_round_piece(now, Piece { from, tag, payload }, out);
            }
        };
        if taken.is_none() {
            if sender.is_none() {
                report_unentitled(from, "a tensor of a member", out);
            }
            out.push(PeerAction::Release(payload.id));
        }
    }

    fn handle_task_result(
        &mut self,
        now: Moment,
        result: TaskResult,
        busy: Duration,
        out: &mut Out,
    ) {
        let ctx = context_of!(self, now);
        let Some(result) = self.audits.handle_task(&ctx, result, out) else { return };
        match result {
            TaskResult::SumsMoved { .. } | TaskResult::SumsPrinted { .. } => {}
            TaskResult::Forwarded { key, output, loss } => {
                self.pipeline.handle_forward(&ctx, key, busy, (output, loss), out);
            }
            TaskResult::Returned { key, gradient, leaves } => {
                if self.pipeline.handle_backward(&ctx, key, busy, (gradient, leaves), out) {
                    self.weights.sums_change(&ctx, key);
                }
            }
            TaskResult::Accumulated { key, broken } => {
                let computed = self.pipeline.end_addition(now, key).then_some(busy);
                // Before a rewind the accumulator was another.
                if self.weights.are_here(&ctx) {
                    self.pipeline.handle_accumulated(&ctx, key, (computed, broken), out);
                }
            }
            TaskResult::Discarded { key } => self.pipeline.handle_discarded(&ctx, key, out),
            TaskResult::Diverged { key, reason } => {
                self.pipeline.end_addition(now, key);
                let message = ToCoordinator::Diverged { key, reason };
                out.push(PeerAction::ToCoordinator(message));
            }
            TaskResult::Applied { step, stage, verdict } => {
                self.weights.handle_applied(step, stage, verdict, out);
            }
            TaskResult::Left { .. } => {}
            TaskResult::Stored { version, stage, files } => {
                self.weights.handle_stored(version, stage, Some(files), out);
            }
            TaskResult::NotStored { version, stage } => {
                self.weights.handle_stored(version, stage, None, out);
            }
            TaskResult::Exported { .. }
            | TaskResult::Reduced { .. }
            | TaskResult::Installed { .. }
            | TaskResult::Summarised { .. } => self.handle_round_task(now, result, out),
            TaskResult::Restored { version, stage } => {
                self.handle_restored(now, version, stage, out);
            }
            TaskResult::NotRestored { version, stage } => {
                self.weights.handle_fetched(&ctx, version, stage, false, out);
            }
        }
    }

    /// Releases the payloads of an input that comes after the end of the peer's part in the run.
    pub(super) fn release_input(&mut self, now: Moment, input: PeerInput, out: &mut Out) {
        match input {
            PeerInput::Tensor { payload, .. } => out.push(PeerAction::Release(payload.id)),
            PeerInput::Done { result, .. } => match self.audits.handle_late_task(result, out) {
                None => {}
                Some(result) => self.release_result(now, result, out),
            },
            _ => {}
        }
    }

    fn release_result(&mut self, now: Moment, result: TaskResult, out: &mut Out) {
        match result {
            TaskResult::Forwarded { key, output: result, .. }
            | TaskResult::Returned { key, gradient: result, .. } => {
                self.pipeline.release_result(key, result, out);
            }
            TaskResult::Exported { .. }
            | TaskResult::Reduced { .. }
            | TaskResult::Installed { .. }
            | TaskResult::Summarised { .. } => self.handle_round_task(now, result, out),
            _ => {}
        }
    }
}

/// Membership and the coordinator.
impl Peer {
    fn handle_admitted(
        &mut self,
        now: Moment,
        era: Era,
        span: StageSpan,
        version: Step,
        out: &mut Out,
    ) {
        if self.status != Status::Joining {
            return;
        }
        self.status = Status::Member;
        self.position.era = era.max(self.position.era);
        self.position.span = Some(span);
        self.position.version = version;
        self.weights.admit(version, self.config.manifest.is_initial(version));
        self.pipeline.host(&context_of!(self, now), span, out);
        out.push(PeerAction::Event(PeerEvent::Admitted { span, version }));
        self.serve_when_listed(now, out);
        self.weights.report_ready(&context_of!(self, now), out);
    }

    /// Members joined, left or changed.
    fn handle_view_change(&mut self, now: Moment, change: &ViewChange, out: &mut Out) {
        let view = self.membership.view();
        let reroutes = self.pipeline.is_rerouted_by(view, change);
        let retry = self.config.limits.retry;
        if let Some(departed) = self.membership.apply(now, retry, change, out) {
            self.follow_view(now, &departed, reroutes, out);
        }
    }

    /// Follows a new view of the membership.
    fn follow_view(
        &mut self,
        now: Moment,
        departed: &BTreeSet<Member>,
        reroutes: bool,
        out: &mut Out,
    ) {
        if reroutes {
            self.pipeline.update_routes(&context_of!(self, now));
        }
        out.push(PeerAction::Event(PeerEvent::View));
        self.serve_when_listed(now, out);
        self.follow_assignment(now, out);
        self.remove_members(now, departed, out);
        self.handle_waiting_messages(now, out);
    }

    /// Members left the run for good.
    pub(super) fn remove_members(
        &mut self,
        now: Moment,
        departed: &BTreeSet<Member>,
        out: &mut Out,
    ) {
        self.membership.remove(departed);
        self.pipeline.remove_members(&context_of!(self, now), departed, out);
        self.weights.remove_members(&context_of!(self, now), departed, out);
    }

    /// A new coordinator takes a census: catches up on a rewind and the newest commit that earlier
    /// coordinators did not send, and reports the held claims.
    fn handle_census(
        &mut self,
        now: Moment,
        term: Term,
        run: RunPosition,
        view: u64,
        out: &mut Out,
    ) {
        if term < self.contact.term() || self.status != Status::Member {
            return;
        }
        if self.membership.view().number < view {
            // The coordinator repeats the census, by when this peer knows the view.
            return self.membership.request(now, self.config.limits.retry, out);
        }
        if self.contact.enter_term(term) {
            self.rewind(now, run.era, run.began_at, run.span, out);
            self.weights.enter_term(&context_of!(self, now), term, out);
            if let Some(commit) = run.commit.filter(|_| !self.weights.is_newcomer()) {
                self.handle_commit(now, commit, out);
            }
            self.pipeline.forget_work_request();
            self.links.forget_reports();
        }
        self.pipeline.report_claims(out);
    }

    /// The new coordinator completed its census: repeats everything that waits for its answer.
    fn handle_takeover(&mut self, now: Moment, out: &mut Out) {
        self.pipeline.repeat_claims(now, out);
        self.report_draining(out);
        self.weights.repeat_behind(out);
        self.weights.report_ready(&context_of!(self, now), out);
    }

    /// Measures the links to members before this peer is assigned a stage.
    fn probe_links(&mut self, at: Vec<(PeerId, Vec<SocketAddr>)>, out: &mut Out) {
        if self.status == Status::Joining && self.config.candidate.link_estimates.is_none() {
            out.push(PeerAction::ProbeLinks { at });
        }
    }

    /// The links to members are measured: asks again for admission.
    fn handle_probed_links(&mut self, mut links: Vec<(PeerId, LinkEstimate)>, out: &mut Out) {
        if self.status == Status::Joining && self.config.candidate.link_estimates.is_none() {
            links.truncate(limits::LINK_ESTIMATES);
            self.config.candidate.link_estimates = Some(links);
            self.register(out);
        }
    }

    /// Leaves in order: accepts no work of later steps, and leaves once the begun work is committed.
    fn drain(&mut self, now: Moment, out: &mut Out) {
        self.is_draining = true;
        if self.saves_before_leaving() {
            self.saving = Some((self.version(), now + self.config.saving));
        }
        let newest = context_of!(self, now).newest_runnable();
        if !self.is_serving() || !self.pipeline.has_work_through(newest) {
            self.leave_when_drained(now, out);
        }
        self.report_draining(out);
    }

    /// Whether what the run has computed since its checkpoint would be lost with this peer, and is to be saved: it is the
    /// last host of a stage, or the only one that can be an anchor, so that a run that all leave together stops with it.
    #[must_use]
    pub fn saves_before_leaving(&self) -> bool {
        let checkpoint = &self.config.manifest.checkpoint;
        let initial = self.config.manifest.is_initial(self.version());
        if !self.is_serving() || checkpoint.interval == 0 || initial {
            return false;
        }
        let members = || self.view().members.iter().filter(|record| record.serving);
        let own = members().find(|record| record.member == self.config.me);
        let hosts = |stage| members().filter(|record| record.span.contains(stage)).count();
        let anchors = self.view().members.iter().filter(|record| record.duties.anchor).count();
        own.is_some_and(|own| {
            own.duties.anchor && anchors == 1 || own.span.stages().any(|stage| hosts(stage) == 1)
        })
    }

    /// Reports that this peer is about to leave, so that it is replaced and not moved.
    fn report_draining(&self, out: &mut Out) {
        if self.is_draining && self.status == Status::Member {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Draining));
        }
    }

    /// Leaves if this peer drains and has begun no work that others would have to repeat.
    pub(super) fn leave_when_drained(&mut self, now: Moment, out: &mut Out) {
        let begun = self.is_serving() && self.pipeline.has_begun_work();
        // The time is over, and no timer of it remains.
        self.saving.take_if(|(_, until)| now >= *until);
        let saving = self.saving.is_some();
        if self.is_draining && !begun && !saving && self.status != Status::Over {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Leave));
            self.end(now, PeerEvent::Drained, out);
        }
    }
}
