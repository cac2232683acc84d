//! Errors put in on purpose: each must be caught by an oracle or by what travels with every round.

use shoal_protocol::message::{FromCoordinator, PeerMessage, TensorTag, ToCoordinator};

use crate::action::{CoordinatorAction, PeerAction};

/// One error that a swarm is run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests put errors in"))]
pub(super) enum Corruption {
    /// None.
    Nothing,
    /// An addition to an accumulator is done and reported twice.
    CountTwice,
    /// An addition is reported and not done.
    CountNever,
    /// The coordinator's close leaves a microbatch out.
    DropFromClose,
    /// Peers apply a round's result before its commit.
    ApplyWithoutCommit,
    /// Who is refused a claim takes it all the same.
    IgnoreHeld,
    /// One piece of a round claims another proof.
    WrongProof,
    /// A tensor is never released.
    KeepPayload,
    /// Acceptances do not arrive.
    LoseAcceptances,
    /// No change of a membership or a crew begins from what a member has. That is no error: it asks for
    /// the whole.
    BreakChanges,
    /// A peer says that it needs a tenth of the time that it does. That is no error: what is seen of it
    /// outweighs what it says.
    Boast {
        /// Which.
        peer: usize,
    },
}

impl Corruption {
    /// Changes what the coordinator wants done.
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

    /// Changes what a peer wants done; false is not to be done at all.
    pub(super) fn peer_action(self, of: usize, action: &mut PeerAction) -> bool {
        match (self, action) {
            (Self::Boast { peer }, action) if peer == of => {
                boast(action);
                true
            }
            (Self::WrongProof, PeerAction::SendTensor { tag, .. }) => {
                if let TensorTag::RoundPart { proof, .. } = tag {
                    *proof ^= 1;
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

/// Whatever says how long something takes says a tenth.
fn boast(action: &mut PeerAction) {
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
