//! A round that continues without the members that are gone, with the pieces that exist.
//!
//! Other members recompute the contributions of the lost ones, so the sums of some members change.
//! Each piece needs sums that make up the whole batch, and its reducer decides which. Reduced
//! pieces stay valid everywhere, with the sums of the lost members in them. For the other pieces
//! the reducer keeps the sums from members whose sums did not change, and waits for the rest to
//! send theirs again. Only the pieces that the lost members owned are reduced anew, by other
//! members, because it is unknown which members received their results.

use shoal_protocol::ids::Mend;
use shoal_protocol::message::Round;

use super::{OwnPiece, Reduction, gone, place_in};
use crate::action::{Fault, PeerAction};

/// Whether a reported round follows the known one: it is a new round, or the known round mended
/// once more with a subset of its members. A member that missed the start of a round joins at the
/// next attempt.
pub(crate) fn is_next(known: Option<&Round>, reported: &Round) -> bool {
    let Some(known) = known.filter(|known| known.id >= reported.id) else {
        return reported.mended.mend == Mend(0);
    };
    known.id == reported.id
        && known.mended.mend.next() == reported.mended.mend
        && reported.group.members.iter().all(|part| place_in(known, part.member).is_some())
}

impl Reduction {
    /// Marks this member's sums as changing: the engine adds a lost member's contributions to them.
    /// No sums are read until the mended round tells which members' sums changed.
    pub(crate) fn sums_change(&mut self) {
        self.changing = true;
    }

    /// Continues with the remaining members, of which this one must be one. `own_proof` is the sum
    /// of the tags that this member has counted by then.
    pub(crate) fn go_on(
        &mut self,
        round: Round,
        own_proof: u64,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let before = std::mem::replace(&mut self.round, round);
        let new_place = |place: usize| place_in(&self.round, before.group.members[place].member);
        let new_place: Vec<Option<usize>> = (0..self.others.len()).map(new_place).collect();
        self.forget_results_of(&gone(&before, &self.round));
        self.place = new_place[self.place].expect("this member is one of the remaining ones");
        self.discard_parts(&new_place, out);
        let mut stays = new_place.iter().map(Option::is_some);
        self.others.retain(|_| stays.next().expect("as many as there were"));
        for place in &self.round.mended.changed {
            let changed = usize::from(*place);
            if changed == self.place {
                // Reducers that have not summed a piece have discarded this member's sums for it.
                for other in &mut self.others {
                    other.next = 0;
                    other.on_way.clear();
                }
            } else if let Some(other) = self.others.get_mut(changed) {
                other.since = self.round.mended.mend;
            }
        }
        self.own.resize_with(self.layout.pieces(self.place), OwnPiece::default);
        self.proofs.own = own_proof;
        (self.changing, self.measuring, self.outcome) = (false, false, None);
        self.start(out)
    }

    /// Removes the results of the lost members' pieces and assigns those to others.
    fn forget_results_of(&mut self, gone: &[usize]) {
        for start in gone.iter().flat_map(|place| self.layout.starts(*place)) {
            self.here.remove(&start);
        }
        self.layout = self.layout.without(gone, &self.round.group);
    }

    /// Discards sums for unreduced pieces from lost members and from members whose sums changed.
    /// The other sums stay, under their members' new places.
    fn discard_parts(&mut self, new_place: &[Option<usize>], out: &mut Vec<PeerAction>) {
        let changed = &self.round.mended.changed;
        let mut discarded = Vec::new();
        for own in self.own.iter_mut().filter(|own| !own.given) {
            for (place, part) in std::mem::take(&mut own.parts) {
                let new_place = new_place[usize::from(place)].map(|place| place as u16);
                match new_place.filter(|place| !changed.contains(place)) {
                    Some(place) => {
                        own.parts.insert(place, part);
                    }
                    None => discarded.push(part.payload),
                }
            }
        }
        self.release(discarded.into_iter(), out);
    }
}
