//! Models whose matrices bitsandbytes has quantised: the bytes of a packed matrix ([`crate::numeric::nf4`]) are in several tensors.
//!
//! ```text
//! W                                     numbers of the levels of weights
//! W.absmax                              numbers of the levels of scales
//! W.nested_absmax                       magnitudes of scales
//! W.quant_map, W.nested_quant_map       both tables of levels
//! W.quant_state.bitsandbytes__nf4       JSON: lengths of blocks, the shape, the mean of scales
//! ```

use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use shoal_protocol::manifest::Quantisation;

use super::{BaseError, Result, mxfp4};
use crate::data::safetensors_file::FileTensor;
use crate::model::parameters::Parameter;
use crate::numeric::nf4::{self, BLOCK, GROUP, LEVELS, Parts, SCALE_LEVELS};

/// The key of `config.json`.
const KEY: &str = "quantization_config";

/// The ends of the names of a matrix's other tensors, which begin with its own.
const SCALES: &str = ".absmax";
const MAGNITUDES: &str = ".nested_absmax";
const TABLE: &str = ".quant_map";
const SCALE_TABLE: &str = ".nested_quant_map";
const STATE: &str = ".quant_state.bitsandbytes__nf4";

/// The format of quantised matrices in a model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileFormat {
    /// NF4 as bitsandbytes writes it. A base keeps the packed matrices.
    Nf4,
    /// MXFP4, as GPT-OSS has its experts. They are read as bf16.
    Mxfp4,
}

impl FileFormat {
    /// What a base has of it.
    pub(super) fn kept(self) -> Option<Quantisation> {
        match self {
            Self::Nf4 => Some(Quantisation::Nf4),
            Self::Mxfp4 => None,
        }
    }
}

/// Takes the key out of a `config.json` if it says that matrices are in a format that is read here, and returns which.
pub(super) fn take_format(config: &mut Value) -> Option<FileFormat> {
    let of = config.get(KEY)?;
    if of.get("quant_method") == Some(&json!("mxfp4")) {
        config.as_object_mut()?.remove(KEY);
        return Some(FileFormat::Mxfp4);
    }
    let needed = [
        ("quant_method", json!("bitsandbytes")),
        ("load_in_4bit", json!(true)),
        ("bnb_4bit_quant_type", json!("nf4")),
        ("bnb_4bit_use_double_quant", json!(true)),
    ];
    let storage = of.get("bnb_4bit_quant_storage");
    let has_bytes = storage.is_none_or(|storage| storage == "uint8");
    if !has_bytes || needed.iter().any(|(key, value)| of.get(*key) != Some(value)) {
        return None;
    }
    config.as_object_mut()?.remove(KEY);
    Some(FileFormat::Nf4)
}

/// The name of the matrix to whose quantisation a tensor belongs.
pub(super) fn matrix_of(tensor: &str, format: FileFormat) -> Option<&str> {
    let ends = match format {
        // Some of these end in others.
        FileFormat::Nf4 => &[MAGNITUDES, SCALE_TABLE, STATE, SCALES, TABLE][..],
        FileFormat::Mxfp4 => &[mxfp4::BLOCKS, mxfp4::SCALES],
    };
    ends.iter().find_map(|end| tensor.strip_suffix(end))
}

/// The section of a matrix with this name in a file, of which `find` finds the tensors.
pub(super) fn section<'a>(
    path: &Path,
    name: &str,
    parameter: &Parameter,
    find: impl Fn(&str) -> Option<FileTensor<'a>>,
) -> Result<Vec<u8>> {
    let refused = |reason: String| {
        let (path, tensor) = (path.to_owned(), name.to_owned());
        BaseError::NotNf4 { path, tensor, reason }
    };
    let part = |end: &str, dtype| {
        let found = find(&format!("{name}{end}"));
        let found = found.ok_or_else(|| refused(format!("{name}{end} is missing")))?;
        match found.dtype == dtype {
            true => Ok(found.data),
            false => Err(refused(format!("{name}{end} is {:?} and not {dtype:?}", found.dtype))),
        }
    };
    for (end, table) in [(TABLE, &LEVELS[..]), (SCALE_TABLE, &SCALE_LEVELS)] {
        let expected = table.iter().flat_map(|level| level.to_le_bytes());
        if !expected.eq(part(end, Dtype::F32)?.iter().copied()) {
            return Err(refused(format!("{name}{end} has other levels than those of NF4")));
        }
    }
    let mean = mean(part(STATE, Dtype::U8)?, parameter).map_err(refused)?;
    let parts = Parts {
        mean,
        magnitudes: part(MAGNITUDES, Dtype::F32)?,
        scales: part(SCALES, Dtype::U8)?,
        codes: part("", Dtype::U8)?,
    };
    let weights = parameter.len();
    let section = parts.section(weights);
    let section = section.ok_or_else(|| {
        let reason = "its tensors have not the lengths of a matrix of";
        refused(format!("{reason} {:?} in blocks of {BLOCK}", parameter.shape))
    })?;
    match nf4::is_finite(&section, weights) {
        true => Ok(section),
        false => {
            Err(BaseError::NotFinite { path: path.to_owned(), tensor: format!("{name}{SCALES}") })
        }
    }
}

/// The mean of scales, in a state for this matrix.
fn mean(state: &[u8], parameter: &Parameter) -> std::result::Result<f32, String> {
    let state: Value = serde_json::from_slice(state)
        .map_err(|error| format!("its quant_state is no JSON ({error})"))?;
    let expected = [
        ("quant_type", json!("nf4")),
        ("blocksize", json!(BLOCK)),
        ("nested_blocksize", json!(GROUP)),
        ("nested_dtype", json!("float32")),
        ("shape", json!(parameter.shape)),
    ];
    for (key, value) in expected {
        let found = &state[key];
        if *found != value {
            return Err(format!("its quant_state has {key} = {found} and not {value}"));
        }
    }
    let mean = state["nested_offset"].as_f64();
    let mean = mean.ok_or_else(|| "its quant_state has no number nested_offset".to_owned())?;
    Ok(mean as f32)
}

#[cfg(test)]
mod tests;
