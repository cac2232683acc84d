//! Experts in MXFP4, as GPT-OSS's files have them: 4-bit floats in blocks of 32 with one power of two each (Open Compute
//! Project, Microscaling Formats, version 1.0). They are read as bf16, which has every such number.
//!
//! ```text
//! T_blocks   [experts, outputs, inputs / 32, 16]   two numbers a byte, the first in its low half
//! T_scales   [experts, outputs, inputs / 32]       exponents, plus 127
//! ```

use std::path::Path;

use half::bf16;
use safetensors::tensor::Dtype;

use super::weights::wrong_tensor;
use super::{BaseError, Result};
use crate::data::safetensors_file::FileTensor;
use crate::family::tensors::Location;
use crate::model::parameters::Parameter;

/// The ends of the names of a tensor's parts.
pub(super) const BLOCKS: &str = "_blocks";
pub(super) const SCALES: &str = "_scales";

/// Numbers of a block.
const BLOCK: usize = 32;
/// What a block's exponent is 0 at.
const BIAS: i32 = 127;
/// The exponent that stands for no number.
const NAN: u8 = 255;
/// The numbers by their low three bits; the fourth is the sign.
const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The elements of an expert's weight as bf16, of both tensors with its layer's experts.
pub(super) fn read(
    path: &Path,
    location: &Location,
    parameter: &Parameter,
    [blocks, scales]: [FileTensor<'_>; 2],
) -> Result<Vec<u8>> {
    let name = &location.tensor;
    let Some((expert, [outputs, inputs])) = location.matrix_of_expert() else {
        let (path, tensor) = (path.to_owned(), format!("{name}{BLOCKS}"));
        return Err(BaseError::NotMxfp4 { path, tensor });
    };
    let groups = inputs.div_ceil(BLOCK);
    let shape = [location.shape[0], outputs, groups, BLOCK / 2];
    for (end, tensor, shape) in [(BLOCKS, blocks, &shape[..]), (SCALES, scales, &shape[..3])] {
        if tensor.dtype != Dtype::U8 || tensor.shape != shape || !inputs.is_multiple_of(BLOCK) {
            let (name, expected) = (format!("{name}{end}"), format!("U8 {shape:?}"));
            return Err(wrong_tensor(path, &name, tensor, &expected));
        }
    }
    let mut bytes = Vec::with_capacity(2 * parameter.len());
    for row in 0..parameter.shape[0] {
        let first = (expert * outputs + location.row(row)) * groups;
        for group in first..first + groups {
            let exponent = scales.data[group];
            let is_number = exponent != NAN;
            let factor = libm::exp2f((i32::from(exponent) - BIAS) as f32);
            let packed = &blocks.data[group * BLOCK / 2..(group + 1) * BLOCK / 2];
            for half in packed.iter().flat_map(|byte| [byte & 15, byte >> 4]) {
                let number = NUMBERS[usize::from(half & 7)] * factor;
                let value = bf16::from_f32(if half & 8 == 0 { number } else { -number });
                if !is_number || !value.is_finite() {
                    let (path, tensor) = (path.to_owned(), format!("{name}{SCALES}"));
                    return Err(BaseError::NotFinite { path, tensor });
                }
                bytes.extend(value.to_bits().to_le_bytes());
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::tensors::locate;
    use crate::family::{self, Naming};
    use crate::model::parameters::all_parameters;

    const SHAPES: [&[usize]; 2] = [&[2, 64, 1, 16], &[2, 64, 1]];

    /// The values of a weight of a model of two experts, whose layer has these bytes.
    fn read_of(
        name: &str,
        [shape, of_scales]: [&[usize]; 2],
        [blocks, scales]: [&[u8]; 2],
    ) -> Result<Vec<f32>> {
        let config = json!({
            "model_type": "gpt_oss", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16, "intermediate_size": 32,
            "vocab_size": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default"},
        });
        let model = family::describe(&config).expect("a model").model;
        let all = all_parameters(&model);
        let parameter = all.iter().find(|parameter| parameter.name == name).expect("a weight");
        let location = locate(Naming::GptOss, &model, parameter);
        let of = |shape, data| FileTensor { dtype: Dtype::U8, shape, data };
        let tensors = [of(shape, blocks), of(of_scales, scales)];
        let bytes = read(Path::new("file"), &location, parameter, tensors)?;
        let values = bytes.as_chunks::<2>().0.iter();
        Ok(values.map(|two| bf16::from_le_bytes(*two).to_f32()).collect())
    }

    #[test]
    fn rows_of_gates_and_values_take_turns() {
        // Each row has its number as the exponent of all its elements, which are 1 and -6 in turns.
        let scales: Vec<u8> = (0..128).map(|row| 127 + row % 64).collect();
        let blocks = vec![0xf2; 128 * 16];
        for (part, first) in [("gate_proj", 0), ("up_proj", 1)] {
            let name = format!("model.layers.0.mlp.experts.1.{part}.weight");
            let values = read_of(&name, SHAPES, [&blocks, &scales]).expect("whole");
            assert_eq!(values.len(), 32 * 32);
            for (row, values) in values.chunks(32).enumerate() {
                let factor = libm::exp2f((2 * row + first) as f32);
                assert_eq!(
                    values[..4],
                    [factor, -6.0 * factor, factor, -6.0 * factor],
                    "{part} {row}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_number_or_has_another_shape_is_named() {
        let name = "model.layers.0.mlp.experts.0.gate_proj.weight";
        let (blocks, mut scales) = (vec![0x22; 128 * 16], vec![127; 128]);
        let tensors = "model.layers.0.mlp.experts.gate_up_proj";
        let error = |shapes, blocks: &[u8], scales: &[u8]| {
            read_of(name, shapes, [blocks, scales]).expect_err("refused").to_string()
        };
        let wrong = error([&[2, 64, 16], SHAPES[1]], &blocks, &scales);
        assert!(wrong.contains(&format!("{tensors}_blocks")), "{wrong}");
        assert!(wrong.contains("U8 [2, 64, 1, 16]"), "{wrong}");
        let wrong = error([SHAPES[0], &[2, 64]], &blocks, &scales);
        assert!(wrong.contains(&format!("{tensors}_scales")), "{wrong}");
        scales[2] = 255;
        let wrong = error(SHAPES, &blocks, &scales);
        assert!(wrong.contains(&format!("{tensors}_scales has a number that is NaN")), "{wrong}");
        // 6 times 2 to the 127th is more than bf16 has.
        scales[2] = 254;
        let blocks = vec![0x77; 128 * 16];
        assert!(error(SHAPES, &blocks, &scales).contains("_scales has a number"));
        let router = "model.layers.0.mlp.gate.weight";
        let wrong =
            read_of(router, SHAPES, [&blocks, &scales]).expect_err("no experts").to_string();
        assert!(wrong.contains("read of experts of GPT-OSS alone"), "{wrong}");
    }
}
