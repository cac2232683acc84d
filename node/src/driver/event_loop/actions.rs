//! The actions and events of the state machines, carried out by the components.

use shoal_metrics::NodeState;
use shoal_protocol::ids::{Member, StageSpan, Step};
use shoal_protocol::message::{
    CommitRecord, FromCoordinator, Message, PeerMessage, TensorHeader, TensorTag, ToCoordinator,
};
use shoal_protocol::net::transport::Transport;
use shoal_scheduler::action::{
    CoordinatorAction, CoordinatorEvent, Payload, PayloadId, PeerAction, PeerEvent, PeerInput,
    StepCounts,
};

use super::Driver;
use crate::driver::effect::{Effect, Effects};
use crate::driver::shutdown::Ending;
use crate::driver::wrong_work;
use crate::events::RunEvent;
use crate::fault_point::FaultPoint;

impl Driver<'_> {
    pub(super) fn apply_peer_actions(&mut self, actions: Vec<PeerAction>) {
        for action in actions {
            let mut out = Effects::new();
            match action {
                PeerAction::ToCoordinator(message) => self.send_to_coordinator(message),
                PeerAction::Send { to, message } => self.send(to, message, &mut out),
                PeerAction::SendTensor { to, tag, seal, payload } => {
                    self.send_tensor(to, TensorHeader { tag, seal }, payload, &mut out);
                }
                PeerAction::ProbeLinks { at } => self.network.probe_latency(&self.background, at),
                PeerAction::Fetch { version, part } => {
                    self.coordination.publish_file_holders();
                    let (context, background) = (&self.context, &self.background);
                    self.checkpoints.fetch(context, background, (version, part));
                }
                PeerAction::Keep { version, part } => {
                    self.checkpoints.keep(&self.context, &self.background, version, part);
                }
                PeerAction::Compute(task) => self.engine.compute(task),
                PeerAction::Release(payload) => self.engine.payloads().release(payload),
                PeerAction::Event(event) => self.peer_event(event, &mut out),
            }
            self.execute(out);
        }
    }

    fn send_to_coordinator(&mut self, message: ToCoordinator) {
        let reduced = matches!(message, ToCoordinator::Reduced { .. });
        let mut out = Effects::new();
        self.coordination.send(message, &mut out);
        self.execute(out);
        if reduced {
            FaultPoint::Reduced.pass();
        }
    }

    fn send(&self, to: Member, message: PeerMessage, out: &mut Effects) {
        let from = self.context.me;
        if to == from {
            out.push(PeerInput::PeerMessage { from, message }.into());
        } else {
            let (stamp, message) = (self.coordination.stamp(), Message::PeerMessage(message));
            out.push(Effect::Send { to, stamp, message });
        }
    }

    fn send_tensor(&self, to: Member, header: TensorHeader, payload: PayloadId, out: &mut Effects) {
        let TensorHeader { tag, seal } = header;
        let (from, payloads) = (self.context.me, self.engine.payloads());
        if to == from {
            let payload = Payload { seal, ..payloads.share(payload) };
            out.push(PeerInput::Tensor { from, tag, payload }.into());
            return;
        }
        match tag {
            TensorTag::ActivationGradient { .. } => FaultPoint::GradientUnsent.pass(),
            TensorTag::RoundPart { .. } => FaultPoint::Reducing.pass(),
            TensorTag::Activation { .. }
            | TensorTag::RoundResult { .. }
            | TensorTag::Recalled { .. } => {}
        }
        let (mut header, held) = (header, payloads.get(payload));
        let held = wrong_work::sent(&mut header, held, || self.context.sealer());
        self.background.spawn(self.network.send_tensors(to, header, held));
        if matches!(tag, TensorTag::Activation { .. }) {
            FaultPoint::ForwardSent.pass();
        }
    }

    fn peer_event(&mut self, event: PeerEvent, out: &mut Effects) {
        match event {
            PeerEvent::Admitted { span, version } => self.admitted(span, version, out),
            PeerEvent::Rewound { era, version } => {
                self.coordination.rewound(era);
                self.status.rewound(&self.context, version);
                tracing::warn!(%era, %version, "the run goes back");
            }
            PeerEvent::Unentitled { from, what } => out.push(Effect::Unentitled { from, what }),
            PeerEvent::Serving { version } => {
                self.status.metrics().version(version);
                out.push(RunEvent::Serving { version: version.0 }.into());
            }
            PeerEvent::Drained => out.push(Ending::Drained.into()),
            PeerEvent::Expelled { reason } => out.push(Ending::Expelled(reason).into()),
            PeerEvent::Refused { reason } => out.push(Ending::Refused(reason).into()),
            PeerEvent::View => self.members_changed(),
            PeerEvent::Checkpoint { version, stages, oldest } => {
                self.status.metrics().checkpoint_completed(version);
                let (context, background) = (&self.context, &self.background);
                self.checkpoints.completed(context, background, (version, stages), oldest);
            }
            PeerEvent::Judged { step, verdict } => self.status.judged(step, &verdict),
            PeerEvent::Applied { record } => self.committed(&record, None),
            PeerEvent::Counted { key } => self.status.counted(&self.context, key),
            PeerEvent::MoveBegun { to, reason } => {
                let reason = reason.words();
                tracing::info!(stages = %to, reason, "fetching other stages, to host them");
            }
            PeerEvent::Moved { from, to, at } => {
                out.push(RunEvent::Moved { from, to, step: at.0 }.into());
            }
            PeerEvent::MoveCancelled { to } => {
                tracing::info!(stages = %to, "needed where it is: it stays");
            }
            PeerEvent::ResultLost { step, .. } => {
                tracing::warn!(step = step.0, "a result was lost on the way: beginning anew");
            }
            PeerEvent::Fault(fault) => {
                self.status.metrics().fault(&fault);
                tracing::error!(%fault, "fault");
            }
            PeerEvent::Finished => self.finished(out),
            PeerEvent::Stopped { reason } => {
                if !self.shutdown.is_ending() {
                    out.push(RunEvent::Stopped { reason: reason.clone() }.into());
                    out.push(Ending::Stopped(reason).into());
                }
            }
        }
    }

    fn admitted(&mut self, span: StageSpan, version: Step, out: &mut Effects) {
        if !span.is_empty() {
            self.status
                .metrics()
                .memory_needed(self.engine.memory_for(&self.context.manifest, span));
            self.coordination.publish_file_holders();
            if let Err(error) = self.engine.start(&self.context, span, version) {
                self.leave_at_once();
                out.push(Ending::Failed(error).into());
            }
        }
        out.push(RunEvent::Joined { span }.into());
    }

    fn members_changed(&mut self) {
        let view = self.peer.view().clone();
        self.status.members_changed(&self.context, &view);
        self.network.members_changed(&view);
        self.coordination.members_changed(view);
    }

    fn committed(&mut self, record: &CommitRecord, counts: Option<StepCounts>) {
        let members = self.coordination.view().members.len();
        if self.status.committed(&self.context, record, counts, members) {
            self.checkpoints.forget_old_parts(&self.context, record.step);
        }
    }

    fn finished(&mut self, out: &mut Effects) {
        let swapped = self.status.metrics().swap_stats().into();
        out.push(RunEvent::Finished { sent: self.network.sent(), swapped }.into());
        self.status.metrics().is(NodeState::Finished);
        let (voters, view) = (self.coordination.anchor_role().voters(), self.coordination.view());
        out.extend(self.shutdown.finish(voters, view, self.context.me).map(Effect::Note));
        let connected = self.context.transport.as_ref().map(Transport::connected);
        for member in connected.unwrap_or_default() {
            self.tell_the_end(member, out);
        }
        out.push(Ending::Finished.into());
    }

    /// Tells a peer that is connected that the run is over, if it is and the peer missed that. It believes the
    /// coordinator; any other peer sends it there.
    pub(super) fn tell_the_end(&mut self, member: Member, out: &mut Effects) {
        if self.shutdown.connected(member.peer) {
            self.coordination.tell_term(member, out);
            if self.coordination.anchor_role().coordinator().is_none() {
                out.push(Effect::Redirect { to: member });
            }
            let message = Message::FromCoordinator(FromCoordinator::Finished);
            out.push(Effect::Send { to: member, stamp: self.coordination.stamp(), message });
        }
    }

    pub(super) fn apply_coordinator_actions(&mut self, actions: Vec<CoordinatorAction>) {
        for action in actions {
            let mut out = Effects::new();
            match action {
                CoordinatorAction::Event(event) => self.coordinator_event(event),
                action => self.coordination.apply(action, &mut out),
            }
            self.execute(out);
        }
    }

    fn coordinator_event(&mut self, event: CoordinatorEvent) {
        self.status.metrics().coordinator_event(&event, &self.context.manifest);
        if let CoordinatorEvent::Lost { member, how, .. } = &event
            && how.comes_back()
        {
            self.shutdown.comes_back(member.peer);
        }
        match event {
            CoordinatorEvent::Committed { record, counts } => self.committed(&record, Some(counts)),
            event => self.status.coordinator_event(&self.context, event),
        }
    }
}
