//! Compresses tensors for links, where that makes them arrive sooner.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context;
use clap::ValueEnum;
use shoal_metrics::{LinkPacking, Metrics};
use shoal_protocol::codec::PackingChoice;
use shoal_protocol::codec::packing::{Packing, pack};
use shoal_protocol::frame::Frame;
use shoal_protocol::message::{Recalled, TensorTag};

use super::payload::{Tensor, Tensors};

/// The lossless compression of tensors for links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PackingMode {
    /// The one that is measured to arrive soonest.
    Auto,
    /// None.
    None,
    /// Zstd over byte planes, wherever that makes tensors smaller.
    Zstd,
}

/// A kind of message whose tensors compress alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Activation,
    ActivationGradient,
    RoundPart,
    RoundResult,
}

impl From<&TensorTag> for Kind {
    fn from(tag: &TensorTag) -> Self {
        match tag {
            TensorTag::Activation { .. }
            | TensorTag::Recalled { input: Recalled::Activation, .. } => Self::Activation,
            TensorTag::ActivationGradient { .. }
            | TensorTag::Recalled { input: Recalled::Gradient, .. } => Self::ActivationGradient,
            TensorTag::RoundPart { .. } => Self::RoundPart,
            TensorTag::RoundResult { .. } => Self::RoundResult,
        }
    }
}

/// Packs every tensor that this peer sends.
#[derive(Debug)]
pub(crate) struct Packer {
    mode: PackingMode,
    /// The choice for each kind of message and each tensor in it.
    choices: Mutex<BTreeMap<(Kind, usize), PackingChoice>>,
    metrics: Metrics,
}

impl Packer {
    pub(crate) fn new(mode: PackingMode, metrics: Metrics) -> Self {
        Self { mode, choices: Mutex::default(), metrics }
    }

    fn choices(&self) -> MutexGuard<'_, BTreeMap<(Kind, usize), PackingChoice>> {
        // A holder of the lock only computes, so a panic leaves the map whole.
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Packs the tensors of a message for a link with this rate, in bytes per second.
    ///
    /// # Errors
    /// When packing panicked, or a tensor is larger than a frame may be.
    pub(crate) async fn frames(
        &self,
        tag: &TensorTag,
        tensors: &Tensors,
        rate: Option<f64>,
    ) -> anyhow::Result<Vec<Frame>> {
        let mut frames = Vec::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            frames.push(self.frame((tag.into(), index), tensor, rate).await?);
        }
        Ok(frames)
    }

    async fn frame(
        &self,
        kind: (Kind, usize),
        tensor: &Tensor,
        rate: Option<f64>,
    ) -> anyhow::Result<Frame> {
        let raw = tensor.bytes.len();
        let has_values = self.mode != PackingMode::Auto || !is_zero(&tensor.bytes);
        let packing = match self.mode {
            // Experts without tokens have sums and results of zero.
            PackingMode::Auto if !has_values => PackingChoice::of_zeros(tensor.element),
            PackingMode::Auto => {
                let mut choices = self.choices();
                let new = || PackingChoice::of(tensor.element);
                choices.entry(kind).or_insert_with(new).choose(raw, rate)
            }
            PackingMode::None => Packing::Raw,
            PackingMode::Zstd => Packing::Zstd,
        };
        let frame = match packing {
            Packing::Raw => tensor.to_frame((Packing::Raw, tensor.bytes.clone()))?,
            Packing::Zstd | Packing::Integers | Packing::Bits => {
                // Packing takes long: it runs on a thread that may block.
                let tensor = tensor.clone();
                let work = move || {
                    let start = Instant::now();
                    let packed = pack(packing, tensor.element.width(), tensor.bytes.clone());
                    (start.elapsed(), tensor.to_frame(packed))
                };
                let packed = tokio::task::spawn_blocking(work).await;
                let (took, frame) = packed.context("packing panicked")?;
                let frame = frame?;
                // How zeros pack says nothing of other tensors.
                if has_values && let Some(choice) = self.choices().get_mut(&kind) {
                    choice.learn(packing, raw, frame.body().len(), took);
                }
                frame
            }
        };
        let label = match frame.header().packing() {
            Packing::Raw => LinkPacking::None,
            Packing::Zstd => LinkPacking::Zstd,
            Packing::Integers | Packing::Bits => LinkPacking::Integers,
        };
        let links = &self.metrics.links;
        links.tensors.of(label).inc();
        links.unpacked_bytes.of(label).inc_by(raw as u64);
        links.packed_bytes.of(label).inc_by(frame.body().len() as u64);
        Ok(frame)
    }
}

/// Whether all bytes are zero; the first that is not ends the search.
fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    let is_zero = |word: &[u8; 64]| word.iter().fold(0, |all, byte| all | byte) == 0;
    words.iter().all(is_zero) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use shoal_protocol::codec::Codec;
    use shoal_protocol::frame::Element;
    use shoal_protocol::ids::{ClaimKey, Exchange, Microbatch, Stage, Step};

    use super::*;

    fn tag() -> TensorTag {
        let key = ClaimKey { step: Step(0), stage: Stage(1), microbatch: Microbatch(0) };
        TensorTag::Activation { key, exchange: Exchange(0) }
    }

    async fn packed(mode: PackingMode, rate: Option<f64>) -> (Vec<Packing>, Metrics) {
        let metrics = Metrics::new().expect("metrics");
        let packer = Packer::new(mode, metrics.clone());
        let ones = Tensor::flat(Element::F32, 1 << 18, Bytes::from(vec![1; 1 << 20]));
        let frames = packer.frames(&tag(), &[ones].into(), rate).await.expect("packed");
        assert!(frames.iter().all(|frame| frame.unpack().is_ok_and(|raw| raw.len() == 1 << 20)));
        (frames.iter().map(|frame| frame.header().packing()).collect(), metrics)
    }

    #[tokio::test]
    async fn tensors_for_a_slow_link_are_packed_and_counted() {
        for (mode, rate, packing) in [
            (PackingMode::Auto, Some(1e6), Packing::Zstd),
            (PackingMode::Auto, Some(5e9), Packing::Raw),
            (PackingMode::Auto, None, Packing::Raw),
            (PackingMode::None, Some(1e6), Packing::Raw),
            (PackingMode::Zstd, None, Packing::Zstd),
        ] {
            let (packings, metrics) = packed(mode, rate).await;
            assert_eq!(packings, [packing], "{mode:?} {rate:?}");
            let label = if packing == Packing::Raw { LinkPacking::None } else { LinkPacking::Zstd };
            assert_eq!(metrics.links.tensors.of(label).get(), 1);
            assert_eq!(metrics.links.unpacked_bytes.of(label).get(), 1 << 20);
        }
    }

    #[tokio::test]
    async fn zeros_cost_next_to_nothing_on_every_link() {
        let packer = Packer::new(PackingMode::Auto, Metrics::new().expect("metrics"));
        let zeros = |element, count| {
            Tensor::flat(element, count, Bytes::from(vec![0; count * element.width()]))
        };
        for element in [Element::F32, Element::Number(Codec::Bf16), Element::I64, Element::U8] {
            for rate in [None, Some(1e6), Some(5e9)] {
                let tensor = zeros(element, 1 << 16);
                let raw = tensor.bytes.clone();
                let frames = packer.frames(&tag(), &[tensor].into(), rate).await.expect("packed");
                assert!(frames[0].body().len() * 500 < raw.len(), "{element:?}");
                assert_eq!(frames[0].unpack().expect("whole"), raw);
            }
        }
        assert!(packer.choices().is_empty(), "nothing was learned");
        let mut bytes = vec![0; 1 << 10];
        assert!(is_zero(&bytes) && is_zero(&bytes[..70]) && is_zero(&[]));
        for place in [0, 63, 64, 1023] {
            bytes[place] = 1;
            assert!(!is_zero(&bytes) && (place > 69 || !is_zero(&bytes[..70])), "{place}");
            bytes[place] = 0;
        }
    }
}
