//! Injected errors. Each must be caught by an oracle or by the proofs that travel with every round.

use shoal_protocol::ids::ClaimKey;
use shoal_protocol::message::{FromCoordinator, PeerMessage, TensorTag, ToCoordinator};

use super::integer_model::mix;
use crate::action::{CoordinatorAction, PeerAction, Task};

/// An injected error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests put errors in"))]
pub(super) enum Corruption {
    /// No error.
    Nothing,
    /// An addition to an accumulator is performed and reported twice.
    CountTwice,
    /// An addition is reported but not performed.
    CountNever,
    /// The coordinator's close omits a microbatch.
    DropFromClose,
    /// Peers apply a round's result before its commit.
    ApplyWithoutCommit,
    /// A member that is refused a claim takes it all the same.
    IgnoreHeld,
    /// A collector adds one member's integers twice.
    CollectTwice {
        /// The peer.
        peer: usize,
    },
    /// A collector omits one member's integers.
    CollectWithout {
        /// The peer.
        peer: usize,
    },
    /// A peer lies about the sums of rounds.
    Forge {
        /// The peer.
        peer: usize,
        /// The lie.
        lie: SumLie,
    },
    /// A peer computes wrongly.
    Miscompute {
        /// The peer.
        peer: usize,
        /// What it gets wrong.
        error: ComputeError,
        /// In one of so many passes.
        every: u64,
    },
    /// Two peers of one stage get the same wrong.
    Collude {
        /// The peers.
        peers: [usize; 2],
        /// In one of so many passes.
        every: u64,
    },
    /// A peer hands over something else than it states.
    HandOver {
        /// The peer.
        peer: usize,
        /// The lie.
        lie: HandoverLie,
        /// About one of so many microbatches.
        every: u64,
    },
    /// One piece of a round carries a wrong proof.
    WrongProof,
    /// A tensor is never released.
    KeepPayload,
    /// Acceptances are lost.
    LoseAcceptances,
    /// Two gradients of an update of a virtual worker change places.
    SwapExchanges,
    /// A virtual worker joins no meeting on its way.
    JoinNever,
    /// Changes to views and round groups never apply to a member's known version. That is no error:
    /// it requests the whole.
    BreakChanges,
    /// A peer reports a tenth of its service time. That is no error: its observed speed outweighs
    /// its report.
    ExaggerateSpeed {
        /// The peer.
        peer: usize,
    },
}

/// A lie about the sums of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests put errors in"))]
pub(super) enum SumLie {
    /// The pieces that it reduces are another sum.
    Results,
    /// It says of all pieces that it gave more.
    GaveAll,
    /// It says so of the pieces of one member, each time.
    GaveFirst,
}

/// A lie about a tensor that one member hands to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests put errors in"))]
pub(super) enum HandoverLie {
    /// It sends another activation or gradient than it states, and seals it.
    Sends,
    /// It sends auditors another input than the one that it handed over, and seals it.
    Recalls,
    /// It states another activation than it took.
    States,
    /// It states no activation that it took.
    Omits,
}

/// Whether a peer lies about a microbatch, if it does about one of so many.
pub(super) fn lies_about(key: ClaimKey, every: u64) -> bool {
    let words = [key.step.0, key.stage.0.into(), key.microbatch.0.into()];
    mix(&words).is_multiple_of(every)
}

/// What a peer computes wrongly, on purpose or because its machine is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests put errors in"))]
pub(super) enum ComputeError {
    /// One element of a weight gradient.
    Gradient,
    /// A whole weight gradient, which is zero.
    Nothing,
    /// One bit of one element of a weight gradient.
    Bit(u8),
    /// A whole weight gradient, which is that of other weights.
    Stale,
    /// The labels of the last stage.
    Labels,
    /// One element of a weight gradient, as its accomplices do.
    Alike,
    /// The activation that goes on.
    Output,
    /// The gradient that goes back.
    Returned,
}

impl Corruption {
    /// Whether peers add up something else than they should.
    pub(super) fn makes_wrong_sums(self) -> bool {
        matches!(self, Self::Miscompute { .. } | Self::Collude { .. })
    }

    /// Whether peers send wrong parts of a result, which are found before it counts. In a mended round right ones follow.
    pub(super) fn gives_wrong_results(self) -> bool {
        self.makes_wrong_sums() || matches!(self, Self::Forge { lie: SumLie::Results, .. })
    }

    /// Corrupts an action of the coordinator.
    pub(super) fn coordinator_action(self, action: &mut CoordinatorAction) {
        let CoordinatorAction::Send { message, .. } = action else { return };
        match (self, &mut *message) {
            (Self::DropFromClose, FromCoordinator::Close { counted, .. }) => {
                counted.pop();
            }
            (Self::BreakChanges, FromCoordinator::View(change)) => change.since = u64::MAX,
            (Self::BreakChanges, FromCoordinator::Close { group, .. })
                if group.since != group.number =>
            {
                group.since = u64::MAX;
            }
            (Self::IgnoreHeld, FromCoordinator::Held { key, .. }) => {
                let grant = shoal_protocol::ids::Grant { number: u64::MAX, ..Default::default() };
                *message = FromCoordinator::Granted { key: *key, grant, next_holder: None };
            }
            _ => {}
        }
    }

    /// Corrupts a peer's action. Returns false if it is to be dropped.
    pub(super) fn peer_action(self, of: usize, action: &mut PeerAction) -> bool {
        match (self, action) {
            (Self::ExaggerateSpeed { peer }, action) if peer == of => {
                exaggerate_speed(action);
                true
            }
            (
                Self::HandOver { peer, lie, every },
                PeerAction::ToCoordinator(ToCoordinator::Done { key, handover, .. }),
            ) if peer == of && lies_about(*key, every) => {
                match (lie, &mut handover.activation) {
                    (HandoverLie::States, Some(taken)) => taken.hash.0[0] ^= 1,
                    (HandoverLie::Omits, taken) => *taken = None,
                    _ => {}
                }
                true
            }
            (Self::WrongProof, PeerAction::SendTensor { tag, .. }) => {
                if let TensorTag::RoundPart { proof, .. } = tag {
                    *proof ^= 1;
                }
                true
            }
            (Self::CollectTwice { peer }, PeerAction::Compute(Task::Export { parts, .. }))
                if peer == of =>
            {
                parts.extend(parts.first().copied());
                true
            }
            (Self::CollectWithout { peer }, PeerAction::Compute(Task::Export { parts, .. }))
                if peer == of =>
            {
                parts.pop();
                true
            }
            (Self::SwapExchanges, PeerAction::SendTensor { tag, .. }) => {
                if let TensorTag::ActivationGradient { exchange, .. } = tag {
                    exchange.0 ^= 1;
                }
                true
            }
            (Self::KeepPayload, PeerAction::Release(id)) => id.0 != 1,
            (
                Self::LoseAcceptances,
                PeerAction::Send { message: PeerMessage::Accepted { .. }, .. },
            ) => false,
            _ => true,
        }
    }
}

/// Divides every reported duration by ten.
fn exaggerate_speed(action: &mut PeerAction) {
    match action {
        PeerAction::ToCoordinator(ToCoordinator::WorkRequest { service_time, .. })
        | PeerAction::Send {
            message:
                PeerMessage::Accepted { service_time, .. } | PeerMessage::Busy { service_time, .. },
            ..
        } => *service_time = service_time.div_ceil(10),
        PeerAction::ToCoordinator(ToCoordinator::Done { pass_times, .. }) => {
            pass_times.forward /= 10;
            pass_times.backward /= 10;
        }
        _ => {}
    }
}
