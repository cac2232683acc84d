//! The all-reduce of one stage's replicas: a butterfly, on two levels between islands.
//!
//! Every member owns a part of the stage's vector in proportion to its weight. It sends each other
//! member that member's part of its own sums, adds up the sums that it receives for its own part,
//! and sends the result to all. Parts travel in pieces, a bounded number at a time, so that a large
//! stage needs little extra memory; the pieces of every part are spread over the whole vector.
//! Every piece carries the sum of the tags that its sender counted. A piece whose sums differ from
//! the whole batch's is rejected.
//!
//! Members with fast links to each other are an island. For each piece one of them collects: it adds
//! up the island's integers, sends the owner their sum, and passes the result on. So every piece
//! crosses the slow links between islands once for each island (`layout`).
//!
//! The loss of a member costs only its own part of the vector, the pieces that it collected, and the
//! sums of its island and of the members that recompute its contributions: the round is mended and
//! continues.

mod cut;
mod islands;
mod layout;
mod measured;
mod mend;
mod weights;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{ContentHash, Member, Mend, Stage};
use shoal_protocol::message::{
    LinkEstimate, Round, RoundCheck, RoundOutcome, SumsPrint, TensorTag, owner_groups,
};
use shoal_protocol::units::Bytes;

use crate::action::{Fault, Payload, PayloadId, PeerAction, Task};
pub use cut::RoundCut;
pub(crate) use layout::{Layout, piece_bytes};
pub(crate) use measured::{averaged, member_rates};
pub(crate) use mend::is_next;
pub(crate) use weights::{MemberRates, NumberBytes, least_time, packed, weights};

/// Maximum number of pieces in flight from one member to another before results come back, however
/// much room the sender has. A receiver that has not yet learned that the step is closed buffers
/// them, so this bounds its memory.
pub(crate) const AHEAD: u32 = 128;

/// Pieces that a receiver which has not learned that the step is closed keeps of all senders that it does not know to
/// host the weights.
pub(crate) const UNPLACED: usize = 16;

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
    proofs: Proofs,
    /// This member's sums are about to change: none is read before the round is mended.
    changing: bool,
    /// By their index; this member's own entry is unused.
    others: Vec<Other>,
    /// The pieces for which this member sums others' integers, by their numbers; absent before the first arrive.
    gathered: BTreeMap<u32, Gathered>,
    /// Integers that the engine is reading, in the order of the tasks.
    exporting: VecDeque<Summing>,
    /// Pieces that the engine is reducing, in the order of the tasks.
    reducing: VecDeque<Summing>,
    /// Results that the engine is storing, in the order of the tasks.
    installing: VecDeque<Installing>,
    /// Pieces of which this member has sent its integers, or those of its island: no result can be without them.
    gave: BTreeSet<u32>,
    /// Pieces whose result arrived.
    results: BTreeSet<u32>,
    /// Pieces of the vector that this member's result has.
    here: BTreeSet<u32>,
    /// The engine is summarising the result as it is.
    measuring: bool,
    outcome: Option<RoundOutcome>,
    /// What this member's sums and the result make of the result's challenge.
    checks: Vec<RoundCheck>,
    /// The prints of this member's sums, by stage, in a run with audits.
    sums: Vec<(Stage, SumsPrint)>,
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
    /// Pieces that are not given to the engine for export, in order.
    queue: VecDeque<u32>,
    /// Pieces given to the engine whose result has not arrived.
    on_way: BTreeSet<u32>,
    /// The mend at which its sums last changed: earlier pieces are invalid.
    since: Mend,
}

/// Others' integers for one piece.
#[derive(Debug, Default)]
struct Gathered {
    /// From the members that send theirs here, by their index.
    parts: BTreeMap<u16, Part>,
    given: bool,
}

/// Another member's sums for a piece, or those of its island.
#[derive(Debug)]
struct Part {
    payload: Payload,
    /// The sum of its tags.
    proof: u64,
}

/// Integers that the engine is about to add up.
#[derive(Debug)]
struct Summing {
    piece: u32,
    /// Those of others.
    parts: Vec<Payload>,
    /// The sum of all tags.
    proof: u64,
    /// The round was mended meanwhile, and the sum does not count.
    stale: bool,
}

/// A result that the engine is about to store.
#[derive(Debug)]
struct Installing {
    piece: u32,
    range: Range<usize>,
    payload: Payload,
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
            queue: VecDeque::new(),
            on_way: BTreeSet::new(),
            since: Mend(0),
        };
        let mut reduction = Self {
            round,
            place,
            layout,
            proofs: Proofs { own: own_proof, whole: whole_proof },
            changing: false,
            others: ahead.into_iter().map(other).collect(),
            gathered: BTreeMap::new(),
            exporting: VecDeque::new(),
            reducing: VecDeque::new(),
            installing: VecDeque::new(),
            gave: BTreeSet::new(),
            results: BTreeSet::new(),
            here: BTreeSet::new(),
            measuring: false,
            outcome: None,
            checks: Vec::new(),
            sums: Vec::new(),
            held: Bytes(0),
            tasks: 0,
            aborted: false,
        };
        reduction.queue_exports();
        Some(reduction)
    }

    /// Queues every piece that this member sends alone, and whose result is not here, for the member that it goes to.
    fn queue_exports(&mut self) {
        self.others.iter_mut().for_each(|other| other.queue.clear());
        for piece in self.layout.numbers().filter(|piece| !self.results.contains(piece)) {
            let Some(parent) = self.layout.parent(piece, self.place) else { continue };
            let other = &mut self.others[parent];
            if !other.on_way.contains(&piece) && !self.layout.collects(piece, self.place) {
                other.queue.push_back(piece);
            }
        }
    }

    /// Ends the participation: waiting payloads are released, and those in use when the engine is
    /// done.
    pub(crate) fn abort(&mut self, out: &mut Vec<PeerAction>) {
        self.aborted = true;
        let gathered = std::mem::take(&mut self.gathered).into_values();
        let waiting: Vec<Payload> = gathered
            .flat_map(|gathered| gathered.parts.into_values())
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

    /// What this member's sums and the result make of the result's challenge, once it holds the result.
    pub(crate) fn checks(&self) -> &[RoundCheck] {
        &self.checks
    }

    /// The prints of this member's sums, by stage, in a run with audits.
    pub(crate) fn sums(&self) -> &[(Stage, SumsPrint)] {
        &self.sums
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
        for piece in self.layout.numbers().collect::<Vec<_>>() {
            self.sum_when_whole(piece, out)?;
        }
        self.summarise_when_whole(out);
        Ok(())
    }

    /// Handles `Task::Export`: sends the integers to the member that adds them.
    pub(crate) fn exported(
        &mut self,
        to: Member,
        piece: u32,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) {
        self.tasks -= 1;
        let done = self.exporting.pop_front().expect("the integers were being read");
        assert_eq!(done.piece, piece, "tasks end in order");
        self.release(done.parts.into_iter(), out);
        if !self.aborted && !done.stale && place_in(&self.round, to).is_some() {
            let (round, mend) = (self.round.id, self.round.mended.mend);
            let tag = TensorTag::RoundPart { round, mend, piece, proof: done.proof };
            out.push(PeerAction::send_tensor(to, tag, &payload));
            self.gave.insert(piece);
        }
        out.push(PeerAction::Release(payload.id));
    }

    /// Receives integers of another member, or of its island, as of a mend. Unexpected ones are
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
        let known = self.gathered.get(&piece);
        let fits = |place: &usize| {
            let is_new = known
                .is_none_or(|known| !known.given && !known.parts.contains_key(&(*place as u16)));
            !self.aborted
                && is_new
                && !self.results.contains(&piece)
                && self.layout.parent(piece, *place) == Some(self.place)
                && self.size_of(piece, Layout::part_bytes) == Some(payload.size)
        };
        let Some(place) = place.filter(fits) else {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        };
        self.held += payload.size;
        let gathered = self.gathered.entry(piece).or_default();
        gathered.parts.insert(place as u16, Part { payload, proof });
        self.sum_when_whole(piece, out)
    }

    /// Handles `Task::Reduce`: sends the result to the other members.
    pub(crate) fn reduced(&mut self, piece: u32, payload: Payload, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let done = self.reducing.pop_front().expect("the piece was being reduced");
        assert_eq!(done.piece, piece, "tasks end in order");
        self.release(done.parts.into_iter(), out);
        if self.aborted || done.stale {
            return out.push(PeerAction::Release(payload.id));
        }
        let listeners = self.round.group.listeners.clone();
        self.send_result(piece, payload, listeners, out);
        out.push(PeerAction::Release(payload.id));
        self.here.insert(piece);
        self.summarise_when_whole(out);
    }

    /// Sends a result to the members that expect it from this one, and to these listeners.
    fn send_result(
        &self,
        piece: u32,
        payload: Payload,
        listeners: Vec<Member>,
        out: &mut Vec<PeerAction>,
    ) {
        let (round, mend) = (self.round.id, self.round.mended.mend);
        let tag = TensorTag::RoundResult { round, mend, piece, proof: self.proofs.whole };
        let children = self.layout.children(piece, self.place).into_iter();
        let children = children.map(|place| self.round.group.members[place].member);
        for to in children.chain(listeners) {
            out.push(PeerAction::send_tensor(to, tag, &payload));
        }
    }

    /// Receives a piece of the result. An unexpected one is released.
    pub(crate) fn result(
        &mut self,
        from: Member,
        piece: u32,
        proof: u64,
        payload: Payload,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let fits = |other: &usize| {
            !self.aborted
                && self.layout.parent(piece, self.place) == Some(*other)
                && self.size_of(piece, Layout::result_bytes) == Some(payload.size)
                && self.gave.contains(&piece)
                && !self.results.contains(&piece)
        };
        let expected = self.other(from).filter(fits);
        let (Some(other), Some(range)) = (expected, self.layout.range(piece)) else {
            out.push(PeerAction::Release(payload.id));
            return Ok(());
        };
        if proof != self.proofs.whole {
            out.push(PeerAction::Release(payload.id));
            return Err(self.proof_differs(proof));
        }
        self.results.insert(piece);
        // Integers that are sent again after a mend are not needed.
        let gathered = self.gathered.remove(&piece).into_iter();
        let parts: Vec<Part> = gathered.flat_map(|one| one.parts.into_values()).collect();
        self.release(parts.into_iter().map(|part| part.payload), out);
        self.others[other].on_way.remove(&piece);
        self.send_result(piece, payload, Vec::new(), out);
        self.installing.push_back(Installing { piece, range: range.clone(), payload });
        self.held += payload.size;
        let round = self.round.id;
        self.compute(Task::Install { round, range, payload: payload.id }, out);
        self.export(other, u32::MAX, out);
        Ok(())
    }

    /// Handles `Task::Install`.
    pub(crate) fn installed(&mut self, range: &Range<usize>, out: &mut Vec<PeerAction>) {
        self.tasks -= 1;
        let done = self.installing.pop_front().expect("the result was being installed");
        assert_eq!(done.range, *range, "tasks end in order");
        self.release(std::iter::once(done.payload), out);
        if self.aborted || self.layout.range(done.piece).is_none() {
            return;
        }
        self.here.insert(done.piece);
        self.summarise_when_whole(out);
    }

    /// Handles `Task::Summarise`. Returns the outcome, if the round still needs it.
    pub(crate) fn summarised(
        &mut self,
        (hash, square_norm): (ContentHash, f64),
        checks: Vec<RoundCheck>,
        sums: Vec<(Stage, SumsPrint)>,
    ) -> Option<RoundOutcome> {
        self.tasks -= 1;
        if !self.aborted && self.measuring {
            self.sums = sums;
            self.checks = checks;
            // Who owns nothing has no pieces.
            let groups = checked_groups(&self.round, self.layout.codec());
            self.checks.resize(groups, RoundCheck::default());
            self.outcome = Some(RoundOutcome { hash, square_norm, proof: self.proofs.whole });
        }
        self.outcome
    }

    /// Exports the next pieces to another member: at most `most` beyond the results that
    /// have arrived, and at most its limit in flight.
    fn export(&mut self, to: usize, most: u32, out: &mut Vec<PeerAction>) {
        let most = most.min(self.others[to].ahead) as usize;
        while !self.changing && self.others[to].on_way.len() < most {
            let other = &mut self.others[to];
            let Some(piece) = other.queue.pop_front() else { return };
            if !self.results.contains(&piece) {
                other.on_way.insert(piece);
                self.give_export(to, piece, Vec::new(), self.proofs.own, out);
            }
        }
    }

    /// Has the engine read this member's integers of a piece for another one, with these added.
    fn give_export(
        &mut self,
        to: usize,
        piece: u32,
        parts: Vec<Payload>,
        proof: u64,
        out: &mut Vec<PeerAction>,
    ) {
        let range = self.layout.range(piece).expect("the piece is sent");
        let (round, to) = (self.round.id, self.round.group.members[to].member);
        let ids = parts.iter().map(|part| part.id).collect();
        self.exporting.push_back(Summing { piece, parts, proof, stale: false });
        self.compute(Task::Export { round, to, piece, range, parts: ids }, out);
    }

    /// Sums a piece once the integers of all members that send theirs here are there: reduces it as its owner, if the
    /// tags sum to the whole batch's, or sends the sum on.
    fn sum_when_whole(&mut self, piece: u32, out: &mut Vec<PeerAction>) -> Result<(), Fault> {
        let parent = self.layout.parent(piece, self.place);
        if self.changing || parent.is_some() && !self.layout.collects(piece, self.place) {
            return Ok(());
        }
        let children = self.layout.child_count(piece, self.place);
        let gathered = self.gathered.entry(piece).or_default();
        if gathered.given || gathered.parts.len() != children {
            return Ok(());
        }
        let proofs = gathered.parts.values().map(|part| part.proof);
        let proof = proofs.fold(self.proofs.own, u64::wrapping_add);
        if parent.is_none() && proof != self.proofs.whole {
            return Err(self.proof_differs(proof));
        }
        gathered.given = true;
        let parts = std::mem::take(&mut gathered.parts).into_values();
        let parts: Vec<Payload> = parts.map(|part| part.payload).collect();
        match parent {
            Some(owner) => self.give_export(owner, piece, parts, proof, out),
            None => self.give_reduce(piece, parts, proof, out),
        }
        Ok(())
    }

    fn give_reduce(
        &mut self,
        piece: u32,
        parts: Vec<Payload>,
        proof: u64,
        out: &mut Vec<PeerAction>,
    ) {
        let range = self.layout.range(piece).expect("this member owns the piece");
        let round = self.round.id;
        let ids: Vec<PayloadId> = parts.iter().map(|part| part.id).collect();
        self.reducing.push_back(Summing { piece, parts, proof, stale: false });
        self.compute(Task::Reduce { round, piece, range, parts: ids }, out);
    }

    fn summarise_when_whole(&mut self, out: &mut Vec<PeerAction>) {
        if self.here.len() == self.layout.count() {
            self.measuring = true;
            let is_checked = checked_groups(&self.round, self.layout.codec()) > 0;
            let owned = if is_checked { self.layout.owned(self.place) } else { Vec::new() };
            self.compute(Task::Summarise { round: self.round.id, owned }, out);
        }
    }

    fn release(&mut self, payloads: impl Iterator<Item = Payload>, out: &mut Vec<PeerAction>) {
        for payload in payloads {
            self.held = self.held - payload.size;
            out.push(PeerAction::Release(payload.id));
        }
    }

    /// A size of a piece.
    fn size_of(&self, piece: u32, size: fn(&Layout, &Range<usize>) -> Bytes) -> Option<Bytes> {
        Some(size(&self.layout, &self.layout.range(piece)?))
    }

    /// The index of a member other than this one.
    fn other(&self, member: Member) -> Option<usize> {
        place_in(&self.round, member).filter(|place| *place != self.place)
    }

    fn proof_differs(&self, found: u64) -> Fault {
        Fault::ProofDiffers { round: self.round.id, expected: self.proofs.whole, found }
    }
}

/// Number of groups of owners by which the members of a round check its result; none if there is nothing to check.
///
/// The sums that went into a mended round are partly those of lost members. The rest of the members make up the same
/// whole, but only of integers, since rounding errors are lost with a member.
pub(crate) fn checked_groups(round: &Round, codec: SumCodec) -> usize {
    let makes_up = round.mended.mend == Mend(0) || codec.is_exact();
    if makes_up { owner_groups(round.group.members.len()) } else { 0 }
}

/// The index of a member in a round, whose members are sorted.
pub(crate) fn place_in(round: &Round, member: Member) -> Option<usize> {
    round.group.members.binary_search_by_key(&member, |part| part.member).ok()
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
