//! Rules omitted on purpose, at the boundary between state machines and world: messages are dropped
//! or changed as if the sender or receiver ignored the rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{
    Attempt, ClaimKey, Era, Exchange, Grant, Member, Stage, Step, WeightGroup,
};
use shoal_protocol::message::{
    FromCoordinator, PROJECTIONS, PassTimes, PeerMessage, RoundCheck, StoredFile, TensorTag,
    ToCoordinator, ViewChange,
};

use crate::action::PeerAction;

/// An omitted rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests leave rules out"))]
pub(crate) enum Omit {
    /// All rules hold.
    Nothing,
    /// Activations are sent again when their work has no holder.
    Replay,
    /// All peers that asked are answered.
    AnswerAll,
    /// All activations of a virtual worker are kept, for a peer that takes a stage over.
    Exchanges,
    /// Completion reports and releases name their grant.
    GrantNumbers,
    /// Messages of an earlier era are dropped.
    Eras,
    /// Messages of an earlier term's coordinator are dropped.
    Terms,
    /// A new term needs the majority of the anchors.
    Majority,
    /// A new coordinator grants nothing before all members have reported their state.
    Census,
    /// Messages and pieces of an earlier attempt are dropped.
    Attempts,
    /// A member sends its sums for a round again after they changed.
    Mends,
    /// A newcomer serves only when it is ready.
    Readiness,
    /// An expelled member's claims are revoked.
    Revocation,
    /// A round with a lost member is aborted.
    Abort,
    /// An expelled incarnation is not admitted again.
    Lives,
    /// A member releases a claim on a revocation request.
    Reclaim,
    /// What the running task needs stays on the device.
    InUse,
    /// An accumulator that leaves the device is written to the tier below.
    SumsLeave,
    /// A pass reads the present version of a stage, not the one that was there when it was fetched ahead.
    PrefetchVersions,
    /// Room is made on the device before something is loaded.
    Room,
    /// Peers measure how long a pass waited for its stage.
    LoadTimes,
    /// Messages between members, and tensors, count by their senders.
    Senders,
    /// One member's alarm does not stop the run.
    Alarms,
    /// One member's word does not expel another.
    Witnesses,
    /// Replicas that wrote a stage must agree on it.
    Writers,
    /// The result of a round is compared with what its members gave.
    Sums,
}

/// State needed to omit a rule.
#[derive(Debug)]
pub(super) struct OmittedRules {
    pub(super) omit: Omit,
    /// The first peer that each member answered.
    answered: BTreeMap<(Member, ClaimKey), Member>,
    /// Activations of virtual workers after the first, and their senders.
    exchanged: BTreeSet<(Member, ClaimKey, Exchange)>,
    /// The newest grant sent to each member.
    grants: BTreeMap<(Member, ClaimKey), Grant>,
    /// The first files that were reported of each stage and version.
    written: BTreeMap<(Step, Stage), Vec<StoredFile>>,
    /// The newest attempt sent to each member.
    attempts: BTreeMap<(Member, Era, Step, WeightGroup), Attempt>,
}

impl OmittedRules {
    pub(super) fn new(omit: Omit) -> Self {
        let (answered, grants) = (BTreeMap::new(), BTreeMap::new());
        let (exchanged, attempts) = (BTreeSet::new(), BTreeMap::new());
        Self { omit, answered, exchanged, grants, written: BTreeMap::new(), attempts }
    }

    /// Filters a peer's action. Returns false if it is to be dropped.
    pub(super) fn sent_by_peer(&mut self, me: Member, action: &PeerAction) -> bool {
        let (key, to) = match action {
            PeerAction::SendTensor { tag: TensorTag::Activation { key, exchange }, .. } => {
                let is_later = exchange.0 > 0 && self.omit == Omit::Exchanges;
                return !is_later || self.exchanged.insert((me, *key, *exchange));
            }
            PeerAction::SendTensor {
                to, tag: TensorTag::ActivationGradient { key, .. }, ..
            }
            | PeerAction::Send { to, message: PeerMessage::Evaluated { key } } => (*key, *to),
            _ => return true,
        };
        self.omit != Omit::AnswerAll || *self.answered.entry((me, key)).or_insert(to) == to
    }

    /// Changes a message to a member. Returns false if it is to be dropped.
    pub(super) fn sent_to_member(&mut self, to: Member, message: &mut FromCoordinator) -> bool {
        match message {
            FromCoordinator::Replay { .. } => return self.omit != Omit::Replay,
            FromCoordinator::Granted { key, grant, .. } => {
                let known = self.grants.insert((to, *key), *grant);
                if let (true, Some(answer)) = (known != Some(*grant), key.upstream()) {
                    // It accepted the work anew.
                    self.answered.remove(&(to, answer));
                }
            }
            FromCoordinator::Reclaim { patience, .. } if self.omit == Omit::Reclaim => {
                *patience = PassTimes { forward: Duration::MAX, backward: Duration::MAX };
            }
            FromCoordinator::Close { round: id, mended, .. } => {
                self.attempts.insert((to, id.era, id.step, id.weights), id.attempt);
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

    /// The newest claims that were granted to a member.
    pub(super) fn grants_of(&self, member: Member) -> Vec<(ClaimKey, Grant)> {
        let of = self.grants.iter().filter(|((holder, _), _)| *holder == member);
        of.map(|((_, key), grant)| (*key, *grant)).rev().take(16).collect()
    }

    /// Changes a message to the coordinator.
    pub(super) fn reported(&mut self, from: Member, message: &mut ToCoordinator) {
        match message {
            ToCoordinator::Done { key, grant, .. } | ToCoordinator::Released { key, grant }
                if self.omit == Omit::GrantNumbers =>
            {
                *grant = self.grants.get(&(from, *key)).copied().unwrap_or(*grant);
            }
            ToCoordinator::Stored { version, stage, files } if self.omit == Omit::Writers => {
                let first = self.written.entry((*version, *stage)).or_insert_with(|| files.clone());
                files.clone_from(first);
            }
            ToCoordinator::Reduced { checks, .. } if self.omit == Omit::Sums => {
                let nothing =
                    RoundCheck { own: [0.0; PROJECTIONS], result: [0.0; PROJECTIONS], slack: 0.0 };
                checks.fill(nothing);
            }
            ToCoordinator::Reduced { round, .. } if self.omit == Omit::Attempts => {
                let newest = (from, round.era, round.step, round.weights);
                round.attempt = self.attempts.get(&newest).copied().unwrap_or(round.attempt);
            }
            _ => {}
        }
    }

    /// Changes the tag of a tensor.
    pub(super) fn tagged(&self, to: Member, tag: &mut TensorTag) {
        if let (TensorTag::RoundPart { round, .. } | TensorTag::RoundResult { round, .. }, true) =
            (tag, self.omit == Omit::Attempts)
        {
            let newest = (to, round.era, round.step, round.weights);
            round.attempt = self.attempts.get(&newest).copied().unwrap_or(round.attempt);
        }
    }
}
