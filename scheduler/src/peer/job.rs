//! The life of one microbatch at one stage.

use shoal_protocol::ids::{ClaimKey, Grant, Member};
use shoal_protocol::message::{FixedLoss, PassTimes};
use shoal_protocol::units::Moment;

use crate::action::Payload;

/// One microbatch at one stage, from its acceptance until its step is committed.
#[derive(Debug)]
pub(super) struct Job {
    /// Who sent it, or would have, in the order in which they asked: each gets the answer. Nobody at
    /// the first stage.
    pub(super) askers: Vec<Member>,
    pub(super) claim: Claim,
    /// Another replica may have taken it too: nothing of it goes onward before its claim is granted.
    pub(super) contested: bool,
    pub(super) input: Input,
    /// When its sender was last told that it may come.
    pub(super) accepted_at: Moment,
    pub(super) forward: Progress,
    /// The activation, in the output log.
    pub(super) output: Option<Payload>,
    pub(super) route: Route,
    /// The activation was offered to somebody.
    pub(super) offered: bool,
    /// The answer came, and the activation is needed again all the same: who had it is gone.
    pub(super) replay: bool,
    /// Who holds the next stage's claim, where the ledger told.
    pub(super) holder: Option<Member>,
    pub(super) answer: Answer,
    pub(super) backward: Progress,
    /// The gradient of the input, in the output log.
    pub(super) returned: Option<Payload>,
    pub(super) loss: Option<FixedLoss>,
    /// Whether the microbatch takes up room.
    pub(super) holds_room: bool,
    /// Whether upstream has its answer: the gradient or, held out, the word that it is evaluated.
    pub(super) answered: bool,
    pub(super) report: Report,
    /// Since when the pass that comes next has had what it needs, the weights aside.
    pub(super) ready_at: Moment,
    /// How long the passes took that ended.
    pub(super) pass_times: PassTimes,
}

/// The right to count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    Asked { at: Moment },
    Granted(Grant),
}

/// What the forward pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// The first stage reads its samples itself.
    Samples,
    Expected,
    Here(Payload),
    Used,
}

/// How far a pass is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Waiting,
    Running,
    Done,
}

/// Where the activation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// This is the last stage.
    Nowhere,
    Unrouted,
    Offered {
        to: Member,
        at: Moment,
    },
    /// Nobody has room.
    Blocked {
        since: Moment,
    },
    Accepted {
        to: Member,
    },
    Sent {
        to: Member,
        at: Moment,
    },
}

impl Route {
    /// Who was chosen, if anybody is.
    pub(super) fn to(self) -> Option<Member> {
        match self {
            Self::Offered { to, .. } | Self::Accepted { to } | Self::Sent { to, .. } => Some(to),
            Self::Nowhere | Self::Unrouted | Self::Blocked { .. } => None,
        }
    }
}

/// What comes back from downstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Expected,
    /// The last stage starts from its own loss.
    Own,
    Here(Payload),
    Evaluated,
    Used,
}

/// What the coordinator knows of the work's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    NotDone,
    Sent { at: Moment },
    Noted,
}

impl Job {
    pub(super) fn new(key: ClaimKey, from: Option<Member>, claim: Claim, last: bool) -> Self {
        assert_eq!(from.is_none(), key.stage.0 == 0, "who is asked has an asker");
        Self {
            askers: from.into_iter().collect(),
            claim,
            contested: false,
            accepted_at: Moment::default(),
            input: if from.is_none() { Input::Samples } else { Input::Expected },
            forward: Progress::Waiting,
            output: None,
            route: if last { Route::Nowhere } else { Route::Unrouted },
            offered: false,
            replay: false,
            holder: None,
            answer: if last { Answer::Own } else { Answer::Expected },
            backward: Progress::Waiting,
            returned: None,
            loss: None,
            holds_room: true,
            answered: false,
            report: Report::NotDone,
            ready_at: Moment::default(),
            pass_times: PassTimes::default(),
        }
    }

    pub(super) fn grant(&self) -> Option<Grant> {
        match self.claim {
            Claim::Granted(grant) => Some(grant),
            Claim::Asked { .. } => None,
        }
    }

    /// Whether its activation still has to reach somebody.
    pub(super) fn must_go_on(&self) -> bool {
        self.answer == Answer::Expected || self.replay
    }

    pub(super) fn can_run_forward(&self) -> bool {
        self.forward == Progress::Waiting && matches!(self.input, Input::Samples | Input::Here(_))
    }

    /// Counting needs the claim, and counting follows the backward pass at once.
    pub(super) fn can_run_backward(&self) -> bool {
        self.forward == Progress::Done
            && self.backward == Progress::Waiting
            && matches!(self.answer, Answer::Own | Answer::Here(_))
            && self.grant().is_some()
    }

    /// Whether a held-out microbatch has come to its end and back.
    pub(super) fn can_be_evaluated(&self) -> bool {
        self.forward == Progress::Done
            && !self.answered
            && matches!(self.answer, Answer::Own | Answer::Evaluated)
            && self.grant().is_some()
    }
}
