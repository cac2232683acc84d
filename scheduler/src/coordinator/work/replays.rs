//! Replays: activations that are requested again because the work that starts from them is unclaimed.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};
use shoal_protocol::message::FromCoordinator;
use shoal_protocol::units::Moment;

use super::super::context::Context;
use super::super::{Out, send};
use super::open_steps::OpenSteps;

/// Keys in one replay message: far under the cap of a message.
const KEYS: usize = 4096;

/// Retries between two checks for unclaimed work.
const CHECKS: u32 = 4;

/// Requests for activations that must be sent again.
#[derive(Debug, Default)]
pub(super) struct Replays {
    /// The work that was unclaimed at the last check.
    unclaimed: BTreeMap<Step, BTreeSet<(Stage, Microbatch)>>,
    /// When the next check is, and activations are requested again.
    at: Option<Moment>,
}

impl Replays {
    /// The time of the next check.
    pub(super) fn at(&self) -> Option<Moment> {
        self.at
    }

    /// Sets the time of the next check, if none is set.
    pub(super) fn schedule(&mut self, at: Moment) {
        self.at.get_or_insert(at);
    }

    /// Checks no more until the next step opens.
    pub(super) fn cancel(&mut self) {
        self.at = None;
    }

    /// Requests the activation of one claim that was just released. Other missing activations have been
    /// requested, and are in time requested again; doing so at each release would be too often.
    pub(super) fn replay_one(
        &mut self,
        context: &Context,
        steps: &OpenSteps,
        key: ClaimKey,
        out: &mut Out,
    ) {
        let ledger = steps.ledger(key.step).filter(|_| !context.progress.is_suspended());
        let Some((holder, upstream)) = ledger.and_then(|ledger| ledger.upstream_holder(key)) else {
            return;
        };
        send(holder, FromCoordinator::Replay { keys: vec![upstream] }, out);
        let again = context.retry_at();
        self.at = Some(self.at.map_or(again, |at| at.min(again)));
    }

    /// Requests activations again whose receivers are gone, until the work is claimed.
    pub(super) fn replay(&mut self, context: &Context, steps: &OpenSteps, out: &mut Out) {
        self.send_requests(context, steps, &BTreeMap::new(), out);
    }

    /// Also requests the activations of work that was unclaimed at the last check and still is: a message was
    /// lost.
    pub(super) fn replay_unclaimed(&mut self, context: &Context, steps: &OpenSteps, out: &mut Out) {
        // Of a step whose weights have yet to come, no activation exists.
        let open = steps.ledgers().filter(|(step, _)| context.has_weights_of(*step));
        let unclaimed = open.map(|(step, ledger)| (step, ledger.unclaimed())).collect();
        let before = std::mem::replace(&mut self.unclaimed, unclaimed);
        self.send_requests(context, steps, &before, out);
    }

    fn send_requests(
        &mut self,
        context: &Context,
        steps: &OpenSteps,
        unclaimed: &BTreeMap<Step, BTreeSet<(Stage, Microbatch)>>,
        out: &mut Out,
    ) {
        if context.progress.is_suspended() {
            return;
        }
        let none = BTreeSet::new();
        let mut waits = false;
        for (step, ledger) in steps.ledgers() {
            for (holder, keys) in ledger.to_replay(unclaimed.get(&step).unwrap_or(&none)) {
                waits = true;
                for keys in keys.chunks(KEYS) {
                    send(holder, FromCoordinator::Replay { keys: keys.to_vec() }, out);
                }
            }
        }
        let retry = context.config.retry;
        let again = if waits { retry } else { retry * CHECKS };
        self.at = (!steps.is_empty()).then(|| context.now + again);
    }
}
