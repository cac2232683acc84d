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

/// A piece of a round.
#[derive(Debug)]
pub(in crate::peer) struct Piece {
    pub(in crate::peer) from: Member,
    pub(in crate::peer) tag: TensorTag,
    pub(in crate::peer) payload: Payload,
}

impl Piece {
    fn is_result(&self) -> bool {
        matches!(self.tag, TensorTag::RoundResult { .. })
    }

    /// Whether it is of a round that the filter selects.
    fn is_of(&self, selects: impl Fn(RoundId) -> bool) -> bool {
        round_of(&self.tag).is_some_and(|(round, _)| selects(round))
    }
}

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
        piece: Piece,
        is_host: impl Fn(Member) -> bool,
        (of_sender, in_all): (Bytes, Bytes),
        out: &mut Out,
    ) -> bool {
        let (hosts, size) = (is_host(piece.from), piece.payload.size);
        if hosts {
            self.drop_older(&piece.tag, out);
        }
        let has_bytes = if piece.is_result() {
            self.results + size <= in_all
        } else {
            let alike = |other: &&Piece| other.from == piece.from && !other.is_result();
            let sizes = self.pieces.iter().filter(alike).map(|other| other.payload.size);
            sizes.sum::<Bytes>() + size <= of_sender
        };
        let unplaced = || self.pieces.iter().filter(|other| !is_host(other.from)).count();
        let has_place = self.pieces.len() < EARLY_PIECES && (hosts || unplaced() < UNPLACED);
        if !has_bytes || !has_place {
            out.push(PeerAction::Release(piece.payload.id));
            return false;
        }
        *self.account(&piece) += size;
        self.pieces.push_back(piece);
        true
    }

    /// The bytes that a piece counts among.
    fn account(&mut self, piece: &Piece) -> &mut Bytes {
        if piece.is_result() { &mut self.results } else { &mut self.parts }
    }

    /// Releases pieces of earlier attempts of a round.
    fn drop_older(&mut self, tag: &TensorTag, out: &mut Out) {
        let Some((new, _)) = round_of(tag) else { return };
        self.drop_where(out, |old| (old.step, old.weights) == (new.step, new.weights) && old < new);
    }

    /// Takes the pieces of a round.
    pub(super) fn take(&mut self, round: RoundId) -> Vec<Piece> {
        let all = self.pieces.drain(..);
        let (taken, kept) = all.partition(|piece| piece.is_of(|of| of == round));
        self.pieces = kept;
        let taken: VecDeque<Piece> = taken;
        for piece in &taken {
            let account = self.account(piece);
            *account = *account - piece.payload.size;
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
        pieces.retain(|piece| {
            let is_old = piece.is_of(&old);
            if is_old {
                let account = if piece.is_result() { &mut *results } else { &mut *parts };
                *account = *account - piece.payload.size;
                out.push(PeerAction::Release(piece.payload.id));
            }
            !is_old
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
