//! The delivery of the activations of one job.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Exchange, Member};
use shoal_protocol::message::TensorTag;
use shoal_protocol::units::Moment;

use super::exchanges::end_of_update;
use crate::action::{Payload, PeerAction};
use crate::peer::Out;
use crate::peer::senders::Host;

/// The delivery of one job's activations, of which almost every job has one.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) route: Route,
    /// Another replica may hold the job's claim.
    pub(super) is_contested: bool,
    /// This peer holds the job's claim.
    pub(super) is_granted: bool,
    /// The activation was offered before.
    pub(super) was_offered: bool,
    /// The next stage's answer arrived, or none is due.
    pub(super) is_answered: bool,
    /// The activation is needed again although its answer arrived: its receiver is gone.
    pub(super) needs_replay: bool,
    /// The known holder of the next stage's claim.
    pub(super) next_holder: Option<Member>,
    /// The members that the activation was offered or sent to: answers of no other count.
    pub(super) asked: BTreeSet<Member>,
    /// The activation of each exchange so far, in the output log.
    pub(super) outputs: Vec<Payload>,
    pub(super) exchanges: Progress,
}

/// How far the exchanges of a delivery are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) count: u32,
    /// Those that may be under way together.
    pub(super) at_once: u32,
    /// The first whose answer has not arrived, from any receiver.
    pub(super) unanswered: u32,
    /// The present receiver has the activations before this one.
    pub(super) reached: u32,
    /// The first that was not sent to it.
    pub(super) unsent: u32,
}

impl Progress {
    pub(super) fn new((count, at_once): (u32, u32)) -> Self {
        Self { count, at_once, unanswered: 0, reached: 0, unsent: 0 }
    }
}

/// The route of an activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// This is the last stage.
    Nowhere,
    Unrouted,
    Offered {
        to: Member,
        at: Moment,
    },
    /// No replica has room.
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
    /// The chosen receiver.
    pub(super) fn to(self) -> Option<Member> {
        match self {
            Self::Offered { to, .. } | Self::Accepted { to } | Self::Sent { to, .. } => Some(to),
            Self::Nowhere | Self::Unrouted | Self::Blocked { .. } => None,
        }
    }
}

impl Delivery {
    /// The delivery of a job at a stage before the last.
    pub(super) fn new(is_contested: bool, is_granted: bool, exchanges: Progress) -> Self {
        Self {
            route: Route::Unrouted,
            is_contested,
            is_granted,
            was_offered: false,
            is_answered: false,
            needs_replay: false,
            next_holder: None,
            asked: BTreeSet::new(),
            outputs: Vec::new(),
            exchanges,
        }
    }

    /// The delivery of a job at the last stage, which has no activation.
    pub(super) fn none() -> Self {
        Self {
            route: Route::Nowhere,
            is_answered: true,
            ..Self::new(false, false, Progress::new((1, 1)))
        }
    }

    /// Whether the activation still has to reach a replica of the next stage.
    pub(super) fn is_due(&self) -> bool {
        !self.is_answered || self.needs_replay
    }

    /// Whether the activation may be offered. Contested work waits for its claim: if another replica
    /// holds that, the activation never comes, and an offer would occupy room at every later stage.
    pub(super) fn may_offer(&self) -> bool {
        self.is_due() && (self.is_granted || !self.is_contested) && self.route == Route::Unrouted
    }

    /// The receiver has room, and lacks the activations from `wanted` on. Those whose answer is lacking here are sent
    /// too: the receiver then answers again.
    pub(super) fn accept(&mut self, to: Host, wanted: Exchange) {
        let to = to.member();
        self.route = Route::Accepted { to };
        self.asked.insert(to);
        let wanted = wanted.0.min(self.exchanges.count - 1);
        self.exchanges.reached = wanted;
        self.exchanges.unsent = wanted.min(self.exchanges.unanswered);
    }

    /// Sends the activations that are both computed and accepted, up to the end of the receiver's update.
    pub(super) fn send(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let (Route::Accepted { to } | Route::Sent { to, .. }) = self.route else { return };
        let exchanges = &mut self.exchanges;
        let end = end_of_update(exchanges.at_once, exchanges.reached);
        while exchanges.unsent < end
            && let Some(output) = self.outputs.get(exchanges.unsent as usize)
        {
            self.route = Route::Sent { to, at: now };
            let tag = TensorTag::Activation {
                key: key.downstream(),
                exchange: Exchange(exchanges.unsent),
            };
            out.push(PeerAction::send_tensor(to, tag, output));
            exchanges.unsent += 1;
        }
    }
}
