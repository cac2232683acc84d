//! One microbatch at one stage, from its acceptance until the commit of its step.

use shoal_protocol::ids::{ClaimKey, Exchange, Grant, Member};
use shoal_protocol::message::{
    FixedLoss, Handover, PassTimes, PeerMessage, TensorTag, ToCoordinator,
};
use shoal_protocol::units::Moment;

use super::delivery::Delivery;
use super::exchanges::Exchanges;
use crate::action::{DeviceIndex, Payload, PeerAction};

/// A pass to give to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward(ClaimKey),
    Backward(ClaimKey),
}

/// One microbatch at one stage.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) upstream: Upstream,
    pub(super) claim: Claim,
    pub(super) report: Report,
    /// Whether the microbatch occupies room.
    pub(super) holds_room: bool,
    /// The device that has its passes, once a forward pass is given out.
    pub(super) device: Option<DeviceIndex>,
    pub(super) exchanges: Exchanges,
    pub(super) delivery: Delivery,
    /// The gradient of each exchange's input, in the output log.
    pub(super) input_gradients: Vec<Payload>,
    pub(super) loss: Option<FixedLoss>,
    /// What was taken and made, in a run with audits.
    pub(super) handover: Handover,
    /// The time at which the next pass had its inputs, weights excepted.
    pub(super) ready_at: Moment,
    /// The durations of the passes that ended.
    pub(super) pass_times: PassTimes,
}

/// The members that offered the microbatch.
#[derive(Debug)]
pub(super) struct Upstream {
    /// The senders in the order of their offers; each receives the answer. Empty at the first stage.
    pub(super) senders: Vec<Member>,
    /// The time of the last acceptance sent to them.
    pub(super) accepted_at: Moment,
    /// Whether they received the answer: the gradient or, for held-out data, the end of the evaluation.
    pub(super) answered: bool,
}

/// The claim: the right to count the microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    Requested { at: Moment },
    Granted(Grant),
}

/// The report of the finished work to the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    NotDone,
    Sent { at: Moment },
    Acknowledged,
}

impl Job {
    pub(super) fn new(
        key: ClaimKey,
        from: Option<Member>,
        claim: Claim,
        exchanges: Exchanges,
    ) -> Self {
        assert_eq!(from.is_none(), key.stage.0 == 0, "only the first stage has no sender");
        Self {
            upstream: Upstream {
                senders: from.into_iter().collect(),
                accepted_at: Moment::default(),
                answered: false,
            },
            claim,
            report: Report::NotDone,
            holds_room: true,
            device: None,
            exchanges,
            delivery: Delivery::default(),
            input_gradients: Vec::new(),
            loss: None,
            handover: Handover::default(),
            ready_at: Moment::default(),
            pass_times: PassTimes::default(),
        }
    }

    pub(super) fn grant(&self) -> Option<Grant> {
        match self.claim {
            Claim::Granted(grant) => Some(grant),
            Claim::Requested { .. } => None,
        }
    }

    /// The report of the finished work.
    pub(super) fn done(&self, key: ClaimKey, grant: Grant) -> ToCoordinator {
        let (loss, pass_times) = (self.loss, self.pass_times);
        let handover = Box::new(self.handover);
        ToCoordinator::Done { key, grant, loss, pass_times, handover }
    }

    /// Whether its forward pass went to this device, and its backward pass has not ended.
    pub(super) fn is_open_on(&self, device: DeviceIndex) -> bool {
        self.device == Some(device) && !self.exchanges.are_over()
    }

    /// Whether the next backward pass can run. It needs the claim, since the gradient is added right after it.
    pub(super) fn can_run_backward(&self) -> bool {
        self.exchanges.can_run_backward() && self.grant().is_some()
    }

    /// Whether a held-out microbatch reached the last stage and its answer came back.
    pub(super) fn can_be_evaluated(&self) -> bool {
        self.exchanges.are_evaluated() && !self.upstream.answered && self.grant().is_some()
    }

    /// Whether the next pass could have begun at `available_at` and has not ended after the patience.
    /// `runnable`: the weights of its step are here.
    pub(super) fn is_late(
        &self,
        now: Moment,
        available_at: Moment,
        runnable: bool,
        patience: PassTimes,
    ) -> bool {
        // The engine may first run a longer pass of another microbatch.
        let patience = patience.forward.max(patience.backward);
        let exchanges = &self.exchanges;
        let has_pass = exchanges.running() > 0
            || exchanges.can_run_forward() && runnable
            || exchanges.can_run_backward();
        has_pass && now.since(available_at) >= patience
    }

    /// Whether the work waits for an activation that no sender is left to send. The replacement of its
    /// senders offers it again, and may need the room that it occupies.
    pub(super) fn is_deserted(&self) -> bool {
        self.upstream.senders.is_empty() && self.exchanges.awaits_input()
    }

    /// Answers a sender: with the gradient of its activation or, for held-out data, with the end of
    /// the evaluation.
    pub(super) fn answer(&self, to: Member, key: ClaimKey, out: &mut Vec<PeerAction>) {
        if self.input_gradients.is_empty() {
            let key = key.upstream().expect("the first stage answers no sender");
            out.push(PeerAction::Send { to, message: PeerMessage::Evaluated { key } });
        }
        for exchange in (0..self.input_gradients.len() as u32).map(Exchange) {
            self.answer_exchange(to, key, exchange, out);
        }
    }

    /// Sends the gradient of an exchange to a sender, if it is computed.
    pub(super) fn answer_exchange(
        &self,
        to: Member,
        key: ClaimKey,
        exchange: Exchange,
        out: &mut Vec<PeerAction>,
    ) {
        if let Some(gradient) = self.input_gradients.get(exchange.0 as usize) {
            let key = key.upstream().expect("the first stage answers no sender");
            let tag = TensorTag::ActivationGradient { key, exchange };
            out.push(PeerAction::send_tensor(to, tag, gradient));
        }
    }
}
