//! One microbatch at one stage, from its acceptance until the commit of its step.

use shoal_protocol::ids::{ClaimKey, Grant, Member};
use shoal_protocol::message::{FixedLoss, PassTimes, PeerMessage, TensorTag};
use shoal_protocol::units::Moment;

use crate::action::{DeviceIndex, Payload, PayloadId, PeerAction};

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
    pub(super) input: Input,
    /// The device that has its passes, once the forward pass is given out.
    pub(super) device: Option<DeviceIndex>,
    pub(super) forward: Progress,
    pub(super) backward: Progress,
    pub(super) answer: Answer,
    /// The gradient of the input, in the output log.
    pub(super) input_gradient: Option<Payload>,
    pub(super) loss: Option<FixedLoss>,
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

/// The input of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// The first stage reads its samples itself.
    Samples,
    Expected,
    Here(Payload),
    Used,
}

/// The progress of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Waiting,
    Running,
    Done,
}

/// The answer of the next stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Expected,
    /// The last stage starts from its own loss.
    Own,
    Here(Payload),
    Evaluated,
    Used,
}

/// The report of the finished work to the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    NotDone,
    Sent { at: Moment },
    Acknowledged,
}

impl Job {
    pub(super) fn new(key: ClaimKey, from: Option<Member>, claim: Claim, last: bool) -> Self {
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
            input: if from.is_none() { Input::Samples } else { Input::Expected },
            device: None,
            forward: Progress::Waiting,
            backward: Progress::Waiting,
            answer: if last { Answer::Own } else { Answer::Expected },
            input_gradient: None,
            loss: None,
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

    pub(super) fn is_running(&self) -> bool {
        self.forward == Progress::Running || self.backward == Progress::Running
    }

    pub(super) fn can_run_forward(&self) -> bool {
        self.forward == Progress::Waiting && matches!(self.input, Input::Samples | Input::Here(_))
    }

    /// Whether the input is on its way.
    pub(super) fn awaits_input(&self) -> bool {
        self.input == Input::Expected
    }

    /// Whether the forward pass ended and its answer is on its way.
    pub(super) fn awaits_answer(&self) -> bool {
        self.forward == Progress::Done && self.answer == Answer::Expected
    }

    /// Whether the backward pass can run. It needs the claim, since the gradient is added right after it.
    pub(super) fn can_run_backward(&self) -> bool {
        self.forward == Progress::Done
            && self.backward == Progress::Waiting
            && matches!(self.answer, Answer::Own | Answer::Here(_))
            && self.grant().is_some()
    }

    /// Whether a held-out microbatch reached the last stage and its answer came back.
    pub(super) fn can_be_evaluated(&self) -> bool {
        self.forward == Progress::Done
            && !self.upstream.answered
            && matches!(self.answer, Answer::Own | Answer::Evaluated)
            && self.grant().is_some()
    }

    /// Marks the forward pass as running on a device. Returns the activation that it reads.
    pub(super) fn start_forward(&mut self, device: DeviceIndex) -> Option<PayloadId> {
        self.forward = Progress::Running;
        self.device = Some(device);
        match self.input {
            Input::Here(payload) => Some(payload.id),
            _ => None,
        }
    }

    /// Marks the backward pass as running. Returns the gradient that it reads.
    pub(super) fn start_backward(&mut self) -> Option<PayloadId> {
        assert!(self.grant().is_some(), "no backward pass without its claim");
        self.backward = Progress::Running;
        match self.answer {
            Answer::Here(payload) => Some(payload.id),
            _ => None,
        }
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
        let overdue = now.since(available_at) >= patience;
        match (self.forward, self.backward) {
            (Progress::Waiting, _) => self.can_run_forward() && runnable && overdue,
            (Progress::Running, _) => overdue,
            (Progress::Done, Progress::Done) => false,
            (Progress::Done, _) => matches!(self.answer, Answer::Own | Answer::Here(_)) && overdue,
        }
    }

    /// Whether the work waits for an activation that no sender is left to send. The replacement of its
    /// senders offers it again, and may need the room that it occupies.
    pub(super) fn is_deserted(&self) -> bool {
        self.upstream.senders.is_empty()
            && self.input == Input::Expected
            && self.forward == Progress::Waiting
    }

    /// Answers a sender: with the gradient of its activation or, for held-out data, with the end of
    /// the evaluation.
    pub(super) fn answer(&self, to: Member, key: ClaimKey, out: &mut Vec<PeerAction>) {
        let key = key.upstream().expect("the first stage answers no sender");
        match self.input_gradient {
            Some(gradient) => {
                let tag = TensorTag::ActivationGradient { key };
                out.push(PeerAction::SendTensor { to, tag, payload: gradient.id });
            }
            None => out.push(PeerAction::Send { to, message: PeerMessage::Evaluated { key } }),
        }
    }
}
