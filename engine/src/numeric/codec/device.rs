//! The block codecs as libtorch's elementwise operations: one IEEE operation at a time, as in
//! `protocol`, so that the bytes are the same.

use shoal_protocol::codec::{Codec, Dither, MAGIC, NOT_FINITE, Rounding, TINY};
use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Whether a tensor of `numbers` numbers is coded on its device, which requires whole blocks.
pub(super) fn fits(codec: Codec, numbers: usize) -> bool {
    codec.block().is_some_and(|block| numbers.is_multiple_of(block.numbers()))
}

/// Encodes a fitting f32 tensor on its device.
pub(super) fn encode(tensor: &Tensor, codec: Codec, rounding: Rounding) -> Result<Tensor> {
    let device = tensor.device();
    let block = codec.block().expect("a codec that fits").numbers() as i64;
    let limit = f64::from(codec.limit().expect("a codec that fits"));
    let numbers = tensor.f_reshape([-1, block])?;
    let largest = magnitude(&numbers)?.f_amax(1, true)?;
    let tiny = largest.f_lt(i64::from(TINY))?;
    let usable = largest.f_lt(i64::from(NOT_FINITE))?.f_logical_and(&tiny.f_logical_not()?)?;
    // For an unusable block the maximum is set to 1, so that nothing below is infinite.
    let one = Tensor::f_full([1], i64::from(1.0f32.to_bits()), (Kind::Int, device))?;
    let float = largest.f_where_self(&usable, &one)?.f_view_dtype(Kind::Float)?;
    let spoilt = Tensor::f_full([1], f64::NAN, (Kind::Float, device))?;
    let zero = Tensor::f_zeros([1], (Kind::Float, device))?;
    // A tensor, since a GPU multiplies by the reciprocal of a scalar divisor, which rounds twice.
    let limit = scalar(limit, device)?;
    let scales = float.f_div(&limit)?;
    let scales = scales.f_where_self(&usable, &zero.f_where_self(&tiny, &spoilt)?)?;
    let by = limit.f_div(&float)?;
    let scaled = numbers.f_where_self(&usable, &zero)?.f_mul(&by)?;
    let offset = match rounding {
        Rounding::Nearest => None,
        Rounding::Stochastic(dither) => {
            Some(offsets(dither, tensor.numel() as i64, device)?.f_reshape([-1, block])?)
        }
    };
    let offset = offset.as_ref();
    let codes = match codec {
        Codec::Int8(_) => rounded(&scaled, offset, 127)?,
        Codec::Int4(_) => rounded(&scaled, offset, 7)?,
        Codec::Fp8(_) => to_e4m3(&scaled, offset)?,
        Codec::F32 | Codec::Bf16 | Codec::F16 => unreachable!("they have no blocks"),
    };
    let none = Tensor::f_zeros([1], (Kind::Int, device))?;
    let mut codes = codes.f_where_self(&usable, &none)?;
    if matches!(codec, Codec::Int4(_)) {
        let halves = codes.f_add_scalar(8)?.f_reshape([-1, 2, block / 2])?;
        let high = halves.f_select(1, 1)?.f_bitwise_left_shift_tensor_scalar(4)?;
        codes = halves.f_select(1, 0)?.f_bitwise_or_tensor(&high)?;
    }
    let codes = codes.f_bitwise_and(255)?.f_to_kind(Kind::Uint8)?.f_flatten(0, -1)?;
    let scales = scales.f_contiguous()?.f_view_dtype(Kind::Uint8)?.f_flatten(0, -1)?;
    Ok(Tensor::f_cat(&[scales, codes], 0)?)
}

/// Decodes bytes to flat f32 numbers.
pub(super) fn decode(coded: &Tensor, codec: Codec, numbers: i64) -> Result<Tensor> {
    let block = codec.block().expect("a codec that fits").numbers() as i64;
    let blocks = numbers / block;
    let scales = coded.f_narrow(0, 0, 4 * blocks)?.f_contiguous()?.f_view_dtype(Kind::Float)?;
    let codes = coded.f_narrow(0, 4 * blocks, coded.numel() as i64 - 4 * blocks)?;
    let codes = codes.f_reshape([blocks, -1])?;
    let values = match codec {
        Codec::Int8(_) => codes.f_contiguous()?.f_view_dtype(Kind::Int8)?.f_to_kind(Kind::Float)?,
        Codec::Int4(_) => {
            let codes = codes.f_to_kind(Kind::Int)?;
            let low = codes.f_bitwise_and(15)?;
            let high = codes.f_bitwise_right_shift_tensor_scalar(4)?;
            Tensor::f_cat(&[low, high], 1)?.f_to_kind(Kind::Float)?.f_sub_scalar(8.0)?
        }
        Codec::Fp8(_) => from_e4m3(&codes.f_to_kind(Kind::Int)?)?,
        Codec::F32 | Codec::Bf16 | Codec::F16 => unreachable!("they have no blocks"),
    };
    Ok(values.f_mul(&scales.f_reshape([blocks, 1])?)?.f_flatten(0, -1)?)
}

fn scalar(value: f64, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_full([1], value, (Kind::Float, device))?)
}

/// The bits of magnitudes, as i32.
fn magnitude(numbers: &Tensor) -> Result<Tensor> {
    Ok(numbers.f_contiguous()?.f_view_dtype(Kind::Int)?.f_bitwise_and(0x7fff_ffff)?)
}

/// The numbers rounded to integers, i32.
fn rounded(numbers: &Tensor, offset: Option<&Tensor>, limit: i64) -> Result<Tensor> {
    let sum = match offset {
        Some(offset) => numbers.f_add(offset)?.f_add_scalar(f64::from(MAGIC))?,
        None => numbers.f_add_scalar(f64::from(MAGIC))?,
    };
    let bits = sum.f_view_dtype(Kind::Int)?.f_sub_scalar(i64::from(MAGIC.to_bits()))?;
    Ok(bits.f_clamp(-limit, limit)?)
}

/// Like `protocol`'s function of this name; i32.
fn to_e4m3(numbers: &Tensor, offset: Option<&Tensor>) -> Result<Tensor> {
    let sign = numbers.f_view_dtype(Kind::Int)?.f_bitwise_right_shift_tensor_scalar(24)?;
    let sign = sign.f_bitwise_and(0x80)?;
    let magnitude = magnitude(numbers)?;
    let odd = magnitude.f_bitwise_right_shift_tensor_scalar(20)?.f_bitwise_and(1)?;
    let up = match offset {
        None => odd.f_add_scalar(0x7_ffff)?,
        Some(offset) => {
            let even = odd.f_where_self(&offset.f_eq(0.0)?, &Tensor::f_ones_like(&odd)?)?;
            let by = rounded(&offset.f_mul_scalar(1_048_576.0)?, None, (1 << 19) - 1)?;
            even.f_add_scalar(0x7_ffff)?.f_add(&by)?
        }
    };
    let normal = magnitude.f_add(&up)?.f_bitwise_right_shift_tensor_scalar(20)?;
    let normal = normal.f_sub_scalar((127 - 7) << 3)?.f_clamp_max(0x7e)?;
    let small = magnitude.f_view_dtype(Kind::Float)?.f_mul_scalar(512.0)?;
    let small = rounded(&small, offset, 8)?.f_clamp_min(0)?;
    let code = small.f_where_self(&magnitude.f_lt((127 - 6) << 23)?, &normal)?;
    Ok(sign.f_bitwise_or_tensor(&code)?)
}

fn from_e4m3(codes: &Tensor) -> Result<Tensor> {
    let sign = codes.f_bitwise_and(0x80)?.f_bitwise_left_shift_tensor_scalar(24)?;
    let magnitude = codes.f_bitwise_and(0x7f)?;
    let normal = magnitude.f_bitwise_left_shift_tensor_scalar(20)?.f_add_scalar((127 - 7) << 23)?;
    let small = magnitude.f_bitwise_and(7)?.f_to_kind(Kind::Float)?.f_mul_scalar(1.0 / 512.0)?;
    let value = small.f_view_dtype(Kind::Int)?.f_where_self(&magnitude.f_lt(8)?, &normal)?;
    let nan = Tensor::f_full([1], i64::from(f32::NAN.to_bits()), (Kind::Int, codes.device()))?;
    let value = nan.f_where_self(&magnitude.f_eq(0x7f)?, &value)?;
    Ok(value.f_bitwise_or_tensor(&sign)?.f_view_dtype(Kind::Float)?)
}

/// Dither for `numbers` numbers: 32-bit words in i64, whose products wrap.
fn offsets(dither: Dither, numbers: i64, device: Device) -> Result<Tensor> {
    const WORD: i64 = 0xffff_ffff;
    let index = Tensor::f_arange(numbers, (Kind::Int64, device))?;
    let mut bits = index.f_mul_scalar(0x9e37_79b9)?.f_add_scalar(i64::from(dither.key()))?;
    bits = bits.f_bitwise_and(WORD)?;
    for (shift, factor) in [(16, 0x7feb_352d), (15, 0x846c_a68b)] {
        bits = bits.f_bitwise_xor_tensor(&bits.f_bitwise_right_shift_tensor_scalar(shift)?)?;
        bits = bits.f_mul_scalar(factor)?.f_bitwise_and(WORD)?;
    }
    bits = bits.f_bitwise_xor_tensor(&bits.f_bitwise_right_shift_tensor_scalar(16)?)?;
    let offset = bits.f_bitwise_right_shift_tensor_scalar(8)?.f_to_kind(Kind::Float)?;
    Ok(offset.f_mul_scalar(1.0 / 16_777_216.0)?.f_sub_scalar(0.5)?)
}

#[cfg(test)]
mod tests {
    use shoal_protocol::codec::Block;
    use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};

    use super::*;
    use crate::device::setup::Devices;
    use crate::device::tensor::{bytes_of, elements};

    /// Numbers of many magnitudes, ties, and blocks that are tiny or not finite.
    fn numbers() -> Vec<f32> {
        let mut state = 1u32;
        let mut numbers: Vec<f32> = (0..64 * 64)
            .map(|index| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let part = (state >> 8) as f32 / 8_388_608.0 - 1.0;
                part * ((index / 64 % 40 - 20) as f32 + (state & 7) as f32).exp2()
            })
            .collect();
        for (place, value) in numbers[..64].iter_mut().enumerate() {
            *value = place as f32 - 0.5;
        }
        numbers[63] = 127.0;
        numbers[64..128].fill(-1e-35);
        numbers[130] = f32::NAN;
        numbers[200] = f32::NEG_INFINITY;
        numbers[260] = -0.0;
        numbers
    }

    /// The processor, and a GPU if there is one.
    fn devices() -> impl Iterator<Item = Device> {
        // libtorch knows of GPUs once one is opened.
        let gpu = Devices::AllCuda.resolve().is_ok().then_some(Device::Cuda(0));
        std::iter::once(Device::Cpu).chain(gpu)
    }

    #[test]
    fn bytes_and_numbers_are_those_of_the_reference() {
        let numbers = numbers();
        let key = ClaimKey { step: Step(2), stage: Stage(1), microbatch: Microbatch(5) };
        let block = Block::DEFAULT;
        for device in devices() {
            let tensor = Tensor::f_from_slice(&numbers).expect("a tensor");
            let tensor = tensor.f_to_device(device).expect("room on the device");
            for codec in [Codec::Int8(block), Codec::Int4(block), Codec::Fp8(block)] {
                for rounding in [Rounding::Nearest, Rounding::Stochastic(Dither::of(9, key))] {
                    is_the_references(&numbers, &tensor, codec, rounding);
                }
            }
        }
    }

    fn is_the_references(numbers: &[f32], tensor: &Tensor, codec: Codec, rounding: Rounding) {
        let here = |tensor: &Tensor| tensor.f_to_device(Device::Cpu).expect("copied");
        let length = codec.bytes_of(numbers.len() as u64).expect("few");
        let mut expected = vec![0; length as usize];
        codec.encode(numbers, rounding, &mut expected);
        let coded = encode(tensor, codec, rounding).expect("coded");
        assert!(
            bytes_of(&here(&coded)) == expected,
            "{codec} {rounding:?} on {:?}",
            tensor.device()
        );
        let mut read = vec![0.0; numbers.len()];
        codec.decode(&expected, &mut read).expect("its own bytes");
        let values = here(&decode(&coded, codec, numbers.len() as i64).expect("decoded"));
        let bits = |values: &[f32]| -> Vec<u32> {
            // All NaNs are equivalent.
            let one = |value: &f32| if value.is_nan() { f32::NAN } else { *value };
            values.iter().map(|value| one(value).to_bits()).collect()
        };
        assert_eq!(bits(elements(&values)), bits(&read), "{codec} on {:?}", tensor.device());
    }
}
