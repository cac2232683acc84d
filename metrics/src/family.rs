//! One metric for each value of a label.

use std::marker::PhantomData;

use prometheus::IntGauge;

use crate::labels::Label;

/// One metric of type `M` for each value of the label `L`. All exist from the start, so that the
/// rate of an event that has not happened yet is 0 and not missing.
#[derive(Debug, Clone)]
pub struct Family<L, M> {
    members: Vec<M>,
    label: PhantomData<L>,
}

impl<L: Label, M> Family<L, M> {
    /// Creates a family from one metric for each value, in the order of [`Label::ALL`].
    pub(crate) fn new(members: Vec<M>) -> Self {
        assert_eq!(members.len(), L::ALL.len(), "one for each value");
        Self { members, label: PhantomData }
    }

    /// The metric of a value.
    pub fn of(&self, label: L) -> &M {
        let index = L::ALL.iter().position(|other| *other == label);
        &self.members[index.expect("ALL holds every value")]
    }
}

impl<L: Label> Family<L, IntGauge> {
    /// Sets this value's gauge to 1 and all others to 0.
    pub fn choose(&self, label: L) {
        for (other, gauge) in L::ALL.iter().zip(&self.members) {
            gauge.set((*other == label).into());
        }
    }
}
