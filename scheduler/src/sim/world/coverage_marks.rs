//! Counts how often a run took each rare path.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Exchange, Grant, Member, Mend, Step};
use shoal_protocol::message::{FromCoordinator, PeerMessage, RoundId, TensorTag, ToCoordinator};

use crate::action::{CoordinatorAction, CoordinatorEvent, PeerAction, PeerInput, Task};
use crate::sim::report::Rare;

/// State needed to recognise rare paths.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) rare: Rare,
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

impl Marks {
    /// Notes a message to the coordinator.
    pub(super) fn reported(&mut self, message: &ToCoordinator) {
        self.reduced |= matches!(message, ToCoordinator::Reduced { .. });
        match message {
            ToCoordinator::Done { key, grant, .. } => {
                let overlaps = self.closing.is_some_and(|closing| closing < key.step);
                self.rare.rounds.overlapped += u64::from(overlaps);
                self.rare.claims.reclaimed_done +=
                    u64::from(self.reclaimed.remove(&(*key, *grant)));
            }
            ToCoordinator::ViewRequest => self.rare.members_wanted += 1,
            ToCoordinator::RoundGroupRequest { .. } => self.rare.round_groups_requested += 1,
            ToCoordinator::Working { key, grant } => {
                self.rare.claims.reclaimed_early +=
                    u64::from(self.reclaimed.remove(&(*key, *grant)));
            }
            ToCoordinator::Released { key, grant } => {
                self.reclaimed.remove(&(*key, *grant));
            }
            _ => {}
        }
    }

    /// Notes an action of the coordinator.
    pub(super) fn coordinator(&mut self, action: &CoordinatorAction) {
        match action {
            CoordinatorAction::Send { message, .. } => self.sent(message),
            CoordinatorAction::Append(_) | CoordinatorAction::Anchors(_) => {}
            CoordinatorAction::Event(CoordinatorEvent::RoundMended { gone, changed, .. }) => {
                self.rare.rounds.mended_after_result += u64::from(self.reduced);
                self.rare.rounds.mended_before_result += u64::from(!self.reduced);
                self.rare.rounds.mended_unchanged += u64::from(*changed == 0);
                self.rare.rounds.mended_without_many += u64::from(*gone > 1);
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
                let rare = self.rare;
                *self = Self { rare, ..Self::default() };
            }
            CoordinatorAction::Event(CoordinatorEvent::BecameCoordinator { claims, .. }) => {
                self.rare.claims.taken_over += claims;
                *self = Self { rare: self.rare, ..Self::default() };
            }
            CoordinatorAction::Event(_) => {}
        }
    }

    fn sent(&mut self, message: &FromCoordinator) {
        match message {
            FromCoordinator::Noted { key, .. } => {
                self.noted.insert(*key);
            }
            FromCoordinator::Replay { keys } => {
                let done = keys.iter().filter(|key| self.noted.contains(&key.downstream()));
                self.rare.claims.replayed_done += done.count() as u64;
            }
            FromCoordinator::Reclaim { key, grant, .. } => {
                self.rare.claims.reclaimed_again +=
                    u64::from(!self.reclaimed.insert((*key, *grant)));
            }
            FromCoordinator::Close { round, group, mended, counted } => {
                self.closing = Some(round.step);
                let shared = counted.iter().any(|(stage, _)| stage.0 != round.weights.0);
                if mended.mend > Mend(0) {
                    self.rare.rounds.mended_shared += u64::from(shared);
                    self.mended.insert(*round);
                }
                let listen = group.here.iter().filter(|one| one.weight.is_none());
                self.listening.extend(listen.map(|one| one.member));
            }
            FromCoordinator::View(change) => {
                let serving = change.here.iter().filter(|record| record.serving);
                let promoted = serving.filter(|record| self.listening.remove(&record.member));
                self.rare.rounds.promoted += promoted.count() as u64;
            }
            _ => {}
        }
    }

    /// Notes a tensor that a peer sends.
    pub(super) fn sends(&mut self, me: Member, tag: &TensorTag) {
        if let TensorTag::Activation { key, exchange } = *tag
            && exchange > Exchange(0)
        {
            let is_new = self.exchanged.insert((me, key, exchange));
            self.rare.claims.exchanges_again += u64::from(!is_new);
        }
    }

    /// Notes a task that a peer has its engine do.
    pub(super) fn computes(&mut self, me: Member, task: &Task) {
        match task {
            Task::Export { round, parts, .. } if !parts.is_empty() => {
                self.rare.rounds.collected += 1;
                self.rare.rounds.collected_again += u64::from(self.mended.contains(round));
            }
            Task::Discard { key, .. } => {
                let second = (me, key.downstream(), Exchange(1));
                self.rare.claims.workers_given_up += u64::from(self.exchanged.contains(&second));
            }
            _ => {}
        }
    }

    /// Notes a peer's actions in response to an input.
    pub(super) fn peer(&mut self, me: Member, input: &PeerInput, actions: &[PeerAction]) {
        let after_update = actions
            .iter()
            .skip_while(|action| !matches!(action, PeerAction::Compute(Task::Apply { .. })));
        let goes_on = |action: &&PeerAction| {
            matches!(action, PeerAction::Compute(Task::Forward { exchange: Exchange(1..), .. }))
        };
        self.rare.claims.joined += after_update.filter(goes_on).count() as u64;
        let PeerInput::FromCoordinator { message, .. } = input else { return };
        for action in actions {
            match (message, action) {
                (
                    FromCoordinator::Granted { key, .. },
                    PeerAction::ToCoordinator(ToCoordinator::Released { key: released, .. }),
                ) => self.rare.claims.released_in_flight += u64::from(key == released),
                (
                    FromCoordinator::View(_),
                    PeerAction::Send {
                        message: PeerMessage::Offer { key, retry: true, .. }, ..
                    },
                ) => {
                    self.rare.claims.rerouted_again += u64::from(!self.rerouted.insert((me, *key)))
                }
                _ => {}
            }
        }
    }
}
