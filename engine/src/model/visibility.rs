//! The tokens that each token of a pass may read, and the angles of its position.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use shoal_protocol::manifest::LayerAttention;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::model::documents::{Documents, starts};
use crate::model::layer::Shape;
use crate::model::rotary::Angles;

/// Which keys the queries of a layer read.
#[derive(Debug)]
pub(crate) enum Keys {
    /// All that attention gets, up to the query's own.
    Earlier,
    /// Those that a mask allows, where some are in a cache: bool, `[1, 1, T, past + T]`.
    Masked(Tensor),
    /// Those of the query's document up to its own, and within the layer's window.
    OfDocument,
}

/// Documents in a form that attention without a mask reads.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Tokens of each document, through all samples.
    pub(crate) lengths: Vec<i64>,
    /// Their first tokens and the sum, i32, where flash attention reads them.
    pub(crate) starts: Option<Tensor>,
}

/// The tokens that each token of a microbatch may read, for every window that layers have.
#[derive(Debug)]
pub(crate) struct Visibility {
    by_window: BTreeMap<Option<u32>, Keys>,
    ranges: Ranges,
    /// The angles of each token's place in its document, by the number of the rotary embedding; empty where each sample
    /// is one document.
    angles: BTreeMap<Option<u8>, Angles>,
    /// Tokens before these whose keys are in a cache.
    pub(crate) past: i64,
    /// The share of the pass's terms that count towards the loss.
    pub(crate) counted: f64,
}

/// The tokens of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extents {
    pub(crate) samples: i64,
    /// Tokens of a sample.
    pub(crate) tokens: i64,
    /// Tokens before these whose keys are in a cache.
    pub(crate) past: i64,
    /// The share of the terms that count towards the loss.
    pub(crate) counted: f64,
}

impl Visibility {
    /// For these layers, whose heads are of `shape` and compute in `kind`. Without documents each sample is one.
    pub(crate) fn new(
        layers: impl Iterator<Item = LayerAttention>,
        documents: Option<&Documents>,
        extents: Extents,
        (shape, kind, device): (&Shape, Kind, Device),
    ) -> Result<Self> {
        let Extents { samples, tokens, past, counted } = extents;
        let (mut by_window, mut angles) = (BTreeMap::new(), BTreeMap::new());
        // No kernel for all samples at once has sinks.
        let by_document = documents.is_some() || shape.sinks && past == 0;
        for layer in layers {
            if let Entry::Vacant(place) = by_window.entry(layer.window) {
                place.insert(keys(layer.window, by_document, [past, tokens], device)?);
            }
            if let (Some(documents), Entry::Vacant(place)) = (documents, angles.entry(layer.rotary))
            {
                place.insert(shape.angles(layer).of(&documents.places)?);
            }
        }
        let lengths =
            documents.map_or_else(|| vec![tokens; samples as usize], |all| all.lengths.clone());
        let are_read = by_window.values().any(|keys| matches!(keys, Keys::OfDocument));
        let reads = are_read && device != Device::Cpu && has_flash(shape, kind, device)?;
        let starts = reads.then(|| starts(&lengths, device)).transpose()?;
        Ok(Self { by_window, ranges: Ranges { lengths, starts }, angles, past, counted })
    }

    /// The keys that a layer's queries read.
    pub(crate) fn keys(&self, layer: LayerAttention) -> &Keys {
        self.by_window.get(&layer.window).unwrap_or(&Keys::Earlier)
    }

    pub(crate) fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// The angles of each token, if documents decide them.
    pub(crate) fn angles(&self, layer: LayerAttention) -> Option<&Angles> {
        self.angles.get(&layer.rotary)
    }
}

fn keys(
    window: Option<u32>,
    by_document: bool,
    [past, tokens]: [i64; 2],
    device: Device,
) -> Result<Keys> {
    let all = past + tokens;
    let window = window.filter(|window| i64::from(*window) < all);
    // A single token reads all keys that the cache gives it.
    let reads_all = tokens == 1 || past == 0 && window.is_none();
    if reads_all && !by_document {
        return Ok(Keys::Earlier);
    }
    if past == 0 {
        return Ok(Keys::OfDocument);
    }
    let places = Tensor::f_arange(all, (Kind::Int64, device))?;
    let distance = places.f_narrow(0, past, tokens)?.f_unsqueeze(1)?.f_sub(&places)?;
    let mut allowed = distance.f_ge(0)?;
    if let Some(window) = window {
        allowed = allowed.f_logical_and(&distance.f_lt(i64::from(window))?)?;
    }
    Ok(Keys::Masked(allowed.f_view([1, 1, tokens, all])?))
}

/// Whether a GPU has flash attention for documents of such heads: libtorch has it for some cards, head sizes and numbers.
fn has_flash(shape: &Shape, kind: Kind, device: Device) -> Result<bool> {
    /// libtorch's number of flash attention (`SDPBackend`).
    const FLASH: i64 = 1;
    if kind == Kind::Float || shape.head_size % 8 != 0 {
        return Ok(false);
    }
    let like = |heads| -> Result<Tensor> {
        let empty = Tensor::f_empty([1, heads, 8, shape.head_size], (kind, device))?;
        Ok(empty.set_requires_grad(true))
    };
    let (queries, keys) = (like(shape.heads)?, like(shape.key_value_heads)?);
    let groups = shape.heads != shape.key_value_heads;
    let none = None::<&Tensor>;
    let choice =
        Tensor::f_internal_fused_sdp_choice(&queries, &keys, &keys, none, 0.0, true, None, groups)?;
    Ok(choice == FLASH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tensor::elements;
    use crate::testing::manifest;

    #[test]
    fn a_sample_without_documents_and_windows_reads_all_that_is_earlier() {
        let of = |window, has_documents, extents| {
            keys(window, has_documents, extents, Device::Cpu).expect("small")
        };
        for window in [None, Some(4), Some(9)] {
            assert!(matches!(of(window, false, [0, 4]), Keys::Earlier));
            assert!(matches!(of(window, true, [0, 4]), Keys::OfDocument));
        }
        assert!(matches!(of(Some(3), false, [0, 4]), Keys::OfDocument));
        assert!(matches!(of(Some(3), false, [5, 1]), Keys::Earlier));
        let Keys::Masked(mask) = of(Some(2), false, [1, 2]) else { panic!("a mask") };
        assert_eq!(mask.size(), [1, 1, 2, 3]);
        assert_eq!(elements::<u8>(&mask), [1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn positions_begin_anew_in_each_document() {
        let shape = Shape::new(&manifest().model, Device::Cpu).expect("small");
        let layer = manifest().model.layer_attention(0);
        let documents = Documents::new(vec![3, 1, 4], 4, Device::Cpu).expect("small");
        let extents = Extents { samples: 2, tokens: 4, past: 0, counted: 1.0 };
        let of = |documents| {
            let place = (&shape, Kind::Float, Device::Cpu);
            Visibility::new([layer].into_iter(), documents, extents, place).expect("small")
        };
        assert!(of(None).angles(layer).is_none());
        let visibility = of(Some(&documents));
        let found = &visibility.angles(layer).expect("of documents").cosine;
        let all = &shape.angles(layer).cosine;
        for (token, place) in [0, 1, 2, 0, 0, 1, 2, 3].into_iter().enumerate() {
            assert_eq!(found.get(token as i64), all.get(place), "token {token}");
        }
    }
}
