//! Conversion between libtorch's tensors and plain bytes.

use std::borrow::Cow;

use bytemuck::Pod;
use bytes::Bytes;
use shoal_protocol::manifest::Dtype;
use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// libtorch's name of a dtype.
pub(crate) fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

/// The elements as little-endian bytes. On the CPU they are not copied: the result keeps the
/// tensor's memory alive.
pub(crate) fn into_bytes(tensor: &Tensor) -> Result<Bytes> {
    struct Owner(Tensor);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            bytes_of(&self.0)
        }
    }
    let tensor = tensor.f_detach()?.f_to(Device::Cpu)?.f_contiguous()?;
    Ok(Bytes::from_owner(Owner(tensor)))
}

/// A tensor of the processor on a device. A GPU copies it beside this process, from pinned memory.
pub(crate) fn upload(tensor: &Tensor, device: Device) -> Result<Tensor> {
    match device {
        Device::Cuda(_) => {
            let pinned = tensor.f_pin_memory(device)?;
            Ok(pinned.f_to_device_(device, tensor.kind(), true, false)?)
        }
        _ => Ok(tensor.f_to(device)?),
    }
}

/// Bytes of a contiguous tensor on the CPU.
pub(crate) fn bytes_of(tensor: &Tensor) -> &[u8] {
    let length = host_length(tensor);
    // SAFETY: libtorch's allocation has that many initialised bytes and lives as long as `tensor`.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>().cast_const(), length) }
}

/// Mutable bytes of a contiguous tensor on the CPU.
pub(crate) fn bytes_mut(tensor: &mut Tensor) -> &mut [u8] {
    let length = host_length(tensor);
    // SAFETY: as above, and the exclusive borrow is of the only handle that Rust reads through.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), length) }
}

/// Elements of a contiguous tensor on the CPU.
pub(crate) fn elements<T: Pod>(tensor: &Tensor) -> &[T] {
    bytemuck::cast_slice(bytes_of(tensor))
}

/// Mutable elements of a contiguous tensor on the CPU.
pub(crate) fn elements_mut<T: Pod>(tensor: &mut Tensor) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes_mut(tensor))
}

/// Little-endian f32 bytes as numbers, without a copy if they are aligned.
pub(crate) fn floats(bytes: &[u8]) -> Cow<'_, [f32]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) => Cow::Borrowed(numbers),
        Err(_) => bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect(),
    }
}

fn host_length(tensor: &Tensor) -> usize {
    assert!(tensor.device() == Device::Cpu && tensor.is_contiguous(), "not plain memory");
    // An empty tensor may have no allocation; no tensor here is empty.
    assert!(!tensor.data_ptr().is_null(), "a tensor without memory");
    byte_count(tensor)
}

/// Bytes of all elements, wherever they are.
pub(crate) fn byte_count(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
