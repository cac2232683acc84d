//! The tokens and labels of a microbatch, decoded from what travels.

use shoal_protocol::label::{self, Label};
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

use crate::device::tensor::upload;
use crate::error::{EngineError, Result};
use crate::model::documents::Documents;
use crate::model::loss::{IGNORED, Objective};
use crate::model::preference::{Completion, Pair};

/// The decoded labels of a microbatch.
#[derive(Debug)]
pub(crate) struct Labels {
    /// Ids, or [`IGNORED`]: i64 `[B · T]`.
    pub(crate) targets: Tensor,
    /// Number of those that are not ignored.
    counted: u64,
    /// The pairs that the samples are, in a run on pairs.
    pairs: Vec<Pair>,
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
    /// What the loss of the rows is.
    pub(crate) fn objective<'a>(&'a self, manifest: &'a Manifest) -> Objective<'a> {
        match manifest.training.loss.preference() {
            Some(preference) => Objective::Pairs(preference, &self.pairs),
            None => Objective::CrossEntropy,
        }
    }

    /// The number of tokens or pairs that count towards the loss.
    pub(crate) fn terms(&self, objective: Objective<'_>) -> u64 {
        match objective {
            Objective::CrossEntropy => self.counted,
            Objective::Pairs(_, pairs) => pairs.len() as u64,
        }
    }

    /// Labels from their words (`shoal_protocol::label`) and, where ids follow them, the ids: little-endian.
    pub(crate) fn decode(manifest: &Manifest, bytes: &[u8], device: tch::Device) -> Result<Self> {
        let (labels, ids) = match manifest.model.subspace() {
            Some(_) => bytes.split_at(bytes.len() / 8 * 4),
            None => (bytes, &[][..]),
        };
        let mut targets = Vec::new();
        let (mut lengths, mut padded) = (Vec::new(), 0);
        let context = manifest.model.context as usize;
        let (labels, pairs) = labels_and_pairs(manifest, labels)?;
        for (place, label) in labels.into_iter().enumerate() {
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
            pairs,
            padded,
            targets: per_token(manifest, &targets, device)?.f_flatten(0, -1)?,
            documents: are_several.then(documents).transpose()?,
            tokens: (!ids.is_empty()).then(|| token_ids(manifest, ids)).transpose()?,
        })
    }
}

/// The labels of all samples, and the pairs that these are in a run on pairs.
fn labels_and_pairs(manifest: &Manifest, bytes: &[u8]) -> Result<(Vec<Label>, Vec<Pair>)> {
    let (context, row_words) = (manifest.model.context as usize, manifest.words_of_row() as usize);
    let expected = 4 * row_words * manifest.training.microbatch_size as usize;
    if bytes.len() != expected {
        let what = "labels";
        return Err(EngineError::WrongLength { what, expected, found: bytes.len() });
    }
    let is_of_pairs = manifest.training.loss.preference().is_some();
    let (mut labels, mut pairs) = (Vec::new(), Vec::new());
    for (sample, row) in bytes.as_chunks::<4>().0.chunks(row_words).enumerate() {
        let words = row.iter().map(|word| u32::from_le_bytes(*word));
        let first = labels.len();
        labels.extend(words.clone().take(context).map(Label::from_word));
        if is_of_pairs {
            let behind: Vec<u32> = words.skip(context).collect();
            let pair = pair_of(&labels[first..], &behind).map(|pair| pair.behind(first));
            pairs.push(pair.ok_or(EngineError::NotAPair { sample })?);
        }
    }
    Ok((labels, pairs))
}

/// The pair that the labels of a sample are, with what is behind them.
fn pair_of(labels: &[Label], behind: &[u32]) -> Option<Pair> {
    let both = label::pair_of(labels)?;
    let references = match *behind {
        [] => [0.0; 2],
        [chosen, rejected] => label::reference_of([chosen, rejected])?,
        _ => return None,
    };
    let [chosen, rejected] = [0, 1].map(|which: usize| {
        let rows = both[which].clone();
        let counts = |label: &&Label| label.target.is_some();
        let targets = labels[rows.clone()].iter().filter(counts).count() as u64;
        Completion { rows, targets, reference: references[which] }
    });
    Some(Pair { chosen, rejected })
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
