//! The all-reduce of one stage's replicas: a butterfly.
//!
//! Every member owns a part of the stage's vector in proportion to its weight. It sends each other
//! member that one's part of its sums, adds up what it gets for its own part, and sends the result
//! back to all. Parts travel in pieces, a bounded number at a time, so that a large stage
//! needs little memory beside it, and every part has pieces from all over the vector. With every
//! piece goes the sum of the tags of what its sender counted: if a piece's sums are not the whole
//! batch's, it is refused.
//!
//! A member that is gone costs its own part of the vector, and what others now count in its place: the
//! round is mended and goes on.

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
    /// Pieces of the whole vector.
    pieces: usize,
    /// Sums of the tags of what this member counted and of the whole batch.
    own_proof: u64,
    whole_proof: u64,
    /// This member's sums change: nothing is read of them before the round is mended.
    changing: bool,
    /// By their places; this member's own is not used.
    others: Vec<Other>,
    own: Vec<OwnPiece>,
    /// Results that the engine is keeping, in the order in which it was given them.
    installing: VecDeque<Installing>,
    /// Pieces of the vector that this member's result has, by their first elements.
    here: BTreeSet<usize>,
    /// The engine measures the result as it is.
    measuring: bool,
    outcome: Option<RoundOutcome>,
    held: Bytes,
    /// Tasks given and not done.
    tasks: usize,
    /// The round came to nothing: what still comes is let go.
    aborted: bool,
}

/// Another member's part, as this one sees it.
#[derive(Debug)]
struct Other {
    /// Pieces that may be on their way to it.
    ahead: u32,
    /// The first piece that was not handed to the engine for sending.
    next: u32,
    /// Pieces handed to the engine whose result has not come.
    on_way: BTreeSet<u32>,
    /// Pieces whose result came.
    results: BTreeSet<u32>,
    /// When its sums changed last: what it sent before is of no use.
    since: Mend,
}

/// One piece of this member's part.
#[derive(Debug, Default)]
struct OwnPiece {
    /// What the others sent, by their places.
    parts: BTreeMap<u16, Part>,
    given: bool,
}

/// What another member sent for a piece.
#[derive(Debug)]
struct Part {
    payload: Payload,
    /// The sum of its tags.
    proof: u64,
}

/// A result on its way into the engine.
#[derive(Debug)]
struct Installing {
    start: usize,
    payload: Payload,
    /// Who reduced it.
    owner: Member,
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
            own_proof,
            whole_proof,
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

    /// Takes no further part: whatever waits is released, whatever the engine uses when it is done.
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

    /// Sends what may be on its way, and has summed what is there.
    pub(crate) fn start(&mut self, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        // A piece for each, from the next member on: nobody's downlink is everybody's first.
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

    /// The engine read integers for another member.
    pub(crate) fn exported(
        &mut self,
        to: Member,
        piece: u32,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) {
        self.tasks -= 1;
        if !self.aborted && place_in(&self.round, to).is_some() {
            let Self { round, own_proof, .. } = self;
            let (round, mend, proof) = (round.id, round.mended.mend, *own_proof);
            let tag = TensorTag::RoundPart { round, mend, piece, proof };
            out.push(PeerAction::SendTensor { to, tag, payload: payload.id });
        }
        out.push(PeerAction::Release(payload.id));
    }

    /// Another member's integers for this one's part, as they were at a mend. What does not fit is released.
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

    /// The engine summed a piece of this member's part: the others get it.
    pub(crate) fn reduced(&mut self, piece: u32, payload: Payload, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let parts = std::mem::take(&mut self.own[piece as usize].parts);
        self.release(parts.into_values().map(|part| part.payload), out);
        if self.aborted {
            return out.push(PeerAction::Release(payload.id));
        }
        let (round, mend) = (self.round.id, self.round.mended.mend);
        let tag = TensorTag::RoundResult { round, mend, piece, proof: self.whole_proof };
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

    /// A piece that another member reduced. What does not fit is released.
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
        if proof != self.whole_proof {
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

    /// The engine keeps a piece that another member reduced.
    pub(crate) fn installed(&mut self, range: &Range<usize>, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let Installing { start, payload, owner } =
            self.installing.pop_front().expect("it was being installed");
        assert_eq!(start, range.start, "tasks end in order");
        self.release(std::iter::once(payload), out);
        if self.aborted || self.other(owner).is_none() {
            return;
        }
        self.here.insert(start);
        self.summarise_when_whole(out);
    }

    /// The engine measured the whole result. Returns it, if anybody still wants to know.
    pub(crate) fn summarised(
        &mut self,
        hash: ContentHash,
        square_norm: f64,
    ) -> Option<RoundOutcome> {
        self.tasks -= 1;
        if !self.aborted && self.measuring {
            self.outcome = Some(RoundOutcome { hash, square_norm, proof: self.whole_proof });
        }
        self.outcome
    }

    /// Gives out the next pieces of another member's part: at most so many beyond the results that
    /// came, and no more than may be on their way to it.
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

    /// Has a piece of this member's part summed once every other member's integers are there and
    /// the tags are those of the whole batch.
    fn reduce_when_whole(&mut self, piece: usize, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        let own = &self.own[piece];
        let is_whole = own.parts.len() + 1 == self.round.group.members.len();
        if own.given || !is_whole || self.changing {
            return Ok(());
        }
        let proofs = own.parts.values().map(|part| part.proof);
        let proof = proofs.fold(self.own_proof, u64::wrapping_add);
        if proof != self.whole_proof {
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

    /// The place of another member than this one.
    fn other(&self, member: Member) -> Option<usize> {
        place_in(&self.round, member).filter(|place| *place != self.place)
    }

    fn proof_differs(&self, found: u64) -> Fault {
        Fault::ProofDiffers { round: self.round.id, expected: self.whole_proof, found }
    }
}

/// Where a member stands in a round: they are in order.
pub(crate) fn place_in(round: &Round, member: Member) -> Option<usize> {
    round.group.members.binary_search_by_key(&member, |part| part.member).ok()
}

/// The places of those who were in a round and are not when it is mended, in order.
pub(crate) fn gone(before: &Round, mended: &Round) -> Vec<usize> {
    let members = before.group.members.iter().enumerate();
    let gone = members.filter(|(_, part)| place_in(mended, part.member).is_none());
    gone.map(|(place, _)| place).collect()
}

/// Pieces of so many bytes that one member of a round may have on their way to another before results
/// come back, where so many bytes may be on their way in all.
pub(crate) fn most_ahead(piece: Bytes, outgoing: Bytes, members: usize) -> u32 {
    let others = members.saturating_sub(1).max(1) as u64;
    u32::try_from(outgoing.0 / piece.0 / others).unwrap_or(u32::MAX).clamp(1, AHEAD)
}

/// Of these, so many as the link to that other one wants, once it was measured.
pub(crate) fn ahead(piece: Bytes, most: u32, path: Option<&LinkEstimate>) -> u32 {
    let Some((path, rate)) = path.and_then(|path| Some((path, path.rate?))) else { return most };
    let (least, round_trips) = AHEAD_TIME;
    let time = least.max(round_trips * path.round_trip);
    let pieces = (rate.0 as f64 * time.as_secs_f64() / piece.0 as f64).ceil();
    (pieces as u32).max(LEAST_AHEAD).min(most)
}

#[cfg(test)]
mod tests;
