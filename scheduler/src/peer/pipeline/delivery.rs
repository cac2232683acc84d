//! The delivery of the activations of one job.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Exchange, Member};
use shoal_protocol::message::TensorTag;
use shoal_protocol::units::Moment;

use super::job::Job;
use crate::action::{Payload, PeerAction};
use crate::peer::Out;
use crate::peer::senders::Host;

/// The delivery of one job's activations, of which almost every job has one, and those at the last stage none.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    pub(super) route: Route,
    /// Another replica may hold the job's claim.
    pub(super) is_contested: bool,
    /// The activation was offered before.
    pub(super) was_offered: bool,
    /// The activation is needed again although its answer arrived: its receiver is gone.
    pub(super) needs_replay: bool,
    /// The known holder of the next stage's claim.
    pub(super) next_holder: Option<Member>,
    /// The members that the activation was offered or sent to: answers of no other count.
    pub(super) asked: BTreeSet<Member>,
    /// The activation of each exchange so far, in the output log.
    pub(super) outputs: Vec<Payload>,
    /// The present receiver has the activations before this one.
    reached: u32,
    /// The first activation that was not sent to it.
    unsent: u32,
}

/// The route of an activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Route {
    #[default]
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
            Self::Unrouted | Self::Blocked { .. } => None,
        }
    }
}

impl Job {
    /// Whether the activation still has to reach a replica of the next stage.
    pub(super) fn must_deliver(&self) -> bool {
        !self.exchanges.are_answered() || self.delivery.needs_replay
    }

    /// Whether the activation may be offered. Contested work waits for its claim: if another replica
    /// holds that, the activation never comes, and an offer would occupy room at every later stage.
    pub(super) fn may_offer(&self) -> bool {
        let Delivery { route, is_contested, .. } = self.delivery;
        self.must_deliver() && (self.grant().is_some() || !is_contested) && route == Route::Unrouted
    }

    /// The receiver has room, and lacks the activations from `wanted` on. Those whose answer is lacking here are sent
    /// too: the receiver then answers again.
    pub(super) fn accept(&mut self, to: Host, wanted: Exchange) {
        let to = to.member();
        let wanted = wanted.min(self.exchanges.last());
        self.delivery.route = Route::Accepted { to };
        self.delivery.asked.insert(to);
        self.delivery.reached = wanted.0;
        self.delivery.unsent = wanted.min(self.exchanges.unanswered()).0;
    }

    /// The receiver has answered an exchange: those after it may follow.
    pub(super) fn note_reached(&mut self, exchange: Exchange) {
        let answered = exchange.min(self.exchanges.last()).0 + 1;
        self.delivery.reached = self.delivery.reached.max(answered);
    }

    /// Sends the activations that are both computed and accepted, up to the end of the receiver's update.
    pub(super) fn send_outputs(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let delivery = &mut self.delivery;
        let (Route::Accepted { to } | Route::Sent { to, .. }) = delivery.route else { return };
        let end = self.exchanges.end_of_update_after(delivery.reached);
        while delivery.unsent < end
            && let Some(output) = delivery.outputs.get(delivery.unsent as usize)
        {
            delivery.route = Route::Sent { to, at: now };
            let exchange = Exchange(delivery.unsent);
            let tag = TensorTag::Activation { key: key.downstream(), exchange };
            out.push(PeerAction::send_tensor(to, tag, output));
            delivery.unsent += 1;
        }
    }
}
