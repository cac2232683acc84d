//! The tokens and labels of a microbatch, decoded from what travels.

use shoal_protocol::label::Label;
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

use crate::documents::Documents;
use crate::error::{EngineError, Result};
use crate::loss::IGNORED;
use crate::tensor::upload;

/// The decoded labels of a microbatch.
#[derive(Debug)]
pub(crate) struct Labels {
    /// Ids, or [`IGNORED`]: i64 `[B · T]`.
    pub(crate) targets: Tensor,
    /// Number of those that are not ignored.
    pub(crate) counted: u64,
    /// Number of tokens that are followed by padding.
    pub(crate) padded: u64,
    /// `None` if each sample is one document.
    pub(crate) documents: Option<Documents>,
    /// The token ids, `B · T`, if they travel beside activations.
    pub(crate) tokens: Option<Vec<i64>>,
}

/// The number of labels that count towards the loss.
pub(crate) fn count_targets(manifest: &Manifest, bytes: &[u8]) -> Result<u64> {
    let words = words(manifest, bytes, "labels")?;
    Ok(words.filter(|word| Label::from_word(*word).target.is_some()).count() as u64)
}

impl Labels {
    /// Labels from their words (`shoal_protocol::label`) and, where ids follow them, the ids: little-endian.
    pub(crate) fn decode(manifest: &Manifest, bytes: &[u8], device: tch::Device) -> Result<Self> {
        let (labels, ids) = match manifest.model.subspace() {
            Some(_) => bytes.split_at(bytes.len() / 8 * 4),
            None => (bytes, &[][..]),
        };
        let mut targets = Vec::new();
        let (mut lengths, mut padded) = (Vec::new(), 0);
        let context = manifest.model.context as usize;
        for (place, word) in words(manifest, labels, "labels")?.enumerate() {
            let label = Label::from_word(word);
            padded += u64::from(label.padding);
            targets.push(label.target.map_or(Ok(IGNORED), |target| known(manifest, target))?);
            match lengths.last_mut() {
                Some(length) if place % context > 0 && !label.starts_document => *length += 1,
                _ => lengths.push(1),
            }
        }
        let counted = targets.iter().filter(|target| **target != IGNORED).count() as u64;
        let are_several = lengths.len() > manifest.training.microbatch_size as usize;
        let documents = || Documents::new(lengths, context as i64, device);
        Ok(Self {
            counted,
            padded,
            targets: per_token(manifest, &targets, device)?.f_flatten(0, -1)?,
            documents: are_several.then(documents).transpose()?,
            tokens: (!ids.is_empty()).then(|| token_ids(manifest, ids)).transpose()?,
        })
    }
}

/// Token ids, `B · T`, from u32, little-endian.
pub(crate) fn token_ids(manifest: &Manifest, bytes: &[u8]) -> Result<Vec<i64>> {
    words(manifest, bytes, "tokens")?.map(|token| known(manifest, token)).collect()
}

/// A tensor `[B, T]` on the device.
pub(crate) fn per_token(
    manifest: &Manifest,
    values: &[i64],
    device: tch::Device,
) -> Result<Tensor> {
    let shape = [manifest.training.microbatch_size, manifest.model.context];
    let tensor = Tensor::f_from_slice(values)?.f_view(shape.map(i64::from))?;
    upload(&tensor, device)
}

/// One word per token from little-endian bytes.
fn words<'a>(
    manifest: &Manifest,
    bytes: &'a [u8],
    what: &'static str,
) -> Result<impl Iterator<Item = u32> + use<'a>> {
    let expected = 4 * manifest.tokens_per_microbatch() as usize;
    if bytes.len() != expected {
        return Err(EngineError::WrongLength { what, expected, found: bytes.len() });
    }
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)))
}

fn known(manifest: &Manifest, token: u32) -> Result<i64> {
    let vocabulary = manifest.model.vocabulary;
    match token < vocabulary {
        true => Ok(i64::from(token)),
        false => Err(EngineError::UnknownToken { token, vocabulary }),
    }
}
