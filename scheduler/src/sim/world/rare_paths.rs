//! Recognises the rare paths that a run takes, and counts them.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Exchange, Grant, Member, Mend, Step};
use shoal_protocol::message::{FromCoordinator, PeerMessage, RoundId, TensorTag, ToCoordinator};

use crate::action::{CoordinatorAction, CoordinatorEvent, PeerAction, PeerInput, Task};
use crate::sim::marks::{Mark, Marks};

/// State needed to recognise rare paths.
#[derive(Debug, Default)]
pub(super) struct RarePaths {
    /// Work of uncommitted steps that the coordinator acknowledged as done.
    noted: BTreeSet<ClaimKey>,
    /// Work that was offered again after members were lost.
    rerouted: BTreeSet<(Member, ClaimKey)>,
    /// Activations of virtual workers after the first, and their senders.
    exchanged: BTreeSet<(Member, ClaimKey, Exchange)>,
    /// Newcomers that listen to the current rounds.
    listening: BTreeSet<Member>,
    /// Claims with an open revocation request.
    reclaimed: BTreeSet<(ClaimKey, Grant)>,
    /// The step whose rounds are running.
    closing: Option<Step>,
    /// Rounds that were mended.
    mended: BTreeSet<RoundId>,
    /// Whether a member of the running rounds has its result.
    reduced: bool,
}

impl RarePaths {
    /// Notes a message to the coordinator.
    pub(super) fn reported(&mut self, message: &ToCoordinator, marks: &mut Marks) {
        self.reduced |= matches!(message, ToCoordinator::Reduced { .. });
        match message {
            ToCoordinator::Done { key, grant, .. } => {
                let overlaps = self.closing.is_some_and(|closing| closing < key.step);
                marks.add_if(overlaps, Mark::Overlapped);
                marks.add_if(self.reclaimed.remove(&(*key, *grant)), Mark::ReclaimedDone);
            }
            ToCoordinator::ViewRequest => marks.add(Mark::ViewRequested, 1),
            ToCoordinator::RoundGroupRequest { .. } => marks.add(Mark::RoundGroupRequested, 1),
            ToCoordinator::Working { key, grant } => {
                marks.add_if(self.reclaimed.remove(&(*key, *grant)), Mark::ReclaimedEarly);
            }
            ToCoordinator::Released { key, grant } => {
                self.reclaimed.remove(&(*key, *grant));
            }
            _ => {}
        }
    }

    /// Notes an action of the coordinator.
    pub(super) fn coordinator(&mut self, action: &CoordinatorAction, marks: &mut Marks) {
        match action {
            CoordinatorAction::Send { message, .. } => self.sent(message, marks),
            CoordinatorAction::Append(_) | CoordinatorAction::Anchors(_) => {}
            CoordinatorAction::Event(CoordinatorEvent::RoundMended { gone, changed, .. }) => {
                marks.add_if(self.reduced, Mark::MendedAfterResult);
                marks.add_if(!self.reduced, Mark::MendedBeforeResult);
                marks.add_if(*changed == 0, Mark::MendedUnchanged);
                marks.add_if(*gone > 1, Mark::MendedWithoutMany);
                self.reduced = false;
            }
            CoordinatorAction::Event(
                CoordinatorEvent::RoundsAborted { .. } | CoordinatorEvent::RoundForged { .. },
            ) => {
                self.reduced = false;
                self.closing = None;
            }
            CoordinatorAction::Event(CoordinatorEvent::Committed { .. }) => {
                self.noted.clear();
                self.exchanged.clear();
                self.reclaimed.clear();
                self.listening.clear();
                self.mended.clear();
                self.reduced = false;
                self.closing = None;
            }
            CoordinatorAction::Event(CoordinatorEvent::Rewound { .. }) => {
                *self = Self::default();
            }
            CoordinatorAction::Event(CoordinatorEvent::BecameCoordinator { claims, .. }) => {
                marks.add(Mark::ClaimTakenOver, *claims);
                *self = Self::default();
            }
            CoordinatorAction::Event(_) => {}
        }
    }

    fn sent(&mut self, message: &FromCoordinator, marks: &mut Marks) {
        match message {
            FromCoordinator::Noted { key, .. } => {
                self.noted.insert(*key);
            }
            FromCoordinator::Replay { keys } => {
                let done = keys.iter().filter(|key| self.noted.contains(&key.downstream()));
                marks.add(Mark::ReplayedDone, done.count() as u64);
            }
            FromCoordinator::Reclaim { key, grant, .. } => {
                marks.add_if(!self.reclaimed.insert((*key, *grant)), Mark::ReclaimedAgain);
            }
            FromCoordinator::Close { round, group, mended, counted } => {
                self.closing = Some(round.step);
                let shared = counted.iter().any(|(stage, _)| stage.0 != round.weights.0);
                if mended.mend > Mend(0) {
                    marks.add_if(shared, Mark::MendedShared);
                    self.mended.insert(*round);
                }
                let listen = group.here.iter().filter(|one| one.weight.is_none());
                self.listening.extend(listen.map(|one| one.member));
            }
            FromCoordinator::View(change) => {
                let serving = change.here.iter().filter(|record| record.serving);
                let promoted = serving.filter(|record| self.listening.remove(&record.member));
                marks.add(Mark::Promoted, promoted.count() as u64);
            }
            _ => {}
        }
    }

    /// Notes a tensor that a peer sends.
    pub(super) fn sends(&mut self, me: Member, tag: &TensorTag, marks: &mut Marks) {
        if let TensorTag::Activation { key, exchange } = *tag
            && exchange > Exchange(0)
        {
            let is_new = self.exchanged.insert((me, key, exchange));
            marks.add_if(!is_new, Mark::ExchangedAgain);
        }
    }

    /// Notes a task that a peer has its engine do.
    pub(super) fn computes(&mut self, me: Member, task: &Task, marks: &mut Marks) {
        match task {
            Task::Export { round, parts, .. } if !parts.is_empty() => {
                marks.add(Mark::Collected, 1);
                marks.add_if(self.mended.contains(round), Mark::CollectedAgain);
            }
            Task::Discard { key, .. } => {
                let second = (me, key.downstream(), Exchange(1));
                marks.add_if(self.exchanged.contains(&second), Mark::WorkerGivenUp);
            }
            _ => {}
        }
    }

    /// Notes a peer's actions in response to an input.
    pub(super) fn peer(
        &mut self,
        me: Member,
        input: &PeerInput,
        actions: &[PeerAction],
        marks: &mut Marks,
    ) {
        let after_update = actions
            .iter()
            .skip_while(|action| !matches!(action, PeerAction::Compute(Task::Apply { .. })));
        let goes_on = |action: &&PeerAction| {
            matches!(action, PeerAction::Compute(Task::Forward { exchange: Exchange(1..), .. }))
        };
        marks.add(Mark::WorkerJoined, after_update.filter(goes_on).count() as u64);
        let PeerInput::FromCoordinator { message, .. } = input else { return };
        for action in actions {
            match (message, action) {
                (
                    FromCoordinator::Granted { key, .. },
                    PeerAction::ToCoordinator(ToCoordinator::Released { key: released, .. }),
                ) => marks.add_if(key == released, Mark::ClaimReleasedInFlight),
                (
                    FromCoordinator::View(_),
                    PeerAction::Send {
                        message: PeerMessage::Offer { key, retry: true, .. }, ..
                    },
                ) => marks.add_if(!self.rerouted.insert((me, *key)), Mark::ReroutedAgain),
                _ => {}
            }
        }
    }
}
