//! What an optimizer keeps beside the weights: its slots, and the shape of each for every weight.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Lars, Manifest, Rule, Sgd};

use crate::model::parameters::{Parameter, parameters};
use crate::optimizer::guard;

/// A vector beside the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// A mean of gradients.
    FirstMoment,
    /// A mean of squared gradients.
    SecondMoment,
    /// A sum or a mean of gradients that gives the direction of updates.
    Momentum,
    /// Means of squared gradients over the rows of a matrix.
    RowFactor,
    /// Means of squared gradients over the columns of a matrix.
    ColumnFactor,
    /// [`Self::Momentum`] of virtual workers, where they carry it; that of the run is of their ways.
    WorkerMomentum,
    /// What the run's guard remembers, which belongs to no weight.
    Guard,
}

impl Slot {
    /// Begins the names of its tensors in an optimizer file.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::FirstMoment => "first_moment.",
            Self::SecondMoment => "second_moment.",
            Self::Momentum => "momentum.",
            Self::RowFactor => "row_factor.",
            Self::ColumnFactor => "column_factor.",
            Self::WorkerMomentum => "worker_momentum.",
            Self::Guard => "guard.",
        }
    }

    /// The slot of a run in which it carries this one of its workers.
    pub(crate) const fn of_worker(self) -> Self {
        match self {
            Self::Momentum => Self::WorkerMomentum,
            // The run's own rule has no other slot.
            slot => slot,
        }
    }

    /// Whether its numbers are means of squares.
    pub(crate) const fn is_of_squares(self) -> bool {
        matches!(self, Self::SecondMoment | Self::RowFactor | Self::ColumnFactor)
    }

    /// All slots in order.
    const ALL: [Self; 5] = [
        Self::FirstMoment,
        Self::SecondMoment,
        Self::Momentum,
        Self::RowFactor,
        Self::ColumnFactor,
    ];

    /// The shape of what a rule keeps here for a weight; `None` if it keeps nothing.
    fn shape(self, rule: &Rule, parameter: &Parameter) -> Option<Vec<usize>> {
        let same = || Some(parameter.shape.clone());
        match (rule, self) {
            (Rule::Adamw(_) | Rule::Lamb(_), Self::FirstMoment | Self::SecondMoment)
            | (Rule::Lion(_), Self::Momentum) => same(),
            (
                Rule::Sgd(Sgd { momentum, .. }) | Rule::Lars(Lars { momentum, .. }),
                Self::Momentum,
            ) => same().filter(|_| *momentum > 0.0),
            (Rule::Muon(_), Self::Momentum) => same().filter(|_| parameter.is_layer_matrix()),
            (Rule::Muon(_), Self::FirstMoment | Self::SecondMoment) => {
                same().filter(|_| !parameter.is_layer_matrix())
            }
            (Rule::Adafactor(_), slot) => match (slot, &parameter.shape[..]) {
                (Self::RowFactor, [rows, _]) => Some(vec![*rows]),
                (Self::ColumnFactor, [_, columns]) => Some(vec![*columns]),
                (Self::SecondMoment, [_]) => same(),
                _ => None,
            },
            _ => None,
        }
    }
}

/// The tensors of a slot. The offset of each is that in the slot's flat vector.
#[derive(Debug, Clone)]
pub(crate) struct SlotLayout {
    pub(crate) slot: Slot,
    pub(crate) tensors: Vec<Parameter>,
}

impl SlotLayout {
    /// Number of elements of the slot's flat vector.
    pub(crate) fn len(&self) -> usize {
        self.tensors.iter().map(Parameter::len).sum()
    }
}

/// The slots of a rule for these weights, in order; those that are empty are left out.
pub(crate) fn layout(rule: &Rule, parameters: &[Parameter]) -> Vec<SlotLayout> {
    let of_slot = |slot: Slot| {
        let mut offset = 0;
        let mut tensors = Vec::new();
        let updated = parameters.iter().filter(|one| !one.is_biases_of_experts());
        for parameter in updated {
            let Some(shape) = slot.shape(rule, parameter) else { continue };
            let tensor = Parameter { name: parameter.name.clone(), shape, offset };
            offset += tensor.len();
            tensors.push(tensor);
        }
        SlotLayout { slot, tensors }
    };
    Slot::ALL.into_iter().map(of_slot).filter(|slot| !slot.tensors.is_empty()).collect()
}

/// The slots that a run carries from one meeting of its virtual workers to the next, for these weights: those of the
/// workers' rule, if any.
fn carried_layout(manifest: &Manifest, parameters: &[Parameter]) -> Vec<SlotLayout> {
    let Some(rule) = manifest.carried_rule() else { return Vec::new() };
    let of_worker = |layout: SlotLayout| SlotLayout { slot: layout.slot.of_worker(), ..layout };
    layout(rule, parameters).into_iter().map(of_worker).collect()
}

/// All that a run keeps beside these weights, in the order of slots: the slots of its rule, those that its workers
/// carry, and what its guard remembers.
pub(crate) fn layout_of_run(manifest: &Manifest, parameters: &[Parameter]) -> Vec<SlotLayout> {
    let mut slots = layout(&manifest.optimizer.rule, parameters);
    slots.extend(carried_layout(manifest, parameters));
    slots.extend(guard_layout(manifest));
    slots.sort_by_key(|layout| layout.slot);
    slots
}

/// What a run's guard remembers; `None` without one.
pub(crate) fn guard_layout(manifest: &Manifest) -> Option<SlotLayout> {
    let mut offset = 0;
    let tensor = |(name, length): (&str, usize)| {
        let tensor = Parameter { name: name.to_owned(), shape: vec![length], offset };
        offset += length;
        tensor
    };
    let tensors = guard::vectors(manifest.guard.as_ref()?).into_iter().map(tensor).collect();
    Some(SlotLayout { slot: Slot::Guard, tensors })
}

/// Numbers that a run keeps beside the weights of a stage.
#[must_use]
pub fn optimizer_elements(manifest: &Manifest, stage: Stage) -> usize {
    elements(&layout_of_run(manifest, &parameters(manifest, stage)))
}

/// Numbers that a run carries for its virtual workers beside the weights of a stage.
pub(crate) fn carried_elements(manifest: &Manifest, stage: Stage) -> usize {
    elements(&carried_layout(manifest, &parameters(manifest, stage)))
}

fn elements(slots: &[SlotLayout]) -> usize {
    slots.iter().map(SlotLayout::len).sum()
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Adafactor, Adam, Lion, Lora, LoraTarget, Muon, RateScale};

    use super::*;
    use crate::testing::manifest;

    /// Slots with their numbers for a stage of the small run.
    fn sizes(rule: Rule) -> Vec<(Slot, usize)> {
        let parameters = parameters(&manifest(), Stage(0));
        layout(&rule, &parameters).iter().map(|slot| (slot.slot, slot.len())).collect()
    }

    #[test]
    fn every_rule_keeps_what_it_reads_and_no_more() {
        let parameters = parameters(&manifest(), Stage(0));
        let all: usize = parameters.iter().map(Parameter::len).sum();
        let matrices = parameters.iter().filter(|one| one.is_layer_matrix());
        let of_layers: usize = matrices.map(Parameter::len).sum();
        // Two layers of seven matrices; embedding, head and five norms of eight elements.
        assert_eq!(all - of_layers, 2 * 256 * 8 + 5 * 8);
        let (first, second) = (Slot::FirstMoment, Slot::SecondMoment);
        for rule in [Rule::Adamw(Adam::DEFAULT), Rule::Lamb(Adam::DEFAULT)] {
            assert_eq!(sizes(rule), [(first, all), (second, all)]);
        }
        let sgd = |momentum| Rule::Sgd(Sgd { momentum, nesterov: false });
        assert_eq!(sizes(sgd(0.9)), [(Slot::Momentum, all)]);
        assert_eq!(sizes(sgd(0.0)), []);
        let lars = Lars { momentum: 0.9, trust_coefficient: 1e-3, epsilon: 0.0 };
        assert_eq!(sizes(Rule::Lars(lars)), [(Slot::Momentum, all)]);
        let lion = Lion { beta1: 0.9, beta2: 0.99 };
        assert_eq!(sizes(Rule::Lion(lion)), [(Slot::Momentum, all)]);
        let muon = Muon {
            momentum: 0.95,
            nesterov: true,
            rate_scale: RateScale::Original,
            rest_learning_rate: 1e-3,
            rest: Adam::DEFAULT,
        };
        let rest = all - of_layers;
        let expected = [(first, rest), (second, rest), (Slot::Momentum, of_layers)];
        assert_eq!(sizes(Rule::Muon(muon)), expected);
        let adafactor = Adafactor {
            decay_exponent: 0.8,
            epsilon: 1e-15,
            scale_epsilon: 1e-3,
            clip_threshold: 1.0,
        };
        let rows = 2 * 256 + 2 * (8 + 4 + 4 + 8 + 12 + 12 + 8);
        let columns = 2 * 8 + 2 * (6 * 8 + 12);
        let expected = [(second, 5 * 8), (Slot::RowFactor, rows), (Slot::ColumnFactor, columns)];
        assert_eq!(sizes(Rule::Adafactor(adafactor)), expected);
    }

    #[test]
    fn all_adapters_are_matrices_of_layers() {
        let mut manifest = manifest();
        manifest.lora =
            Some(Lora { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec(), base: None });
        assert!(parameters(&manifest, Stage(0)).iter().all(Parameter::is_layer_matrix));
    }
}
