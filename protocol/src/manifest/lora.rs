//! Low-rank adaptation: small matrices are trained beside frozen ones (Hu et al., arXiv 2106.09685).

use serde::{Deserialize, Serialize};

use super::{LatentAttention, Manifest, ManifestError, Model, within};

/// Adapters of a run: the product of a matrix is increased by `alpha / rank · B(A(x))`, where A has
/// `rank` rows. All other weights are frozen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Rows of each A, and columns of each B.
    pub rank: u32,
    /// Scale of the increase, times the rank.
    pub alpha: f64,
    /// The matrices of every layer that have adapters, in the order of [`LoraTarget`].
    #[serde(default = "all_targets")]
    pub targets: Vec<LoraTarget>,
    /// How the frozen matrices of layers are held; without it, in the dtype of passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Quantisation>,
}

/// A format of few bits for frozen matrices.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum Quantisation {
    /// Four bits for each weight, in blocks of 64 whose scales have eight (QLoRA: Dettmers et al., arXiv 2305.14314).
    Nf4,
}

impl Quantisation {
    /// Its name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
        }
    }
}

/// A matrix of a decoder layer, by the name of transformers.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum LoraTarget {
    /// Of the queries.
    QProj,
    /// Of the keys.
    KProj,
    /// Of the values.
    VProj,
    /// Of the attention's output.
    OProj,
    /// Of the feed-forward block's gate.
    GateProj,
    /// Of the feed-forward block's inner values.
    UpProj,
    /// Of the feed-forward block's output.
    DownProj,
}

impl LoraTarget {
    /// All, in order.
    pub const ALL: [Self; 7] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
    ];

    /// Its name in transformers, from the layer on.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "self_attn.q_proj",
            Self::KProj => "self_attn.k_proj",
            Self::VProj => "self_attn.v_proj",
            Self::OProj => "self_attn.o_proj",
            Self::GateProj => "mlp.gate_proj",
            Self::UpProj => "mlp.up_proj",
            Self::DownProj => "mlp.down_proj",
        }
    }

    /// Whether it is a matrix of the experts that tokens choose. In a model that has some, a shared expert and layers without
    /// experts have no adapters, as in PEFT.
    #[must_use]
    pub fn is_of_experts(self, model: &Model) -> bool {
        let is_feed_forward = matches!(self, Self::GateProj | Self::UpProj | Self::DownProj);
        is_feed_forward && model.block.experts.is_some()
    }

    /// The last part of its name, which names it among the matrices of a layer.
    #[must_use]
    pub fn matrix(self) -> &'static str {
        let name = self.name();
        name.rsplit_once('.').map_or(name, |(_, matrix)| matrix)
    }
}

fn all_targets() -> Vec<LoraTarget> {
    LoraTarget::ALL.to_vec()
}

impl Model {
    /// What `lora.targets` must be in place of a matrix that has no adapters in this model; `None` if it may have some.
    #[must_use]
    pub fn why_no_adapters(&self, target: LoraTarget) -> Option<&'static str> {
        use LoraTarget::{GateProj, KProj, QProj, VProj};
        let block = &self.block;
        match (target, block.latent) {
            (GateProj, _) if block.ungated => Some("matrices of the model, which has no gate"),
            (KProj | VProj, Some(LatentAttention { queries: None, .. })) => Some(
                "q_proj and o_proj in a model with latent attention, whose other matrices have no adapters yet",
            ),
            (QProj | KProj | VProj, Some(LatentAttention { queries: Some(_), .. })) => Some(
                "o_proj in a model with latent attention, whose other matrices have no adapters yet",
            ),
            _ if target.is_of_experts(self) && self.slices > 1 => Some(
                "some of q_proj, k_proj, v_proj and o_proj where model.slices divides experts, which have no adapters then",
            ),
            _ => None,
        }
    }
}

impl Manifest {
    /// Whether the frozen matrices of layers are held in few bits.
    #[must_use]
    pub fn packs_base(&self) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.base.is_some())
    }

    /// Checks the adapters against the model.
    pub(super) fn check_lora(&self) -> Result<(), ManifestError> {
        let Some(Lora { rank, alpha, targets, base: _ }) = &self.lora else { return Ok(()) };
        within("lora.rank", *rank, 1..=self.model.hidden)?;
        within("lora.alpha", *alpha, 1e-3..=1e6)?;
        if targets.is_empty() || !targets.is_sorted_by(|one, other| one < other) {
            let names: Vec<&str> = targets.iter().map(|target| target.name()).collect();
            return Err(ManifestError::OutOfRange {
                key: "lora.targets",
                value: format!("{names:?}"),
                range: "one or more of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and \
                        down_proj, each once and in this order"
                    .to_owned(),
            });
        }
        let refused = |target: &LoraTarget| Some((*target, self.model.why_no_adapters(*target)?));
        if let Some((target, range)) = targets.iter().find_map(refused) {
            let (value, range) = (target.matrix().to_owned(), range.to_owned());
            return Err(ManifestError::OutOfRange { key: "lora.targets", value, range });
        }
        let of_experts = targets.iter().filter(|target| target.is_of_experts(&self.model));
        if !matches!(of_experts.clone().count(), 0 | 3) {
            let names: Vec<&str> = of_experts.map(|target| target.matrix()).collect();
            return Err(ManifestError::OutOfRange {
                key: "lora.targets",
                value: names.join(", "),
                range: "all of gate_proj, up_proj and down_proj, or none, in a model of experts: PEFT reads no others"
                    .to_owned(),
            });
        }
        if self.model.boundary.is_some() {
            return Err(ManifestError::LoraWithBoundary);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::small;
    use super::super::{Rotary, RotaryScaling};
    use super::*;

    fn with(targets: &[LoraTarget]) -> Result<(), ManifestError> {
        let lora = Lora { rank: 4, alpha: 8.0, targets: targets.to_vec(), base: None };
        Manifest { lora: Some(lora), ..small() }.check()
    }

    #[test]
    fn latent_attention_has_adapters_of_the_matrices_that_it_has() {
        use LoraTarget::{OProj, QProj, VProj};
        let with = |queries, targets: &[LoraTarget]| {
            let mut manifest = small();
            let head_size = manifest.model.head_size();
            let rotated = head_size / 2;
            let interleaved = true;
            manifest.model.key_value_heads = manifest.model.heads;
            manifest.model.block.latent = Some(LatentAttention {
                queries,
                keys_values: 6,
                rotated,
                interleaved,
                value_size: head_size,
            });
            let scaling = RotaryScaling::None;
            manifest.model.block.rotary = vec![Rotary { theta: 1e4, dimensions: rotated, scaling }];
            let (targets, base) = (targets.to_vec(), None);
            manifest.lora = Some(Lora { rank: 4, alpha: 8.0, targets, base });
            manifest.check()
        };
        assert_eq!(with(None, &[QProj, OProj]), Ok(()));
        assert_eq!(with(Some(4), &[OProj]), Ok(()));
        for (queries, targets) in [(None, [VProj, OProj]), (Some(4), [QProj, OProj])] {
            let error = with(queries, &targets).expect_err("refused").to_string();
            assert!(error.contains("latent attention"), "{error}");
        }
    }

    #[test]
    fn targets_are_some_of_all_in_order() {
        use LoraTarget::{KProj, QProj, VProj};
        assert_eq!(with(&LoraTarget::ALL), Ok(()));
        assert_eq!(with(&[QProj, VProj]), Ok(()));
        for wrong in [&[][..], &[VProj, QProj], &[KProj, KProj]] {
            let error = with(wrong).expect_err("refused").to_string();
            assert!(error.starts_with("lora.targets = "), "{error}");
        }
    }
}
