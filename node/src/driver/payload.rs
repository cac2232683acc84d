//! The tensors behind the scheduler's handles.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use shoal_protocol::codec::Packing;
use shoal_protocol::frame::{Element, Frame, FrameError};
use shoal_protocol::units;
use shoal_scheduler::action::{Payload, PayloadId};

/// A tensor outside of the engine: plain little-endian bytes.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// Kind of its elements.
    pub(crate) element: Element,
    /// Its sizes, outermost first.
    pub(crate) shape: Vec<u32>,
    /// Its elements.
    pub(crate) bytes: Bytes,
}

impl Tensor {
    /// A list of numbers.
    pub(crate) fn flat(element: Element, bytes: Bytes) -> Self {
        let length = u32::try_from(bytes.len() / element.size()).expect("a piece under its cap");
        Self { element, shape: vec![length], bytes }
    }

    /// As it goes over a link.
    pub(crate) fn to_frame(&self, packing: Packing) -> Result<Frame, FrameError> {
        Frame::pack(self.element, &self.shape, self.bytes.clone(), packing)
    }

    /// From how it came over a link.
    pub(crate) fn from_frame(frame: &Frame) -> Result<Self, FrameError> {
        Ok(Self { element: frame.element(), shape: frame.shape().to_vec(), bytes: frame.unpack()? })
    }
}

/// What one handle stands for; an activation comes with its labels.
pub(crate) type Tensors = Arc<[Tensor]>;

/// All payloads of this process, shared by the driver and the engine's thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Payloads {
    all: Arc<Mutex<BTreeMap<PayloadId, Tensors>>>,
    last: Arc<AtomicU64>,
}

impl Payloads {
    /// Keeps these tensors under a new handle.
    pub(crate) fn keep(&self, tensors: impl Into<Tensors>) -> Payload {
        let tensors = tensors.into();
        let size = tensors.iter().map(|tensor| units::Bytes(tensor.bytes.len() as u64)).sum();
        let id = PayloadId(self.last.fetch_add(1, Ordering::Relaxed));
        self.lock().insert(id, tensors);
        Payload { id, size }
    }

    /// The tensors of a handle.
    ///
    /// # Panics
    /// When the scheduler uses a handle that it has released.
    pub(crate) fn get(&self, id: PayloadId) -> Tensors {
        self.lock().get(&id).cloned().expect("a payload is used before it is released")
    }

    /// Forgets a handle.
    ///
    /// # Panics
    /// When the scheduler releases a handle twice.
    pub(crate) fn release(&self, id: PayloadId) {
        assert!(self.lock().remove(&id).is_some(), "a payload is released once");
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<PayloadId, Tensors>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
