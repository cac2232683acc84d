//! One round's result at a member that adds nothing to it, such as a newcomer.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use shoal_protocol::ids::{ContentHash, Member};
use shoal_protocol::message::{Round, RoundOutcome};
use shoal_protocol::units::Bytes;

use crate::action::{Payload, PeerAction, Task};
use crate::round::{Layout, place_in};

/// The result of one round, piece by piece.
#[derive(Debug)]
pub(super) struct ReceivedResult {
    round: Round,
    layout: Layout,
    /// The sum of the tags of the whole batch.
    whole_proof: u64,
    /// The pieces by their numbers.
    pieces: BTreeMap<u32, (Range<usize>, Payload)>,
    /// Pieces that the engine stores, in the order of the tasks.
    installs: VecDeque<u32>,
    /// The number of pieces to come.
    missing: usize,
    installing: bool,
    /// Tasks that the engine has.
    tasks: usize,
    outcome: Option<RoundOutcome>,
    held: Bytes,
}

impl ReceivedResult {
    pub(super) fn new(round: Round, layout: Layout, whole_proof: u64) -> Self {
        let missing = layout.count();
        Self {
            round,
            layout,
            whole_proof,
            pieces: BTreeMap::new(),
            installs: VecDeque::new(),
            missing,
            installing: false,
            tasks: 0,
            outcome: None,
            held: Bytes(0),
        }
    }

    pub(super) fn round(&self) -> &Round {
        &self.round
    }

    /// Mends the round without some of its members: others sum their parts again.
    pub(super) fn mend(&mut self, round: Round, out: &mut Vec<PeerAction>) {
        self.layout = self.layout.mended(&self.round, &round);
        let layout = &self.layout;
        let lost = self.pieces.extract_if(.., |piece, _| layout.range(*piece).is_none());
        for (_, (_, payload)) in lost {
            self.held = self.held - payload.size;
            self.missing += 1;
            out.push(PeerAction::Release(payload.id));
        }
        self.round = round;
    }

    pub(super) fn held(&self) -> Bytes {
        self.held
    }

    pub(super) fn is_whole(&self) -> bool {
        self.missing == 0
    }

    pub(super) fn outcome(&self) -> Option<RoundOutcome> {
        self.outcome
    }

    /// Whether the engine has tasks of it.
    pub(super) fn is_busy(&self) -> bool {
        self.tasks > 0
    }

    /// Whether pieces of this member are still to come.
    pub(super) fn waits_for(&self, member: Member) -> bool {
        place_in(&self.round, member).is_some_and(|place| {
            let theirs = |piece: &u32| self.layout.owner(*piece) == Some(place);
            !self.layout.numbers().filter(theirs).all(|piece| self.pieces.contains_key(&piece))
        })
    }

    /// Takes a piece of the result, or releases one that does not fit.
    pub(super) fn receive(
        &mut self,
        from: Member,
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) {
        let place = place_in(&self.round, from);
        let is_owner = place.is_some() && place == self.layout.owner(piece);
        let range = self.layout.range(piece).filter(|_| is_owner);
        let fits = |range: &Range<usize>| {
            proof == self.whole_proof
                && payload.size == self.layout.result_bytes(range)
                && !self.is_whole()
                && !self.pieces.contains_key(&piece)
        };
        let Some(range) = range.filter(fits) else {
            return out.push(PeerAction::Release(payload.id));
        };
        self.held += payload.size;
        self.pieces.insert(piece, (range, payload));
        self.missing -= 1;
    }

    /// Has the engine assemble and measure the whole result, once.
    pub(super) fn install(&mut self, out: &mut Vec<PeerAction>) {
        if std::mem::replace(&mut self.installing, true) {
            return;
        }
        let round = self.round.id;
        for (piece, (range, payload)) in &self.pieces {
            self.installs.push_back(*piece);
            let (range, payload) = (range.clone(), payload.id);
            out.push(PeerAction::Compute(Task::Install { round, range, payload }));
        }
        out.push(PeerAction::Compute(Task::Summarise { round, owned: Vec::new() }));
        self.tasks = self.pieces.len() + 1;
    }

    /// The engine installed a piece.
    pub(super) fn installed(&mut self, range: &Range<usize>, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let piece = self.installs.pop_front().expect("a piece was being installed");
        let (expected, payload) = self.pieces.remove(&piece).expect("it is here");
        assert_eq!(expected, *range, "tasks end in order");
        self.held = self.held - payload.size;
        out.push(PeerAction::Release(payload.id));
    }

    /// The engine measured the whole result.
    pub(super) fn summarised(&mut self, hash: ContentHash, square_norm: f64) {
        self.tasks -= 1;
        self.outcome = Some(RoundOutcome { hash, square_norm, proof: self.whole_proof });
    }

    /// Releases all pieces, none of which the engine uses.
    pub(super) fn release(mut self, out: &mut Vec<PeerAction>) {
        assert!(!self.is_busy(), "the engine uses its pieces");
        for (_, payload) in std::mem::take(&mut self.pieces).into_values() {
            out.push(PeerAction::Release(payload.id));
        }
    }
}
