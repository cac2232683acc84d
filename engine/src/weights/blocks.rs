//! A stage's weights as views for passes.

use std::ops::Range;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Manifest, Model};
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::boundary::{self, Compress};
use crate::model::cache::LayerCache;
use crate::model::decoder;
use crate::model::documents::Documents;
use crate::model::expert_loads::LayerLoads;
use crate::model::layer::{Layer, NormWeights, Shape};
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{EMBEDDING, HEAD, LAST_NORM, POSITIONS, WeightPart};
use crate::model::token_groups::TokenGroups;
use crate::model::visibility::{Extents, Visibility};
use crate::weights::cutter::{Cutter, Source};
use crate::weights::leaves::{Leaf, Leaves};

/// The embedding: rows by token id.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// `[V, H]`, or the rows of this device's slices; f32 also in runs in bf16 if it is trained, so that its gradient
    /// is summed in f32. It gets no gradient as a whole: the rows that a pass reads do.
    pub(crate) matrix: Tensor,
    /// Index of its first element in the flat vector.
    pub(crate) offset: usize,
    /// The tokens whose rows it has.
    pub(crate) tokens: Range<i64>,
    /// In a run with slices, those of this device.
    own: Option<OwnSlices>,
    /// Whether rows get a gradient.
    pub(crate) is_trained: bool,
    pub(crate) positions: Option<Tensor>,
}

impl Embedding {
    /// Cuts it from the trained weights, or from the frozen ones if there are some.
    fn cut(
        cutter: &mut Cutter<'_>,
        model: &Model,
        (trained, frozen): (Source<'_>, Option<Source<'_>>),
        own: &OwnSlices,
    ) -> Result<Self> {
        let hidden = i64::from(model.hidden);
        let is_sliced = own.are_several();
        let tokens = match is_sliced {
            true => own.rows(model.vocabulary as usize),
            false => 0..model.vocabulary as usize,
        };
        let offset = cutter.offset(EMBEDDING) + tokens.start * hidden as usize;
        let extents = [tokens.len() as i64, hidden];
        let source = frozen.unwrap_or(trained);
        let matrix = match source.embedding {
            Some(embedding) => embedding.f_view(extents)?,
            None => source.wide(offset, &extents)?,
        };
        let positions = match model.block.learned_positions {
            Some(count) => Some(cutter.leaf(POSITIONS, &[i64::from(count), hidden])?),
            None => None,
        };
        Ok(Self {
            matrix,
            offset,
            tokens: tokens.start as i64..tokens.end as i64,
            own: is_sliced.then(|| own.clone()),
            is_trained: frozen.is_none(),
            positions,
        })
    }

    /// The rows `[B, T, H]` of tokens `[B, T]`, f32.
    pub(crate) fn rows(&self, tokens: &Tensor) -> Result<Tensor> {
        let Some(own) = &self.own else {
            let rows = Tensor::f_embedding(&self.matrix, tokens, -1, false, false)?;
            return Ok(rows.f_to_kind(Kind::Float)?);
        };
        let Range { start, end } = self.tokens;
        let absent = tokens.f_lt(start)?.f_logical_or(&tokens.f_ge(end)?)?;
        let tokens = tokens.f_sub_scalar(start)?.f_clamp(0, end - start - 1)?;
        let rows = Tensor::f_embedding(&self.matrix, &tokens, -1, false, false)?;
        let rows = rows.f_to_kind(Kind::Float)?.f_masked_fill(&absent.f_unsqueeze(-1)?, 0.0)?;
        // Also on one device a zero is added, which turns -0 to 0 as the sum over several does.
        Ok(own.sum_of_devices(&rows)?.f_add_scalar(0.0)?)
    }

    /// The residual stream's first value; see [`model::embed`]. `places` are the places of the tokens in their
    /// documents, i64 `[B, T]`; without them each sample is one document, of which `past` tokens are in a cache.
    pub(crate) fn embed(
        &self,
        rows: &Tensor,
        (past, places): (i64, Option<&Tensor>),
        shape: &Shape,
        dtype: Dtype,
    ) -> Result<Tensor> {
        let positions = match (&self.positions, places) {
            (None, _) => None,
            (Some(table), None) => Some(table.f_narrow(0, past, rows.size3()?.1)?),
            // The gradient of a position is a sum over documents, in f32.
            (Some(table), Some(places)) => {
                let table = table.f_to_kind(Kind::Float)?;
                Some(Tensor::f_embedding(&table, places, -1, false, false)?)
            }
        };
        decoder::embed(rows, positions.as_ref(), shape, dtype)
    }
}

/// The last norm, and the matrix of the logits.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) norm: NormWeights,
    /// `[V, H]`, or its slices that this device has, `[rows, H]`; views of the embedding if they are tied in one stage.
    pub(crate) matrices: Vec<Leaf>,
}

impl Head {
    fn cut(cutter: &mut Cutter<'_>, model: &Model, own: &OwnSlices) -> Result<Self> {
        let norm = cutter.norm(LAST_NORM, model, None)?;
        let name = if cutter.has(HEAD) { HEAD } else { EMBEDDING };
        let matrix = [i64::from(model.vocabulary), i64::from(model.hidden)];
        let matrices = match own.are_several() {
            false => vec![cutter.view(cutter.offset(name), &matrix, WeightPart::Whole)?],
            true => cutter.head_slices(name, matrix, own)?,
        };
        Ok(Self { norm, matrices })
    }
}

/// The weights as views into the flat vector, for the layers.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) shape: Shape,
    pub(crate) embedding: Option<Embedding>,
    /// The matrix that expands a compressed activation at the beginning of the stage.
    expand: Option<Tensor>,
    layers: Vec<Layer>,
    compress: Option<Compress>,
    pub(crate) head: Option<Head>,
    pub(crate) leaves: Leaves,
    pub(crate) own: OwnSlices,
}

impl Blocks {
    /// Cuts the flat vectors of trained weights, and of frozen ones.
    pub(crate) fn new(
        manifest: &Manifest,
        stage: Stage,
        trained: Source<'_>,
        frozen: Option<Source<'_>>,
        own: &OwnSlices,
    ) -> Result<Self> {
        let model = &manifest.model;
        let mut cutter = Cutter::new(manifest, stage, trained, frozen);
        let hidden = i64::from(model.hidden);
        let embedding = match stage {
            Stage(0) => Some(Embedding::cut(&mut cutter, model, (trained, frozen), own)?),
            _ => None,
        };
        let expand = match boundary::before(manifest, stage) {
            Some(boundary) => {
                let name = boundary::weight_name(Stage(stage.0 - 1), "expand");
                Some(cutter.leaf(&name, &[hidden, i64::from(boundary.width)])?)
            }
            None => None,
        };
        let mut layers = Vec::new();
        for layer in manifest.layers_of(stage) {
            layers.push(cutter.layer(model, layer, own)?);
        }
        let compress = match boundary::after(manifest, stage) {
            Some(boundary) => Some(Compress::cut(boundary, hidden, |part, shape| {
                cutter.leaf(&boundary::weight_name(stage, part), shape)
            })?),
            None => None,
        };
        let head = match stage == manifest.last_stage() {
            true => Some(Head::cut(&mut cutter, model, own)?),
            false => None,
        };
        let shape = Shape::new(model, trained.values.device())?;
        let (leaves, own) = (cutter.leaves, own.clone());
        Ok(Self { shape, embedding, expand, layers, compress, head, leaves, own })
    }

    /// How busy the experts of each layer that has some were, with the layer's place.
    pub(crate) fn expert_loads(&self) -> impl Iterator<Item = (usize, &LayerLoads)> {
        let layers = self.layers.iter().enumerate();
        layers.filter_map(|(place, layer)| Some((place, layer.expert_loads()?)))
    }

    /// Runs the layers: from the embedding or the previous stage's activation to the input of the
    /// head or the next stage's activation. Without documents each sample is one. `cache` has an
    /// element for each layer; the tokens follow those in it. `counted` is the share of the terms that count towards the loss.
    pub(crate) fn through(
        &self,
        input: Tensor,
        (documents, counted): (Option<&Documents>, f64),
        cache: Option<&mut [LayerCache]>,
    ) -> Result<Tensor> {
        let mut x = match &self.expand {
            Some(matrix) => boundary::expand(&input, matrix)?,
            None => input,
        };
        let kinds = self.layers.iter().map(|layer| layer.attention);
        let mut caches = cache.unwrap_or_default().iter_mut();
        let past = caches.as_slice().first().map_or(0, LayerCache::length);
        let (samples, tokens, _) = x.size3()?;
        let place = (&self.shape, x.kind(), x.device());
        let extents = Extents { samples, tokens, past, counted };
        let visibility = Visibility::new(kinds, documents, extents, place)?;
        let groups = TokenGroups::new(&self.own, [samples, tokens]);
        x = groups.take(&x)?;
        for layer in &self.layers {
            x = decoder::decoder_layer(
                &x,
                layer,
                &self.shape,
                &groups,
                &visibility,
                caches.next(),
            )?;
        }
        x = groups.all(&x)?;
        match &self.compress {
            Some(weights) => boundary::compress(&x, weights, &self.shape),
            None => Ok(x),
        }
    }
}
