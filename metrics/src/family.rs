//! One metric for each value of a label.

use std::marker::PhantomData;

use crate::labels::Label;

/// One metric of type `M` for each value of the label `L`. All exist from the start, so that a rate
/// over what has not happened yet is 0 and not missing.
#[derive(Debug, Clone)]
pub struct Family<L, M> {
    members: Vec<M>,
    label: PhantomData<L>,
}

impl<L: Label, M> Family<L, M> {
    pub(crate) fn new(member: impl Fn(&'static str) -> M) -> Self {
        let members = L::ALL.iter().map(|label| member(label.value())).collect();
        Self { members, label: PhantomData }
    }

    /// The metric of one value.
    pub fn of(&self, label: L) -> &M {
        let index = L::ALL.iter().position(|other| *other == label);
        &self.members[index.expect("ALL holds every value")]
    }
}
