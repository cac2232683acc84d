//! The result of a round, piece by piece.

use shoal_protocol::message::RoundId;

/// The result of a round as far as it is here.
#[derive(Debug)]
pub(super) struct RoundResult {
    round: Option<RoundId>,
    sums: Vec<Option<i64>>,
}

impl RoundResult {
    /// No result yet, of a vector with so many elements.
    pub(super) fn new(elements: usize) -> Self {
        Self { round: None, sums: vec![None; elements] }
    }

    /// Stores a piece of a round's result. A new round begins empty; in a mended round a piece may
    /// arrive again, with the same sums unless others err.
    pub(super) fn install(
        &mut self,
        round: RoundId,
        (start, may_differ): (usize, bool),
        sums: &[i64],
    ) -> Result<(), String> {
        if self.round != Some(round) {
            self.sums.fill(None);
            self.round = Some(round);
        }
        for (place, sum) in self.sums[start..].iter_mut().zip(sums) {
            if place.replace(*sum).is_some_and(|known| known != *sum && !may_differ) {
                return Err("an element of a result has two sums".to_owned());
            }
        }
        Ok(())
    }

    pub(super) fn whole(&self, round: RoundId) -> Result<Vec<i64>, String> {
        let whole: Option<Vec<i64>> = self.sums.iter().copied().collect();
        let whole = whole.filter(|_| self.round == Some(round));
        whole.ok_or_else(|| "a result with holes is used".to_owned())
    }
}
