//! A round that goes on without members that are gone, with what there is of it.
//!
//! What the gone had counted is counted by others now, so that the sums of some are not what they were.
//! Each piece needs sums that make the whole batch, and which those are is up to whoever sums it: pieces that
//! a member has summed stay as they are everywhere, with the sums of the gone in them. For the others it
//! takes what came of those whose sums did not change, and waits for what the rest send again. Only the pieces that
//! the gone were to sum begin anew, at other members, since nobody knows who heard of their results.

use shoal_protocol::ids::Mend;
use shoal_protocol::message::Round;

use super::{OwnPiece, Reduction, gone, place_in};
use crate::action::{Fault, PeerAction};

/// Whether what is told of a round follows what is known: its beginning, or where that is known that it is mended
/// once more, among some of its members. Who missed how it began hears when it is tried anew.
pub(crate) fn is_next(known: Option<&Round>, told: &Round) -> bool {
    let Some(known) = known.filter(|known| known.id >= told.id) else {
        return told.mended.mend == Mend(0);
    };
    known.id == told.id
        && known.mended.mend.next() == told.mended.mend
        && told.group.members.iter().all(|part| place_in(known, part.member).is_some())
}

impl Reduction {
    /// Something is added to this member's sums, as the engine comes to it: what a member that is gone
    /// had counted. Nothing more is read of them before it is known who else has others now.
    pub(crate) fn sums_change(&mut self) {
        self.changing = true;
    }

    /// Goes on with those who are left, which this member is one of. `own_proof` is the sum of the tags of
    /// what it counted by now.
    pub(crate) fn go_on(
        &mut self,
        round: Round,
        own_proof: u64,
        out: &mut Vec<PeerAction>,
    ) -> Result<(), Fault> {
        let before = std::mem::replace(&mut self.round, round);
        let stands = |place: usize| place_in(&self.round, before.group.members[place].member);
        let stands: Vec<Option<usize>> = (0..self.others.len()).map(stands).collect();
        self.forget_results_of(&gone(&before, &self.round));
        self.place = stands[self.place].expect("this member is one of those who are left");
        self.let_go_of_parts(&stands, out);
        let mut stays = stands.iter().map(Option::is_some);
        self.others.retain(|_| stays.next().expect("as many as there were"));
        for place in &self.round.mended.changed {
            let changed = usize::from(*place);
            if changed == self.place {
                // Whoever has not summed a piece has let go of what it got.
                for other in &mut self.others {
                    other.next = 0;
                    other.on_way.clear();
                }
            } else if let Some(other) = self.others.get_mut(changed) {
                other.since = self.round.mended.mend;
            }
        }
        self.own.resize_with(self.layout.pieces(self.place), OwnPiece::default);
        self.own_proof = own_proof;
        (self.changing, self.measuring, self.outcome) = (false, false, None);
        self.start(out)
    }

    /// The pieces that the gone had summed are not there any more, and are others' to sum.
    fn forget_results_of(&mut self, gone: &[usize]) {
        for start in gone.iter().flat_map(|place| self.layout.starts(*place)) {
            self.here.remove(&start);
        }
        self.layout = self.layout.without(gone, &self.round.group);
    }

    /// Lets go of what the gone, and those whose sums changed, sent for pieces that are not summed. The others'
    /// stays, at the places where they stand now.
    fn let_go_of_parts(&mut self, stands: &[Option<usize>], out: &mut Vec<PeerAction>) {
        let changed = &self.round.mended.changed;
        let mut of_no_use = Vec::new();
        for own in self.own.iter_mut().filter(|own| !own.given) {
            for (place, part) in std::mem::take(&mut own.parts) {
                let stands = stands[usize::from(place)].map(|place| place as u16);
                match stands.filter(|place| !changed.contains(place)) {
                    Some(place) => {
                        own.parts.insert(place, part);
                    }
                    None => of_no_use.push(part.payload),
                }
            }
        }
        self.release(of_no_use.into_iter(), out);
    }
}
