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
        let packing = match self.mode {
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
                if let Some(choice) = self.choices().get_mut(&kind) {
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use shoal_protocol::frame::Element;
    use shoal_protocol::ids::{ClaimKey, Exchange, Microbatch, Stage, Step};

    use super::*;

    async fn packed(mode: PackingMode, rate: Option<f64>) -> (Vec<Packing>, Metrics) {
        let metrics = Metrics::new().expect("metrics");
        let packer = Packer::new(mode, metrics.clone());
        let zeros = Tensor::flat(Element::F32, 1 << 18, Bytes::from(vec![0; 1 << 20]));
        let key = ClaimKey { step: Step(0), stage: Stage(1), microbatch: Microbatch(0) };
        let frames = packer
            .frames(&TensorTag::Activation { key, exchange: Exchange(0) }, &[zeros].into(), rate)
            .await;
        let frames = frames.expect("packed");
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
}
