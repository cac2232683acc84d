//! Encoding of tensors between stages, in the formats of `protocol`'s codecs.
//!
//! On the CPU, `protocol` does the work. On another device, libtorch does the same operations
//! there, so that only the encoded bytes cross the bus.

mod device;

use bytes::Bytes;
use shoal_protocol::codec::{Codec, Rounding};
use tch::{Device, Kind, Tensor};

use crate::device::tensor::{bytes_mut, elements, elements_mut, into_bytes, upload};
use crate::error::{EngineError, Result};

/// Encodes a tensor of any float kind.
pub(crate) fn encode(tensor: &Tensor, codec: Codec, rounding: Rounding) -> Result<Bytes> {
    if let Some(kind) = kind_of(codec) {
        return into_bytes(&tensor.f_to_kind(kind)?);
    }
    let tensor = tensor.f_detach()?.f_to_kind(Kind::Float)?;
    if tensor.device() != Device::Cpu && device::fits(codec, tensor.numel()) {
        return into_bytes(&device::encode(&tensor, codec, rounding)?);
    }
    let host = tensor.f_to(Device::Cpu)?.f_contiguous()?;
    let length = codec.bytes_of(host.numel() as u64).expect("a tensor in memory");
    let mut bytes = vec![0; length as usize];
    codec.encode(elements(&host), rounding, &mut bytes);
    Ok(bytes.into())
}

/// Decodes a tensor from bytes at any alignment; its kind is the codec's, or f32.
pub(crate) fn decode(
    bytes: &[u8],
    codec: Codec,
    shape: &[i64],
    device: Device,
    what: &'static str,
) -> Result<Tensor> {
    let count: i64 = shape.iter().product();
    let expected = codec.bytes_of(count as u64).expect("a tensor for memory") as usize;
    if bytes.len() != expected {
        return Err(EngineError::WrongLength { what, expected, found: bytes.len() });
    }
    if let Some(kind) = kind_of(codec) {
        let mut tensor = Tensor::f_empty(shape, (kind, Device::Cpu))?;
        bytes_mut(&mut tensor).copy_from_slice(bytes);
        return upload(&tensor, device);
    }
    if device != Device::Cpu && device::fits(codec, count as usize) {
        let coded = upload(&Tensor::f_from_slice(bytes)?, device)?;
        return Ok(device::decode(&coded, codec, count)?.f_reshape(shape)?);
    }
    let mut tensor = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
    codec.decode(bytes, elements_mut(&mut tensor)).expect("its length was compared");
    upload(&tensor, device)
}

/// The kind of number that the codec stores directly, if any.
fn kind_of(codec: Codec) -> Option<Kind> {
    match codec {
        Codec::F32 => Some(Kind::Float),
        Codec::Bf16 => Some(Kind::BFloat16),
        Codec::F16 => Some(Kind::Half),
        Codec::Int8(_) | Codec::Int4(_) | Codec::Fp8(_) => None,
    }
}
