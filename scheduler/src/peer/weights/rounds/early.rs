//! Pieces of rounds that are not known here yet.

use std::collections::VecDeque;

use shoal_protocol::ids::{Era, Member, Mend, Step, WeightGroup};
use shoal_protocol::limits;
use shoal_protocol::message::{RoundId, TensorTag};
use shoal_protocol::units::Bytes;

use crate::action::{Payload, PeerAction};
use crate::peer::Out;
use crate::round::UNPLACED;

/// Pieces that are kept before the close of their step arrives. The coordinator's messages and the other
/// members' pieces travel on different connections.
const EARLY_PIECES: usize = limits::MEMBERS;

/// A piece of a round: its sender, what it is, and its payload.
pub(in crate::peer) type Piece = (Member, TensorTag, Payload);

/// Early pieces, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct EarlyPieces {
    pieces: VecDeque<Piece>,
    /// Bytes of other members' sums for this peer's part.
    parts: Bytes,
    /// Bytes of results.
    results: Bytes,
}

impl EarlyPieces {
    pub(super) fn parts(&self) -> Bytes {
        self.parts
    }

    pub(super) fn results(&self) -> Bytes {
        self.results
    }

    /// Keeps a piece: sums up to so many bytes of one sender, results up to so many in all; of all senders that host
    /// none of these weights a few. Returns whether it keeps the piece; otherwise releases it.
    pub(super) fn keep(
        &mut self,
        (from, tag, payload): Piece,
        is_host: impl Fn(Member) -> bool,
        (of_sender, in_all): (Bytes, Bytes),
        out: &mut Out,
    ) -> bool {
        let hosts = is_host(from);
        if hosts {
            self.drop_older(&tag, out);
        }
        let has_bytes = if is_result(&tag) {
            self.results + payload.size <= in_all
        } else {
            let alike = |(sender, tag, _): &&Piece| *sender == from && !is_result(tag);
            let held: Bytes = self.pieces.iter().filter(alike).map(|piece| piece.2.size).sum();
            held + payload.size <= of_sender
        };
        let unplaced = || self.pieces.iter().filter(|(sender, ..)| !is_host(*sender)).count();
        let has_place = self.pieces.len() < EARLY_PIECES && (hosts || unplaced() < UNPLACED);
        if !has_bytes || !has_place {
            out.push(PeerAction::Release(payload.id));
            return false;
        }
        *self.account(&tag) += payload.size;
        self.pieces.push_back((from, tag, payload));
        true
    }

    fn account(&mut self, tag: &TensorTag) -> &mut Bytes {
        if is_result(tag) { &mut self.results } else { &mut self.parts }
    }

    /// Releases pieces of earlier attempts of a round.
    fn drop_older(&mut self, tag: &TensorTag, out: &mut Out) {
        let Some((new, _)) = round_of(tag) else { return };
        self.drop_where(out, |old| (old.step, old.weights) == (new.step, new.weights) && old < new);
    }

    /// Takes the pieces of a round.
    pub(super) fn take(&mut self, round: RoundId) -> Vec<Piece> {
        let of_round = |(_, tag, _): &Piece| round_of(tag).is_some_and(|(of, _)| of == round);
        let (taken, kept): (VecDeque<_>, VecDeque<_>) = self.pieces.drain(..).partition(of_round);
        self.pieces = kept;
        for (_, tag, payload) in &taken {
            let account = self.account(tag);
            *account = *account - payload.size;
        }
        taken.into()
    }

    /// Releases pieces of earlier eras.
    pub(super) fn drop_before(&mut self, era: Era, out: &mut Out) {
        self.drop_where(out, |round| round.era < era);
    }

    /// Releases all pieces of some weights.
    pub(super) fn drop_of(&mut self, weights: WeightGroup, out: &mut Out) {
        self.drop_where(out, |round| round.weights == weights);
    }

    /// Releases pieces of the steps up to this one, in this era and earlier ones. A later era may repeat
    /// the steps.
    pub(super) fn drop_through(&mut self, era: Era, step: Step, out: &mut Out) {
        self.drop_where(out, |round| round.era <= era && round.step <= step);
    }

    fn drop_where(&mut self, out: &mut Out, old: impl Fn(RoundId) -> bool) {
        let Self { pieces, parts, results } = self;
        pieces.retain(|(_, tag, payload)| {
            let old = round_of(tag).is_some_and(|(round, _)| old(round));
            if old {
                let account = if is_result(tag) { &mut *results } else { &mut *parts };
                *account = *account - payload.size;
                out.push(PeerAction::Release(payload.id));
            }
            !old
        });
    }
}

/// The round of a piece, and the number of mends before it was sent.
pub(in crate::peer) fn round_of(tag: &TensorTag) -> Option<(RoundId, Mend)> {
    match tag {
        TensorTag::RoundPart { round, mend, .. } | TensorTag::RoundResult { round, mend, .. } => {
            Some((*round, *mend))
        }
        TensorTag::Activation { .. }
        | TensorTag::ActivationGradient { .. }
        | TensorTag::Recalled { .. } => None,
    }
}

fn is_result(tag: &TensorTag) -> bool {
    matches!(tag, TensorTag::RoundResult { .. })
}
