//! Rules left out on purpose, at the border between the machines and the world: words are dropped
//! or changed as if who says or hears them did not keep the rule.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Attempt, ClaimKey, Era, Grant, Member, Stage, Step};
use shoal_protocol::message::{
    FromCoordinator, PassTimes, PeerMessage, TensorTag, ToCoordinator, ViewChange,
};

use crate::action::PeerAction;

/// A rule that nobody keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests leave rules out"))]
pub(crate) enum Omit {
    /// All are kept.
    Nothing,
    /// Activations are sent again where nobody holds the work.
    Replay,
    /// Everybody who asked is answered.
    AnswerAll,
    /// A done report and a release name their grant.
    GrantNumbers,
    /// Words of an earlier era are dropped.
    Eras,
    /// Words of an earlier term's coordinator are dropped.
    Terms,
    /// A new coordinator grants nothing before everybody said what it holds.
    Census,
    /// Words and pieces of an earlier attempt are dropped.
    Attempts,
    /// What a member sent for a round is sent again, once its sums changed.
    Mends,
    /// A newcomer serves when it is ready.
    Readiness,
    /// A member's claims are revoked when it is expelled.
    Revocation,
    /// A round with a member that is gone is given up.
    Abort,
    /// A life that was expelled is not admitted again.
    Lives,
    /// Who is asked for its work lets go of it.
    Reclaim,
}

/// What must be known to leave a rule out.
#[derive(Debug)]
pub(super) struct OmittedRules {
    pub(super) omit: Omit,
    /// Whom each member answered first.
    answered: BTreeMap<(Member, ClaimKey), Member>,
    /// The newest grant that each member was told of.
    grants: BTreeMap<(Member, ClaimKey), Grant>,
    /// The newest attempt that each member was told of.
    attempts: BTreeMap<(Member, Era, Step, Stage), Attempt>,
}

impl OmittedRules {
    pub(super) fn new(omit: Omit) -> Self {
        let (answered, grants) = (BTreeMap::new(), BTreeMap::new());
        Self { omit, answered, grants, attempts: BTreeMap::new() }
    }

    /// Changes what a peer wants done; false is not to be done at all.
    pub(super) fn sent(&mut self, me: Member, action: &PeerAction) -> bool {
        let (key, to) = match action {
            PeerAction::SendTensor { to, tag: TensorTag::ActivationGradient { key }, .. }
            | PeerAction::Send { to, message: PeerMessage::Evaluated { key } } => (*key, *to),
            _ => return true,
        };
        self.omit != Omit::AnswerAll || *self.answered.entry((me, key)).or_insert(to) == to
    }

    /// Changes what a member is told; false is not told at all.
    pub(super) fn told(&mut self, to: Member, message: &mut FromCoordinator) -> bool {
        match message {
            FromCoordinator::Replay { .. } => return self.omit != Omit::Replay,
            FromCoordinator::Granted { key, grant, .. } => {
                let known = self.grants.insert((to, *key), *grant);
                if let (true, Some(answer)) = (known != Some(*grant), key.upstream()) {
                    // It has taken the work anew.
                    self.answered.remove(&(to, answer));
                }
            }
            FromCoordinator::Reclaim { patience, .. } if self.omit == Omit::Reclaim => {
                *patience = PassTimes { forward: Duration::MAX, backward: Duration::MAX };
            }
            FromCoordinator::Close { round: id, mended, .. } => {
                self.attempts.insert((to, id.era, id.step, id.stage), id.attempt);
                if self.omit == Omit::Mends {
                    mended.changed.clear();
                }
            }
            FromCoordinator::View(ViewChange { here: members, .. })
            | FromCoordinator::Members { members, .. }
                if self.omit == Omit::Readiness =>
            {
                members.iter_mut().for_each(|record| Arc::make_mut(record).serving = true);
            }
            _ => {}
        }
        true
    }

    /// Changes what the coordinator hears.
    pub(super) fn reported(&self, from: Member, message: &mut ToCoordinator) {
        match message {
            ToCoordinator::Done { key, grant, .. } | ToCoordinator::Released { key, grant }
                if self.omit == Omit::GrantNumbers =>
            {
                *grant = self.grants.get(&(from, *key)).copied().unwrap_or(*grant);
            }
            ToCoordinator::Reduced { round, .. } if self.omit == Omit::Attempts => {
                let newest = (from, round.era, round.step, round.stage);
                round.attempt = self.attempts.get(&newest).copied().unwrap_or(round.attempt);
            }
            _ => {}
        }
    }

    /// Changes what a tensor says it is.
    pub(super) fn tagged(&self, to: Member, tag: &mut TensorTag) {
        if let (TensorTag::RoundPart { round, .. } | TensorTag::RoundResult { round, .. }, true) =
            (tag, self.omit == Omit::Attempts)
        {
            let newest = (to, round.era, round.step, round.stage);
            round.attempt = self.attempts.get(&newest).copied().unwrap_or(round.attempt);
        }
    }
}
