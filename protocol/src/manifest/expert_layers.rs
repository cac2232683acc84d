//! The layers of a model that have experts, and the checks of these.

use super::{Balance, ExpertGroups, Experts, Manifest, ManifestError, Model, Router, within};
use crate::limits;

impl Model {
    /// The experts of a layer; `None` for one with a single feed-forward block.
    #[must_use]
    pub fn experts_of(&self, layer: u32) -> Option<&Experts> {
        let experts = self.block.experts.as_ref()?;
        (!experts.dense_layers.contains(&layer)).then_some(experts)
    }

    /// Whether biases that move keep the experts equally busy.
    #[must_use]
    pub fn moves_biases(&self) -> bool {
        self.block.experts.as_ref().is_some_and(|experts| experts.balance == Balance::Bias)
    }

    /// Whether a loss keeps the experts equally busy.
    #[must_use]
    pub fn has_balance_loss(&self) -> bool {
        self.block.experts.as_ref().is_some_and(|experts| experts.balance == Balance::Loss)
    }

    /// Whether some layer has a single feed-forward block.
    #[must_use]
    pub fn has_dense_layers(&self) -> bool {
        let experts = self.block.experts.as_ref();
        experts.is_none_or(|experts| !experts.dense_layers.is_empty())
    }

    /// Checks the experts against the rest of the model.
    pub(super) fn check_experts(&self) -> Result<(), ManifestError> {
        let Some(experts) = &self.block.experts else { return Ok(()) };
        within("model.experts.count", experts.count, 1..=limits::EXPERTS)?;
        if !(1..=experts.count).contains(&experts.per_token) {
            return Err(ManifestError::OutOfRange {
                key: "model.experts.per_token",
                value: experts.per_token.to_string(),
                range: format!("from 1 to model.experts.count = {}", experts.count),
            });
        }
        let width = 1..=limits::INTERMEDIATE;
        within("model.experts.intermediate", experts.intermediate, width.clone())?;
        let shared = experts.shared_intermediate.unwrap_or(1);
        within("model.experts.shared_intermediate", shared, width)?;
        within("model.experts.balance_rate", experts.balance_rate, 1e-8..=1.0)?;
        within("model.experts.balance_coefficient", experts.balance_coefficient, 1e-8..=1e3)?;
        within("model.experts.scale", experts.scale, 1e-6..=1e3)?;
        experts.check_balance_loss()?;
        experts.check_groups()?;
        let dense = &experts.dense_layers;
        let in_order = dense.is_sorted_by(|one, other| one < other);
        if !in_order || dense.last().is_some_and(|last| *last >= self.layers) {
            return Err(ManifestError::OutOfRange {
                key: "model.experts.dense_layers",
                value: format!("{dense:?}"),
                range: format!(
                    "numbers below model.layers = {}, each once and in ascending order",
                    self.layers
                ),
            });
        }
        if dense.len() == self.layers as usize {
            return Err(ManifestError::OutOfRange {
                key: "model.experts.dense_layers",
                value: format!("all {} layers", self.layers),
                range: "fewer than all layers; a model without experts has no model.experts"
                    .to_owned(),
            });
        }
        let biased = self.block.biases.feed_forward;
        let refused = [
            (self.block.ungated, "absent in a block whose feed-forward maps have no gate"),
            (
                biased && self.slices > 1,
                "absent where model.slices divides feed-forward maps that have biases",
            ),
            (
                biased && experts.shared_intermediate.is_some(),
                "without shared_intermediate where feed-forward maps have biases",
            ),
        ];
        if let Some((_, range)) = refused.into_iter().find(|(is_so, _)| *is_so) {
            let (value, range) = ("set".to_owned(), range.to_owned());
            return Err(ManifestError::OutOfRange { key: "model.experts", value, range });
        }
        let slices = u32::from(self.slices);
        let widths = [experts.intermediate, experts.shared_intermediate.unwrap_or(slices)];
        if widths.iter().any(|width| !width.is_multiple_of(slices)) {
            return Err(ManifestError::OutOfRange {
                key: "model.slices",
                value: slices.to_string(),
                range: format!(
                    "a divisor of the widths inside experts: intermediate = {}, shared_intermediate = {}",
                    experts.intermediate,
                    experts
                        .shared_intermediate
                        .map_or("none".to_owned(), |width| width.to_string())
                ),
            });
        }
        Ok(())
    }
}

impl Experts {
    fn check_balance_loss(&self) -> Result<(), ManifestError> {
        let is_plain = self.router == Router::Softmax && !self.biased;
        if self.balance == Balance::Loss && !is_plain {
            return Err(ManifestError::OutOfRange {
                key: "model.experts.balance",
                value: "loss".to_owned(),
                range: "\"none\" or \"bias\" where tokens choose by sigmoids or with biases"
                    .to_owned(),
            });
        }
        Ok(())
    }

    fn check_groups(&self) -> Result<(), ManifestError> {
        let Some(ExpertGroups { count, chosen }) = self.groups else { return Ok(()) };
        within("model.experts.groups.count", count, 1..=self.count)?;
        within("model.experts.groups.chosen", chosen, 1..=count)?;
        let size = self.count / count;
        let least = if self.router == Router::Sigmoid { 2 } else { 1 };
        if self.count.is_multiple_of(count) && self.per_token <= chosen * size && size >= least {
            return Ok(());
        }
        Err(ManifestError::OutOfRange {
            key: "model.experts.groups",
            value: format!("{chosen} of {count}"),
            range: format!(
                "a divisor of count = {}, with per_token = {} experts in the chosen groups, and {least} or more in each",
                self.count, self.per_token
            ),
        })
    }
}

/// Tokens of a microbatch up to which each count of them is a whole f32.
const COUNTABLE: u64 = 1 << 24;

impl Manifest {
    /// Checks that a run whose experts have biases counts tokens exactly.
    pub(super) fn check_balance(&self) -> Result<(), ManifestError> {
        let experts = self.model.block.experts.as_ref();
        let Some(experts) = experts.filter(|_| self.model.moves_biases()) else { return Ok(()) };
        let refused = [
            (
                self.model.base.is_some() && !experts.biased,
                "\"none\" with a base that has no such biases",
            ),
            (self.lora.is_some(), "\"none\" beside adapters, which leave the experts frozen"),
            (self.inner.is_some(), "\"none\" with virtual workers, which sum no counts of tokens"),
            (
                !self.codec.all_reduce.is_exact(),
                "\"none\", or codec.all_reduce a codec that keeps sums whole: \"exact\" or \"integers\"",
            ),
            (
                self.tokens_per_microbatch() > COUNTABLE,
                "\"none\", or a microbatch of at most 16777216 tokens",
            ),
        ];
        match refused.into_iter().find(|(is_so, _)| *is_so) {
            Some((_, range)) => Err(ManifestError::OutOfRange {
                key: "model.experts.balance",
                value: "bias".to_owned(),
                range: range.to_owned(),
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::small;
    use super::super::{Base, Lora, LoraTarget};
    use super::*;
    use crate::codec::{Codec, SumCodec};
    use crate::ids::ContentHash;

    fn experts() -> Experts {
        Experts {
            shared_intermediate: Some(16),
            dense_layers: vec![0, 3],
            ..Experts::new(8, 2, 24)
        }
    }

    fn with(change: impl FnOnce(&mut Manifest)) -> Result<(), String> {
        let mut manifest = small();
        manifest.model.block.experts = Some(experts());
        change(&mut manifest);
        let checked = manifest.check();
        let read = Manifest::from_bytes(&manifest.to_bytes());
        assert_eq!(read.map(|read| assert_eq!(read, manifest)), checked);
        checked.map_err(|error| error.to_string())
    }

    fn refusal(change: impl Fn(&mut Experts)) -> String {
        let apply = |manifest: &mut Manifest| {
            change(manifest.model.block.experts.as_mut().expect("it has some"));
        };
        with(apply).expect_err("refused")
    }

    #[test]
    fn experts_fit_their_model() {
        assert_eq!(with(|_| ()), Ok(()));
        let error = refusal(|experts| experts.per_token = 9);
        let expected = "model.experts.per_token = 9 is out of range: it must be from 1 to \
                        model.experts.count = 8";
        assert_eq!(error, expected);
        assert!(refusal(|experts| experts.per_token = 0).contains("per_token = 0"));
        for (count, chosen, is_valid) in
            [(4, 1, true), (4, 4, true), (8, 2, true), (8, 1, false), (3, 2, false), (4, 5, false)]
        {
            let error = with(|manifest| {
                let experts = manifest.model.block.experts.as_mut().expect("some");
                experts.groups = Some(ExpertGroups { count, chosen });
            });
            assert_eq!(error.is_ok(), is_valid, "{error:?}");
            assert!(error.err().is_none_or(|error| error.contains("model.experts.groups")));
        }
        assert!(refusal(|experts| experts.count = 0).contains("model.experts.count = 0"));
        for dense in [&[5][..], &[3, 0], &[1, 1]] {
            let error = refusal(|experts| experts.dense_layers = dense.to_vec());
            assert!(error.contains("below model.layers = 5"), "{error}");
        }
        let error = refusal(|experts| experts.dense_layers = (0..5).collect());
        assert!(error.contains("all 5 layers"), "{error}");
        let error = with(|manifest| manifest.model.block.ungated = true).expect_err("refused");
        assert!(error.starts_with("model.experts = set"), "{error}");
        let biased = |change: &dyn Fn(&mut Manifest)| {
            with(|manifest| {
                manifest.model.block.biases.feed_forward = true;
                manifest.model.block.experts.as_mut().expect("some").shared_intermediate = None;
                change(manifest);
            })
        };
        assert_eq!(biased(&|_| ()), Ok(()));
        let error = biased(&|manifest| manifest.model.slices = 2).expect_err("refused");
        assert!(error.contains("where model.slices divides"), "{error}");
        let shared = |manifest: &mut Manifest| {
            manifest.model.block.experts.as_mut().expect("some").shared_intermediate = Some(16);
        };
        let error = biased(&shared).expect_err("refused");
        assert!(error.contains("without shared_intermediate"), "{error}");
    }

    #[test]
    fn slices_divide_the_width_of_experts() {
        assert_eq!(with(|manifest| manifest.model.slices = 2), Ok(()));
        let error = with(|manifest| {
            manifest.model.slices = 2;
            manifest.model.block.experts.as_mut().expect("some").intermediate = 25;
        });
        let error = error.expect_err("refused");
        assert!(error.contains("widths inside experts: intermediate = 25"), "{error}");
    }

    #[test]
    fn adapters_of_experts_are_of_all_their_matrices() {
        let lora = |targets: &[LoraTarget]| {
            Some(Lora { rank: 2, alpha: 4.0, targets: targets.to_vec(), base: None })
        };
        for targets in [&LoraTarget::ALL[..4], &LoraTarget::ALL, &LoraTarget::ALL[4..]] {
            assert_eq!(with(|manifest| manifest.lora = lora(targets)), Ok(()));
        }
        for targets in [&LoraTarget::ALL[3..5], &LoraTarget::ALL[4..6], &LoraTarget::ALL[6..]] {
            let error = with(|manifest| manifest.lora = lora(targets)).expect_err("not all");
            assert!(error.contains("all of gate_proj, up_proj and down_proj"), "{error}");
        }
        let error = with(|manifest| {
            manifest.model.slices = 2;
            manifest.lora = lora(&LoraTarget::ALL);
        });
        let error = error.expect_err("refused");
        assert!(error.contains("lora.targets = gate_proj") && error.contains("slices"), "{error}");
    }

    type Change<'a> = &'a dyn Fn(&mut Manifest);

    #[test]
    fn biases_are_where_tokens_are_counted_exactly() {
        let biased = |change: &dyn Fn(&mut Manifest)| {
            with(|manifest| {
                let experts = manifest.model.block.experts.as_mut().expect("it has some");
                experts.balance = Balance::Bias;
                change(manifest);
            })
        };
        assert_eq!(biased(&|_| ()), Ok(()));
        assert_eq!(biased(&|manifest| manifest.codec.all_reduce = SumCodec::Integers), Ok(()));
        let base = Base { index: ContentHash([1; 32]), bytes: 9, loads_weights: false };
        let targets = LoraTarget::ALL[..4].to_vec();
        let lora = Lora { rank: 2, alpha: 4.0, targets, base: None };
        let refusals: [(Change<'_>, &str); 4] = [
            (&|manifest| manifest.model.base = Some(base), "with a base"),
            (&|manifest| manifest.lora = Some(lora.clone()), "beside adapters"),
            (
                &|manifest| manifest.codec.all_reduce = SumCodec::Rounded(Codec::Bf16),
                "codec.all_reduce",
            ),
            (
                &|manifest| {
                    manifest.model.context = 1 << 20;
                    manifest.training.microbatch_size = 17;
                },
                "16777216 tokens",
            ),
        ];
        for (change, named) in refusals {
            let error = biased(change).expect_err("refused");
            assert!(error.starts_with("model.experts.balance = bias is out of range"), "{error}");
            assert!(error.contains(named), "{error}");
        }
        for rate in [0.0, -0.001, f64::NAN, 2.0] {
            let error = with(|manifest| {
                manifest.model.block.experts.as_mut().expect("some").balance_rate = rate;
            });
            let error = error.expect_err("refused");
            assert!(error.starts_with("model.experts.balance_rate = "), "{error}");
        }
        for coefficient in [0.0, -0.01, f64::NAN, 1001.0] {
            let error = refusal(|experts| experts.balance_coefficient = coefficient);
            assert!(error.starts_with("model.experts.balance_coefficient = "), "{error}");
        }
    }

    #[test]
    fn a_loss_balances_experts_also_beside_adapters_and_with_workers() {
        let base = Base { index: ContentHash([1; 32]), bytes: 9, loads_weights: true };
        let targets = LoraTarget::ALL[..4].to_vec();
        let lora = Lora { rank: 2, alpha: 4.0, targets, base: None };
        let balanced = with(|manifest| {
            manifest.model.block.experts.as_mut().expect("some").balance = Balance::Loss;
            assert!(manifest.model.has_balance_loss());
            (manifest.model.base, manifest.lora) = (Some(base), Some(lora));
            manifest.codec.all_reduce = SumCodec::Rounded(Codec::Bf16);
        });
        assert_eq!(balanced, Ok(()));
    }

    #[test]
    fn a_layer_has_experts_unless_it_is_dense() {
        let mut model = small().model;
        assert!(model.experts_of(1).is_none() && model.has_dense_layers());
        model.block.experts = Some(experts());
        let has: Vec<bool> = (0..5).map(|layer| model.experts_of(layer).is_some()).collect();
        assert_eq!(has, [false, true, true, false, true]);
    }
}
