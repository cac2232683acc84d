//! The all-reduce of one stage's replicas: a butterfly.
//!
//! Every member owns a part of the stage's vector in proportion to its weight. It sends each other
//! member that member's part of its own sums, adds up the sums that it receives for its own part,
//! and sends the result to all. Parts travel in pieces, a bounded number at a time, so that a large
//! stage needs little extra memory; the pieces of every part are spread over the whole vector.
//! Every piece carries the sum of the tags that its sender counted. A piece whose sums differ from
//! the whole batch's is rejected.
//!
//! The loss of a member costs only its own part of the vector and the sums of the members that
//! recompute its contributions: the round is mended and continues.

mod layout;
mod measured;
mod mend;
mod weights;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, Member, Mend};
use shoal_protocol::message::{LinkEstimate, Round, RoundOutcome, TensorTag};
use shoal_protocol::units::Bytes;

use crate::action::{Fault, Payload, PayloadId, PeerAction, Task};
pub(crate) use layout::{Layout, piece_bytes};
pub(crate) use measured::{averaged, member_rates};
pub(crate) use mend::is_next;
pub(crate) use weights::{MemberRates, NumberBytes, least_time, packed, weights};

/// Maximum number of pieces in flight from one member to another before results come back, however
/// much room the sender has. A receiver that has not yet learned that the step is closed buffers
/// them, so this bounds its memory.
pub(crate) const AHEAD: u32 = 128;

/// Before results come back, a member sends to another for the longer of this time and this many
/// round trips, and at least `LEAST_AHEAD` pieces. A result exists only when all members' sums have
/// arrived, so a fast member waits here and leaves the links to the others. Connections that meet
/// at one link share it evenly only after many seconds, and the slowest decides when a round ends.
const AHEAD_TIME: (Duration, u32) = (Duration::from_millis(20), 3);
const LEAST_AHEAD: u32 = 4;

/// One member's side of one round.
#[derive(Debug)]
pub(crate) struct Reduction {
    round: Round,
    /// This member's index in the round.
    place: usize,
    layout: Layout,
    /// Pieces of the whole vector.
    pieces: usize,
    proofs: Proofs,
    /// This member's sums are about to change: none is read before the round is mended.
    changing: bool,
    /// By their index; this member's own entry is unused.
    others: Vec<Other>,
    own: Vec<OwnPiece>,
    /// Results that the engine is storing, in the order of the tasks.
    installing: VecDeque<Installing>,
    /// First elements of the pieces of the vector that this member's result has.
    here: BTreeSet<usize>,
    /// The engine is summarising the result as it is.
    measuring: bool,
    outcome: Option<RoundOutcome>,
    held: Bytes,
    /// Tasks given and not finished.
    tasks: usize,
    /// The round was aborted: whatever still arrives is released.
    aborted: bool,
}

/// Sums of tags.
#[derive(Debug, Clone, Copy)]
struct Proofs {
    /// Of the microbatches that this member counted.
    own: u64,
    /// Of the whole batch.
    whole: u64,
}

/// The state of the exchange with another member.
#[derive(Debug)]
struct Other {
    /// Limit of the pieces in flight to it.
    ahead: u32,
    /// The first piece that was not given to the engine for export.
    next: u32,
    /// Pieces given to the engine whose result has not arrived.
    on_way: BTreeSet<u32>,
    /// Pieces whose result has arrived.
    results: BTreeSet<u32>,
    /// The mend at which its sums last changed: earlier pieces are invalid.
    since: Mend,
}

/// One piece of this member's part.
#[derive(Debug, Default)]
struct OwnPiece {
    /// Sums from the other members, by their index.
    parts: BTreeMap<u16, Part>,
    given: bool,
}

/// Another member's sums for a piece.
#[derive(Debug)]
struct Part {
    payload: Payload,
    /// The sum of its tags.
    proof: u64,
}

/// A result that the engine is about to store.
#[derive(Debug)]
struct Installing {
    start: usize,
    payload: Payload,
    /// The member that reduced it.
    owner: Member,
}

impl Reduction {
    /// Creates the round from the view of `me`; `None` if `me` is not a member of it. `ahead`
    /// limits the pieces in flight to each member, by index.
    pub(crate) fn new(
        round: Round,
        me: Member,
        layout: Layout,
        ahead: Vec<u32>,
        own_proof: u64,
        whole_proof: u64,
    ) -> Option<Self> {
        let place = place_in(&round, me)?;
        let other = |ahead| Other {
            ahead,
            next: 0,
            on_way: BTreeSet::new(),
            results: BTreeSet::new(),
            since: Mend(0),
        };
        let own = (0..layout.pieces(place)).map(|_| OwnPiece::default()).collect();
        let pieces = layout.all_pieces();
        Some(Self {
            round,
            place,
            layout,
            pieces,
            proofs: Proofs { own: own_proof, whole: whole_proof },
            changing: false,
            others: ahead.into_iter().map(other).collect(),
            own,
            installing: VecDeque::new(),
            here: BTreeSet::new(),
            measuring: false,
            outcome: None,
            held: Bytes(0),
            tasks: 0,
            aborted: false,
        })
    }

    /// Ends the participation: waiting payloads are released, and those in use when the engine is
    /// done.
    pub(crate) fn abort(&mut self, out: &mut Vec<PeerAction>) {
        self.aborted = true;
        let waiting: Vec<Payload> = self
            .own
            .iter_mut()
            .filter(|own| !own.given)
            .flat_map(|own| std::mem::take(&mut own.parts).into_values())
            .map(|part| part.payload)
            .collect();
        self.release(waiting.into_iter(), out);
    }

    /// Whether the engine still has tasks of this round.
    pub(crate) fn is_busy(&self) -> bool {
        self.tasks > 0
    }

    fn compute(&mut self, task: Task, out: &mut Vec<PeerAction>) {
        self.tasks += 1;
        out.push(PeerAction::Compute(task));
    }

    pub(crate) fn round(&self) -> &Round {
        &self.round
    }

    /// The outcome of the round, once this member holds its result.
    pub(crate) fn outcome(&self) -> Option<RoundOutcome> {
        self.outcome
    }

    /// Bytes of the others' pieces that wait or are in use.
    pub(crate) fn held(&self) -> Bytes {
        self.held
    }

    /// Sends the first pieces and reduces those that are complete.
    pub(crate) fn start(&mut self, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        // One piece to each member, beginning with the next one, so that no downlink is everyone's
        // first.
        let members = self.others.len();
        let most = self.others.iter().map(|other| other.ahead).max().unwrap_or(0);
        for ahead in 1..=most {
            for offset in 1..members {
                self.export((self.place + offset) % members, ahead, out);
            }
        }
        for piece in 0..self.own.len() {
            self.reduce_when_whole(piece, out)?;
        }
        self.summarise_when_whole(out);
        Ok(())
    }

    /// Handles `Task::Export`: sends the integers to their reducer.
    pub(crate) fn exported(
        &mut self,
        to: Member,
        piece: u32,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) {
        self.tasks -= 1;
        if !self.aborted && place_in(&self.round, to).is_some() {
            let (round, mend) = (self.round.id, self.round.mended.mend);
            let proof = self.proofs.own;
            let tag = TensorTag::RoundPart { round, mend, piece, proof };
            out.push(PeerAction::SendTensor { to, tag, payload: payload.id });
        }
        out.push(PeerAction::Release(payload.id));
    }

    /// Receives another member's integers for this member's part, as of a mend. Unexpected ones are
    /// released.
    pub(crate) fn part(
        &mut self,
        (from, mend): (Member, Mend),
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let place = self.other(from).filter(|place| mend >= self.others[*place].since);
        let own = self.own.get(piece as usize);
        let fits = |place: &usize| {
            let range = || self.layout.range(self.place, piece as usize);
            !self.aborted
                && own.is_some_and(|own| !own.given && !own.parts.contains_key(&(*place as u16)))
                && payload.size == self.layout.part_bytes(&range())
        };
        let Some(place) = place.filter(fits) else {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        };
        self.held += payload.size;
        self.own[piece as usize].parts.insert(place as u16, Part { payload, proof });
        self.reduce_when_whole(piece as usize, out)
    }

    /// Handles `Task::Reduce`: sends the result to the other members.
    pub(crate) fn reduced(&mut self, piece: u32, payload: Payload, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let parts = std::mem::take(&mut self.own[piece as usize].parts);
        self.release(parts.into_values().map(|part| part.payload), out);
        if self.aborted {
            return out.push(PeerAction::Release(payload.id));
        }
        let (round, mend) = (self.round.id, self.round.mended.mend);
        let tag = TensorTag::RoundResult { round, mend, piece, proof: self.proofs.whole };
        let members = self.round.group.members.iter().map(|part| part.member);
        let others = members.enumerate().filter(|(place, _)| *place != self.place);
        let listeners = self.round.group.listeners.iter().copied();
        for to in others.map(|(_, member)| member).chain(listeners) {
            out.push(PeerAction::SendTensor { to, tag, payload: payload.id });
        }
        out.push(PeerAction::Release(payload.id));
        self.here.insert(self.layout.range(self.place, piece as usize).start);
        self.summarise_when_whole(out);
    }

    /// Receives a piece that another member reduced. An unexpected one is released.
    pub(crate) fn result(
        &mut self,
        from: Member,
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let fits = |other: &usize| {
            let range = || self.layout.range(*other, piece as usize);
            !self.aborted
                && (piece as usize) < self.layout.pieces(*other)
                && payload.size == self.layout.result_bytes(&range())
                && !self.others[*other].results.contains(&piece)
        };
        let Some(other) = self.other(from).filter(fits) else {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        };
        if proof != self.proofs.whole {
            out.push(PeerAction::Release(payload.id));
            return Err(self.proof_differs(proof));
        }
        self.others[other].results.insert(piece);
        self.others[other].on_way.remove(&piece);
        let range = self.layout.range(other, piece as usize);
        self.installing.push_back(Installing { start: range.start, payload, owner: from });
        self.held += payload.size;
        let round = self.round.id;
        self.compute(Task::Install { round, range, payload: payload.id }, out);
        self.export(other, u32::MAX, out);
        Ok(())
    }

    /// Handles `Task::Install`.
    pub(crate) fn installed(&mut self, range: &Range<usize>, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let Installing { start, payload, owner } =
            self.installing.pop_front().expect("the result was being installed");
        assert_eq!(start, range.start, "tasks end in order");
        self.release(std::iter::once(payload), out);
        if self.aborted || self.other(owner).is_none() {
            return;
        }
        self.here.insert(start);
        self.summarise_when_whole(out);
    }

    /// Handles `Task::Summarise`. Returns the outcome, if the round still needs it.
    pub(crate) fn summarised(
        &mut self,
        hash: ContentHash,
        square_norm: f64,
    ) -> Option<RoundOutcome> {
        self.tasks -= 1;
        if !self.aborted && self.measuring {
            self.outcome = Some(RoundOutcome { hash, square_norm, proof: self.proofs.whole });
        }
        self.outcome
    }

    /// Exports the next pieces of another member's part: at most `most` beyond the results that
    /// have arrived, and at most its limit in flight.
    fn export(&mut self, to: usize, most: u32, out: &mut Vec<PeerAction>) {
        let pieces = self.layout.pieces(to) as u32;
        let most = most.min(self.others[to].ahead) as usize;
        while !self.changing {
            let other = &mut self.others[to];
            if other.next == pieces || other.on_way.len() >= most {
                return;
            }
            let piece = other.next;
            other.next += 1;
            if !other.results.contains(&piece) {
                other.on_way.insert(piece);
                let range = self.layout.range(to, piece as usize);
                let (round, to) = (self.round.id, self.round.group.members[to].member);
                self.compute(Task::Export { round, to, piece, range }, out);
            }
        }
    }

    /// Reduces a piece of this member's part once every other member's integers are there and their
    /// tags sum to the whole batch's.
    fn reduce_when_whole(&mut self, piece: usize, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        let own = &self.own[piece];
        let is_whole = own.parts.len() + 1 == self.round.group.members.len();
        if own.given || !is_whole || self.changing {
            return Ok(());
        }
        let proofs = own.parts.values().map(|part| part.proof);
        let proof = proofs.fold(self.proofs.own, u64::wrapping_add);
        if proof != self.proofs.whole {
            return Err(self.proof_differs(proof));
        }
        let parts: Vec<PayloadId> = own.parts.values().map(|part| part.payload.id).collect();
        self.own[piece].given = true;
        let range = self.layout.range(self.place, piece);
        let (round, piece) = (self.round.id, piece as u32);
        self.compute(Task::Reduce { round, piece, range, parts }, out);
        Ok(())
    }

    fn summarise_when_whole(&mut self, out: &mut Vec<PeerAction>) {
        if self.here.len() == self.pieces {
            self.measuring = true;
            self.compute(Task::Summarise { round: self.round.id }, out);
        }
    }

    fn release(&mut self, payloads: impl Iterator<Item = Payload>, out: &mut Vec<PeerAction>) {
        for payload in payloads {
            self.held = self.held - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
    }

    /// The index of a member other than this one.
    fn other(&self, member: Member) -> Option<usize> {
        place_in(&self.round, member).filter(|place| *place != self.place)
    }

    fn proof_differs(&self, found: u64) -> Fault {
        Fault::ProofDiffers { round: self.round.id, expected: self.proofs.whole, found }
    }
}

/// The index of a member in a round, whose members are sorted.
pub(crate) fn place_in(round: &Round, member: Member) -> Option<usize> {
    round.group.members.binary_search_by_key(&member, |part| part.member).ok()
}

/// Indices in `before` of the members that `mended` lacks, in order.
pub(crate) fn gone(before: &Round, mended: &Round) -> Vec<usize> {
    let members = before.group.members.iter().enumerate();
    let gone = members.filter(|(_, part)| place_in(mended, part.member).is_none());
    gone.map(|(place, _)| place).collect()
}

/// Number of pieces that a member of a round may have in flight to another before results come
/// back, given the size of a piece and a limit of bytes for all outgoing pieces.
pub(crate) fn most_ahead(piece: Bytes, outgoing: Bytes, members: usize) -> u32 {
    let others = members.saturating_sub(1).max(1) as u64;
    u32::try_from(outgoing.0 / piece.0 / others).unwrap_or(u32::MAX).clamp(1, AHEAD)
}

/// Number of pieces of such a size on the link in flight that suit its measurement, at most `most`; `most` without
/// a measurement.
pub(crate) fn ahead(piece: Bytes, most: u32, path: Option<&LinkEstimate>) -> u32 {
    let Some((path, rate)) = path.and_then(|path| Some((path, path.rate?))) else { return most };
    let (least, round_trips) = AHEAD_TIME;
    let time = least.max(round_trips * path.round_trip);
    let pieces = (rate.0 as f64 * time.as_secs_f64() / piece.0 as f64).ceil();
    (pieces as u32).max(LEAST_AHEAD).min(most)
}

#[cfg(test)]
mod tests;
