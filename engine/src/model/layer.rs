//! The weights of a layer, and the constants that all layers share.

use shoal_protocol::manifest::{
    Activation, LatentAttention, LayerAttention, Model, Norm, Placement, Rotary,
};
use tch::{Device, Tensor};

use crate::error::Result;
use crate::model::adapter::{Adapter, AdapterSlices};
use crate::model::expert_loads::LayerLoads;
use crate::model::factor::Factor;
use crate::model::own_slices::OwnSlices;
use crate::model::rotary::Angles;
use crate::model::routing::{Biases, ExpertsShape};

/// The weights of a norm.
#[derive(Debug)]
pub(crate) struct NormWeights {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

/// A norm of the residual stream: its weights for each group of tokens that the device has ([`TokenGroups`]).
///
/// [`TokenGroups`]: crate::model::token_groups::TokenGroups
#[derive(Debug)]
pub(crate) struct StreamNorm(pub(crate) Vec<NormWeights>);

/// A matrix `[outputs, inputs]`, and what is added to its product: a vector, and adapters.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Factor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) adapter: Option<Adapter>,
}

impl Linear {
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let product = self.weight.linear(x, self.bias.as_ref())?;
        match &self.adapter {
            None => Ok(product),
            Some(adapter) => Ok(product.f_add(&adapter.increase(x)?)?),
        }
    }
}

/// Weights of one decoder layer. Matrices with the same input are adjacent in the flat vector and
/// are used as one.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention: LayerAttention,
    pub(crate) matrices: Matrices,
    pub(crate) attention_input_norm: Option<StreamNorm>,
    /// `q_norm` and `k_norm`.
    pub(crate) query_key_norms: Option<[Tensor; 2]>,
    /// A sink of each head, if they have some.
    pub(crate) sinks: Option<Tensor>,
    pub(crate) attention_output_norm: Option<StreamNorm>,
    pub(crate) feed_forward_input_norm: Option<StreamNorm>,
    pub(crate) feed_forward_output_norm: Option<StreamNorm>,
}

impl Layer {
    /// How busy its experts were, if it has some.
    pub(crate) fn expert_loads(&self) -> Option<&LayerLoads> {
        match &self.matrices {
            Matrices::Whole(whole) => match &whole.feed_forward {
                FeedForward::Experts(experts) => Some(&experts.loads),
                FeedForward::Dense(_) => None,
            },
            Matrices::Sliced(sliced) => match &sliced.feed_forward {
                SlicedFeedForward::Experts(experts) => Some(&experts.loads),
                SlicedFeedForward::Dense(_) => None,
            },
        }
    }
}

/// The matrices of a decoder layer.
#[derive(Debug)]
pub(crate) enum Matrices {
    Whole(Whole),
    Sliced(Sliced),
}

/// The matrices of a decoder layer, each of which is one product.
#[derive(Debug)]
pub(crate) struct Whole {
    /// `q_proj`, `k_proj` and `v_proj`; with latent attention what it has in their place.
    pub(crate) query_key_value: Linear,
    pub(crate) latent: Option<Box<Latent>>,
    /// `o_proj`.
    pub(crate) attention_output: Linear,
    pub(crate) feed_forward: FeedForward,
}

/// The weights of a layer's latent attention beside its first product.
#[derive(Debug)]
pub(crate) struct Latent {
    /// A norm and the matrix of queries behind it; none where queries come from the stream.
    pub(crate) queries: Option<(Tensor, Linear)>,
    /// A norm and the matrix of keys and values behind it.
    pub(crate) keys_values: (Tensor, Linear),
}

/// The feed-forward block of a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Dense),
    Experts(Experts),
}

/// A single feed-forward block, or an expert.
#[derive(Debug)]
pub(crate) struct Dense {
    /// `gate_proj`, unless the block is ungated, and `up_proj`.
    pub(crate) gate_up: Linear,
    /// `down_proj`.
    pub(crate) down: Linear,
}

/// A mixture of experts.
#[derive(Debug)]
pub(crate) struct Experts {
    /// `[experts, H]`.
    pub(crate) router: Tensor,
    /// What is added to its product, `[experts]`.
    pub(crate) router_bias: Option<Tensor>,
    pub(crate) experts: Vec<Dense>,
    /// An expert of all tokens, and the `[1, H]` whose product weighs it, if one does.
    pub(crate) shared: Option<(Dense, Option<Tensor>)>,
    /// Those that keep the experts equally busy, if there are some.
    pub(crate) biases: Option<Biases>,
    /// For metrics.
    pub(crate) loads: LayerLoads,
}

/// Rows of several matrices that read the same input, and their biases.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) weights: Factor,
    pub(crate) biases: Vec<Tensor>,
}

/// The weights of one slice of a layer's attention.
#[derive(Debug)]
pub(crate) struct AttentionSlice {
    /// Rows of `q_proj`, `k_proj` and `v_proj`.
    pub(crate) query_key_value: Rows,
    /// Columns of `o_proj`.
    pub(crate) attention_output: Factor,
}

/// The weights of one slice of a feed-forward block, or of an expert.
#[derive(Debug)]
pub(crate) struct DenseSlice {
    /// Rows of `gate_proj`, unless the block is ungated, and of `up_proj`.
    pub(crate) gate_up: Rows,
    /// Columns of `down_proj`.
    pub(crate) down: Factor,
}

/// One slice of a mixture.
#[derive(Debug)]
pub(crate) struct ExpertsSlice {
    pub(crate) experts: Vec<DenseSlice>,
    pub(crate) shared: Option<DenseSlice>,
}

/// A mixture of experts, as far as this device computes with it.
#[derive(Debug)]
pub(crate) struct SlicedExperts {
    /// The elements of `[experts, H]` for each group of tokens that the device has.
    pub(crate) router: Vec<Tensor>,
    /// Likewise of `[1, H]`; none without a shared expert that is weighed.
    pub(crate) shared_gate: Vec<Tensor>,
    /// In the order of their numbers.
    pub(crate) slices: Vec<ExpertsSlice>,
    /// Those that keep the experts equally busy, if there are some.
    pub(crate) biases: Option<Biases>,
    /// For metrics.
    pub(crate) loads: LayerLoads,
}

/// The feed-forward block of a layer in slices, in the order of their numbers.
#[derive(Debug)]
pub(crate) enum SlicedFeedForward {
    Dense(Vec<DenseSlice>),
    Experts(SlicedExperts),
}

/// The adapters of a layer in slices; none of a matrix without.
#[derive(Debug)]
pub(crate) struct SlicedAdapters {
    pub(crate) query_key_value: Option<AdapterSlices>,
    pub(crate) attention_output: Option<AdapterSlices>,
    pub(crate) gate_up: Option<AdapterSlices>,
    pub(crate) down: Option<AdapterSlices>,
}

/// The matrices of a layer, as far as this device computes with them.
#[derive(Debug)]
pub(crate) struct Sliced {
    pub(crate) own: OwnSlices,
    /// In the order of their numbers.
    pub(crate) attention: Vec<AttentionSlice>,
    pub(crate) feed_forward: SlicedFeedForward,
    pub(crate) adapters: SlicedAdapters,
    /// For each group of tokens that the device has; none of a product without.
    pub(crate) attention_output_bias: Vec<Tensor>,
    pub(crate) down_bias: Vec<Tensor>,
}

/// For each rotary embedding, the length that decides the wavelengths of texts of `length` tokens.
fn deciding_lengths(rotaries: &[Rotary], length: u32) -> Vec<u32> {
    rotaries.iter().map(|rotary| rotary.scaling.deciding_length(length)).collect()
}

/// Constants shared by all layers.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) heads: i64,
    pub(crate) key_value_heads: i64,
    pub(crate) head_size: i64,
    /// Added to the mean square before its root, in every norm.
    pub(crate) epsilon: f64,
    pub(crate) norm: Norm,
    pub(crate) placement: Placement,
    pub(crate) activation: Activation,
    pub(crate) ungated: bool,
    pub(crate) sinks: bool,
    pub(crate) latent: Option<LatentAttention>,
    experts: Option<ExpertsShape>,
    pub(crate) attention_scale: Option<f64>,
    pub(crate) embedding_scale: Option<f64>,
    rotaries: Vec<Angles>,
    /// The lengths of texts that decided the wavelengths of each.
    deciding_lengths: Vec<u32>,
    /// For layers that rotate nothing.
    no_rotary: Angles,
    /// The constants of one slice, if there are several.
    slice: Option<Box<Shape>>,
}

impl Shape {
    /// For samples of `model.context` tokens.
    pub(crate) fn new(model: &Model, device: Device) -> Result<Self> {
        let block = &model.block;
        let rotaries = model.rotaries();
        Ok(Self {
            heads: i64::from(model.heads),
            key_value_heads: i64::from(model.key_value_heads),
            head_size: i64::from(model.head_size()),
            epsilon: model.norm_epsilon,
            norm: block.norm,
            placement: block.placement,
            activation: block.activation,
            ungated: block.ungated,
            sinks: block.sinks,
            latent: block.latent,
            experts: ExpertsShape::of(model),
            attention_scale: block.attention_scale,
            embedding_scale: block.embedding_scale,
            rotaries: rotaries
                .iter()
                .map(|rotary| Angles::new(rotary, model, model.context, device))
                .collect::<Result<_>>()?,
            deciding_lengths: deciding_lengths(&rotaries, model.context),
            no_rotary: Angles::none(model, device)?,
            slice: match model.slices {
                1 => None,
                _ => Some(Box::new(Self::new(&model.slice(), device)?)),
            },
        })
    }

    /// Takes the wavelengths of texts of `length` tokens, at most `model.context`. Whether they are others than before, so
    /// that keys which were rotated earlier are of no use.
    pub(crate) fn fit_length(&mut self, model: &Model, length: u32) -> Result<bool> {
        let rotaries = model.rotaries();
        let lengths = deciding_lengths(&rotaries, length);
        let changes = lengths != self.deciding_lengths;
        for (index, rotary) in rotaries.iter().enumerate() {
            if lengths[index] != self.deciding_lengths[index] {
                let device = self.rotaries[index].cosine.device();
                self.rotaries[index] = Angles::new(rotary, model, length, device)?;
            }
        }
        self.deciding_lengths = lengths;
        Ok(changes)
    }

    /// Number that is added to the weights of root mean square norms.
    pub(crate) fn norm_offset(&self) -> f64 {
        if self.norm == Norm::RmsPlusOne { 1.0 } else { 0.0 }
    }

    /// The constants of the experts.
    ///
    /// # Panics
    /// If the model has none.
    pub(crate) fn experts(&self) -> &ExpertsShape {
        self.experts.as_ref().expect("a layer with experts is of a model with experts")
    }

    /// The constants of one slice.
    pub(crate) fn slice(&self) -> &Self {
        self.slice.as_deref().unwrap_or(self)
    }

    pub(crate) fn angles(&self, layer: LayerAttention) -> &Angles {
        layer.rotary.map_or(&self.no_rotary, |index| &self.rotaries[usize::from(index)])
    }
}
