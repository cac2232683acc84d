//! A round that continues without the members that are gone, with the pieces that exist.
//!
//! Other members recompute the contributions of the lost ones, so the sums of some members change.
//! Each piece needs sums that make up the whole batch, and its reducer decides which. Reduced
//! pieces stay valid everywhere, with the sums of the lost members in them. For the other pieces
//! the reducer keeps the sums from members whose sums did not change, and waits for the rest to
//! send theirs again. An island's integers were added up, so if one of its members is gone or
//! changed, all of them send theirs again. Only the pieces that the lost members owned or collected
//! are reduced anew, because it is unknown which members received their results.

use std::collections::BTreeSet;

use shoal_protocol::ids::Mend;
use shoal_protocol::message::Round;

use super::{Reduction, place_in};
use crate::action::{Fault, PeerAction};

/// Whether a reported round follows the known one: it is a new round, or the known round mended
/// once more with a subset of its members, in the same islands. A member that missed the start of a round joins at the
/// next attempt.
pub(crate) fn is_next(known: Option<&Round>, reported: &Round) -> bool {
    let Some(known) = known.filter(|known| known.id >= reported.id) else {
        return reported.mended.mend == Mend(0);
    };
    known.id == reported.id
        && known.mended.mend.next() == reported.mended.mend
        && reported.group.members.iter().all(|part| {
            let place = place_in(known, part.member);
            place.is_some_and(|place| known.group.members[place].island == part.island)
        })
}

impl Reduction {
    /// Marks this member's sums as changing: the engine adds a lost member's contributions to them.
    /// No sums are read until the mended round tells which members' sums changed.
    pub(crate) fn sums_change(&mut self) {
        self.changing = true;
    }

    /// Continues with the remaining members, of which this one must be one. `own_proof` is the sum
    /// of the tags that this member has counted by then. If its sums are `changing` again, another mend follows.
    pub(crate) fn go_on(
        &mut self,
        round: Round,
        own_proof: u64,
        changing: bool,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let before = std::mem::replace(&mut self.round, round);
        let new_place = |place: usize| place_in(&self.round, before.group.members[place].member);
        let new_place: Vec<Option<usize>> = (0..self.others.len()).map(new_place).collect();
        let again = self.layout.sent_again(&before, &self.round);
        self.layout = self.layout.mended(&before, &self.round);
        self.place = new_place[self.place].expect("this member is one of the remaining ones");
        let mut stays = new_place.iter().map(Option::is_some);
        self.others.retain(|_| stays.next().expect("as many as there were"));
        self.forget_lost_pieces(out);
        self.discard_parts(&new_place, &again, out);
        if again.contains(&(self.place as u16)) {
            self.send_again(out);
        }
        for (place, other) in (0..).zip(&mut self.others) {
            if again.contains(&place) {
                other.since = self.round.mended.mend;
            }
        }
        self.queue_exports();
        self.proofs.own = own_proof;
        (self.changing, self.measuring, self.outcome) = (changing, false, None);
        self.start(out)
    }

    /// Forgets the pieces that have other numbers now.
    fn forget_lost_pieces(&mut self, out: &mut Vec<PeerAction>) {
        let Self { layout, here, results, others, exporting, reducing, gathered, .. } = self;
        let is_left = |piece: &u32| layout.range(*piece).is_some();
        here.retain(is_left);
        results.retain(is_left);
        others.iter_mut().for_each(|other| other.on_way.retain(is_left));
        let summing = exporting.iter_mut().chain(reducing);
        summing.for_each(|one| one.stale |= !is_left(&one.piece));
        let lost = gathered.extract_if(.., |piece, _| !is_left(piece));
        let parts = lost.flat_map(|(_, gathered)| gathered.parts.into_values());
        let discarded: Vec<_> = parts.map(|part| part.payload).collect();
        self.release(discarded.into_iter(), out);
    }

    /// Discards integers for unsummed pieces from lost members and from those that send theirs again.
    /// The other sums stay, under their members' new places.
    fn discard_parts(
        &mut self,
        new_place: &[Option<usize>],
        again: &BTreeSet<u16>,
        out: &mut Vec<PeerAction>,
    ) {
        let mut discarded = Vec::new();
        for gathered in self.gathered.values_mut() {
            for (place, part) in std::mem::take(&mut gathered.parts) {
                let new_place = new_place[usize::from(place)].map(|place| place as u16);
                match new_place.filter(|place| !again.contains(place)) {
                    Some(place) => {
                        gathered.parts.insert(place, part);
                    }
                    None => discarded.push(part.payload),
                }
            }
        }
        self.release(discarded.into_iter(), out);
    }

    /// Forgets which integers this member sent, its own and those that it collected. Reducers that have
    /// not summed a piece have discarded them.
    fn send_again(&mut self, out: &mut Vec<PeerAction>) {
        let Self { layout, place, others, exporting, gathered, .. } = self;
        others.iter_mut().for_each(|other| other.on_way.clear());
        exporting.iter_mut().for_each(|one| one.stale = true);
        let owns = |piece: &u32| layout.owner(*piece) == Some(*place);
        let collected = gathered.extract_if(.., |piece, _| !owns(piece));
        let parts = collected.flat_map(|(_, gathered)| gathered.parts.into_values());
        let discarded: Vec<_> = parts.map(|part| part.payload).collect();
        self.release(discarded.into_iter(), out);
    }
}
