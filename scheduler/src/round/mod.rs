//! The all-reduce of one stage's replicas: a butterfly.
//!
//! Every member owns a part of the stage's vector in proportion to its weight. It sends each other
//! member that one's part of its sums, adds up what it gets for its own part, and sends the result
//! back to all. Parts travel in pieces, a bounded number at a time, so that a large stage
//! needs little memory beside it, and every part has pieces from all over the vector. With every
//! piece goes the sum of the tags of what its sender counted: if a piece's sums are not the whole
//! batch's, it is refused.

mod layout;
mod measured;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, Member};
use shoal_protocol::message::{Round, RoundOutcome, TensorTag, Way};
use shoal_protocol::units::Bytes;

use crate::action::{Fault, Payload, PayloadId, PeerAction, Task};
pub(crate) use layout::{Layout, piece_bytes};
pub(crate) use measured::member_rates;
pub(crate) use weights::{MemberRates, NumberBytes, least_time, weights};

/// Pieces that one member sends another before results come back, at most, whatever room it has
/// itself: who has not heard yet that the step is closed keeps them, and must know how many.
pub(crate) const AHEAD: u32 = 128;

/// For so long, or so many round trips, a member sends to another before results come back, and so
/// many pieces at least. A result is there only when all members' sums have come, so who is faster than
/// others waits for them here and leaves them the links: connections that meet at one share it evenly
/// only after many seconds, and the slowest decides when a round ends.
const AHEAD_TIME: (Duration, u32) = (Duration::from_millis(20), 3);
const LEAST_AHEAD: u32 = 4;

/// One member's side of one round.
#[derive(Debug)]
pub(crate) struct Reduction {
    round: Round,
    /// This member's place.
    place: usize,
    layout: Layout,
    /// Pieces that may be on their way to each member before its results come back, by places.
    ahead: Vec<u32>,
    /// Sums of the tags of what this member counted and of the whole batch.
    own_proof: u64,
    whole_proof: u64,
    others: Vec<Other>,
    own: Vec<OwnPiece>,
    /// Results that the engine is keeping, by their first element.
    installing: BTreeMap<usize, Payload>,
    /// Pieces of the whole vector that are not in this member's result.
    missing: usize,
    outcome: Option<RoundOutcome>,
    held: Bytes,
    /// Tasks given and not done.
    tasks: usize,
    /// The round came to nothing: what still comes is let go.
    aborted: bool,
}

/// Another member's part, as this one sees it.
#[derive(Debug, Default)]
struct Other {
    /// Pieces handed to the engine for sending.
    exported: u32,
    /// Pieces whose result came.
    results: BTreeSet<u32>,
}

/// One piece of this member's part.
#[derive(Debug, Default)]
struct OwnPiece {
    /// What the others sent, by their places.
    parts: BTreeMap<u16, Payload>,
    /// Sum of the others' proofs.
    proof: u64,
    given: bool,
}

impl Reduction {
    /// The round as `me` sees it, which must be a member of it; none otherwise. `ahead` is how many
    /// pieces may be on their way to each member, by places.
    pub(crate) fn new(
        round: Round,
        me: Member,
        layout: Layout,
        ahead: Vec<u32>,
        own_proof: u64,
        whole_proof: u64,
    ) -> Option<Self> {
        let place = round.crew.members.iter().position(|part| part.member == me)?;
        let others = round.crew.members.iter().map(|_| Other::default()).collect();
        let own = (0..layout.pieces(place)).map(|_| OwnPiece::default()).collect();
        let missing = layout.all_pieces();
        Some(Self {
            round,
            place,
            layout,
            ahead,
            own_proof,
            whole_proof,
            others,
            own,
            installing: BTreeMap::new(),
            missing,
            outcome: None,
            held: Bytes(0),
            tasks: 0,
            aborted: false,
        })
    }

    /// Takes no further part: whatever waits is released, whatever the engine uses when it is done.
    pub(crate) fn abort(&mut self, out: &mut Vec<PeerAction>) {
        self.aborted = true;
        let waiting: Vec<Payload> = self
            .own
            .iter_mut()
            .filter(|own| !own.given)
            .flat_map(|own| std::mem::take(&mut own.parts).into_values())
            .collect();
        self.release(waiting.into_iter(), out);
    }

    /// Whether the engine still has tasks of it.
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

    /// What the round came to, once this member holds its result.
    pub(crate) fn outcome(&self) -> Option<RoundOutcome> {
        self.outcome
    }

    /// Bytes of the others' pieces that wait or are in use.
    pub(crate) fn held(&self) -> Bytes {
        self.held
    }

    /// Sends the first pieces.
    pub(crate) fn start(&mut self, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        // A piece for each, from the next member on: nobody's downlink is everybody's first.
        let members = self.others.len();
        let most = self.ahead.iter().copied().max().unwrap_or(0);
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

    /// The engine read integers for another member.
    pub(crate) fn exported(
        &mut self,
        to: u16,
        piece: u32,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) {
        self.tasks -= 1;
        if self.aborted {
            return out.push(PeerAction::Release(payload.id));
        }
        let tag = TensorTag::RoundPart {
            round: self.round.id,
            from: self.place as u16,
            piece,
            proof: self.own_proof,
        };
        let to = self.round.crew.members[usize::from(to)].member;
        out.push(PeerAction::SendTensor { to, tag, payload: payload.id });
        out.push(PeerAction::Release(payload.id));
    }

    /// Another member's integers for this one's part. What does not fit is released.
    pub(crate) fn part(
        &mut self,
        (from, place): (Member, u16),
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let fits = !self.aborted
            && self.is_other(from, place)
            && (piece as usize) < self.layout.pieces(self.place)
            && payload.size
                == self.layout.part_bytes(&self.layout.range(self.place, piece as usize))
            && self
                .own
                .get(piece as usize)
                .is_some_and(|own| !own.given && !own.parts.contains_key(&place));
        if !fits {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        }
        self.held += payload.size;
        let own = &mut self.own[piece as usize];
        own.parts.insert(place, payload);
        own.proof = own.proof.wrapping_add(proof);
        self.reduce_when_whole(piece as usize, out)
    }

    /// The engine summed a piece of this member's part: the others get it.
    pub(crate) fn reduced(&mut self, piece: u32, payload: Payload, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let parts = std::mem::take(&mut self.own[piece as usize].parts);
        self.release(parts.into_values(), out);
        if self.aborted {
            return out.push(PeerAction::Release(payload.id));
        }
        let tag = TensorTag::RoundResult {
            round: self.round.id,
            from: self.place as u16,
            piece,
            proof: self.whole_proof,
        };
        let members = self.round.crew.members.iter().map(|part| part.member);
        let others = members.enumerate().filter(|(place, _)| *place != self.place);
        let listeners = self.round.crew.listeners.iter().copied();
        for to in others.map(|(_, member)| member).chain(listeners) {
            out.push(PeerAction::SendTensor { to, tag, payload: payload.id });
        }
        out.push(PeerAction::Release(payload.id));
        self.missing -= 1;
        self.summarise_when_whole(out);
    }

    /// A piece that another member reduced. What does not fit is released.
    pub(crate) fn result(
        &mut self,
        (from, place): (Member, u16),
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let other = usize::from(place);
        let fits = !self.aborted
            && self.is_other(from, place)
            && (piece as usize) < self.layout.pieces(other)
            && payload.size == self.layout.result_bytes(&self.layout.range(other, piece as usize))
            && !self.others[other].results.contains(&piece);
        if !fits {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        }
        if proof != self.whole_proof {
            out.push(PeerAction::Release(payload.id));
            return Err(self.proof_differs(proof));
        }
        self.others[other].results.insert(piece);
        let range = self.layout.range(other, piece as usize);
        self.installing.insert(range.start, payload);
        self.held += payload.size;
        let round = self.round.id;
        self.compute(Task::Install { round, range, payload: payload.id }, out);
        self.export(other, u32::MAX, out);
        Ok(())
    }

    /// The engine keeps a piece that another member reduced.
    pub(crate) fn installed(&mut self, range: &Range<usize>, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let payload = self.installing.remove(&range.start).expect("it was being installed");
        self.release(std::iter::once(payload), out);
        if self.aborted {
            return;
        }
        self.missing -= 1;
        self.summarise_when_whole(out);
    }

    /// The engine measured the whole result. Returns it, if anybody still wants to know.
    pub(crate) fn summarised(
        &mut self,
        hash: ContentHash,
        square_norm: f64,
    ) -> Option<RoundOutcome> {
        self.tasks -= 1;
        if !self.aborted {
            self.outcome = Some(RoundOutcome { hash, square_norm, proof: self.whole_proof });
        }
        self.outcome
    }

    /// Gives out the next pieces of another member's part: at most so many beyond the results that
    /// came, and no more than may be on their way to it.
    fn export(&mut self, to: usize, most: u32, out: &mut Vec<PeerAction>) {
        let pieces = self.layout.pieces(to) as u32;
        let allowed = pieces.min(self.others[to].results.len() as u32 + most.min(self.ahead[to]));
        while self.others[to].exported < allowed {
            let piece = self.others[to].exported;
            self.others[to].exported += 1;
            let range = self.layout.range(to, piece as usize);
            let (round, to) = (self.round.id, to as u16);
            self.compute(Task::Export { round, to, piece, range }, out);
        }
    }

    /// Has a piece of this member's part summed once every other member's integers are there and
    /// the tags are those of the whole batch.
    fn reduce_when_whole(&mut self, piece: usize, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        let own = &self.own[piece];
        if own.given || own.parts.len() + 1 < self.round.crew.members.len() {
            return Ok(());
        }
        let proof = own.proof.wrapping_add(self.own_proof);
        if proof != self.whole_proof {
            return Err(self.proof_differs(proof));
        }
        let parts: Vec<PayloadId> = own.parts.values().map(|payload| payload.id).collect();
        self.own[piece].given = true;
        let range = self.layout.range(self.place, piece);
        let (round, piece) = (self.round.id, piece as u32);
        self.compute(Task::Reduce { round, piece, range, parts }, out);
        Ok(())
    }

    fn summarise_when_whole(&mut self, out: &mut Vec<PeerAction>) {
        if self.missing == 0 {
            self.compute(Task::Summarise { round: self.round.id }, out);
        }
    }

    fn release(&mut self, payloads: impl Iterator<Item = Payload>, out: &mut Vec<PeerAction>) {
        for payload in payloads {
            self.held = self.held - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
    }

    /// Whether the member stands at this place, and it is not this one.
    fn is_other(&self, member: Member, place: u16) -> bool {
        let place = usize::from(place);
        place != self.place
            && self.round.crew.members.get(place).is_some_and(|part| part.member == member)
    }

    fn proof_differs(&self, found: u64) -> Fault {
        Fault::ProofDiffers { round: self.round.id, expected: self.whole_proof, found }
    }
}

/// Pieces of so many bytes that one member of a round may have on their way to another before results
/// come back, where so many bytes may be on their way in all.
pub(crate) fn most_ahead(piece: Bytes, outgoing: Bytes, members: usize) -> u32 {
    let others = members.saturating_sub(1).max(1) as u64;
    u32::try_from(outgoing.0 / piece.0 / others).unwrap_or(u32::MAX).clamp(1, AHEAD)
}

/// Of these, so many as the link to that other one wants, once it was measured.
pub(crate) fn ahead(piece: Bytes, most: u32, way: Option<&Way>) -> u32 {
    let Some((way, rate)) = way.and_then(|way| Some((way, way.rate?))) else { return most };
    let (least, round_trips) = AHEAD_TIME;
    let time = least.max(round_trips * way.round_trip);
    let pieces = (rate.0 as f64 * time.as_secs_f64() / piece.0 as f64).ceil();
    (pieces as u32).max(LEAST_AHEAD).min(most)
}

#[cfg(test)]
mod tests;
