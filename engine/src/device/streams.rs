//! Copies to a GPU beside its computation (`csrc/streams.cpp`).

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};

use shoal_protocol::units::Bytes;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use crate::device::shim::{check, pointer};
use crate::error::{EngineError, Result};

unsafe extern "C" {
    fn shoal_stream_new(index: i64, result: *mut *mut c_void) -> *mut c_char;
    fn shoal_stream_free(stream: *mut c_void);
    fn shoal_stream_follow(stream: *mut c_void) -> *mut c_char;
    fn shoal_copy_on(stream: *mut c_void, to: *mut C_tensor, from: *mut C_tensor) -> *mut c_char;
    fn shoal_event_new(stream: *mut c_void, result: *mut *mut c_void) -> *mut c_char;
    fn shoal_event_free(event: *mut c_void);
    fn shoal_event_is_over(event: *mut c_void, result: *mut bool) -> *mut c_char;
    fn shoal_event_join(event: *mut c_void, stream: *mut c_void) -> *mut c_char;
    fn shoal_event_wait(event: *mut c_void) -> *mut c_char;
    fn shoal_free_memory(index: i64, result: *mut usize) -> *mut c_char;
}

/// A queue of copies to one GPU beside what that computes.
#[derive(Debug)]
pub(crate) struct CopyStream(NonNull<c_void>);

// SAFETY: it is a number that names a stream, which any thread may use.
unsafe impl Send for CopyStream {}

impl CopyStream {
    /// A stream of a GPU.
    pub(crate) fn new(index: usize) -> Result<Self> {
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` lives for the call.
        check(unsafe { shoal_stream_new(index as i64, &raw mut stream) })?;
        Ok(Self(NonNull::new(stream).expect("a stream, as there was no error")))
    }

    /// Begins to copy tensors, each to the first from the second, when what the device computes now is done. The
    /// sources must stay as they are until [`CopyEnd::is_over`].
    pub(crate) fn copy<'a>(
        &self,
        tensors: impl Iterator<Item = (&'a Tensor, &'a Tensor)>,
    ) -> Result<CopyEnd> {
        // SAFETY: the stream is live.
        check(unsafe { shoal_stream_follow(self.0.as_ptr()) })?;
        for (to, from) in tensors {
            // SAFETY: all pointers are of live objects.
            check(unsafe { shoal_copy_on(self.0.as_ptr(), pointer(to), pointer(from)) })?;
        }
        let mut event = ptr::null_mut();
        // SAFETY: the stream is live, and `event` lives for the call.
        check(unsafe { shoal_event_new(self.0.as_ptr(), &raw mut event) })?;
        Ok(CopyEnd(NonNull::new(event).expect("an event, as there was no error")))
    }

    /// Lets what this thread computes on the device from now on wait for the end of a copy.
    pub(crate) fn join(&self, end: &CopyEnd) -> Result<()> {
        // SAFETY: both are live.
        check(unsafe { shoal_event_join(end.0.as_ptr(), self.0.as_ptr()) })
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // SAFETY: it is freed once.
        unsafe { shoal_stream_free(self.0.as_ptr()) }
    }
}

/// The end of copies.
#[derive(Debug)]
pub(crate) struct CopyEnd(NonNull<c_void>);

// SAFETY: an event has no thread.
unsafe impl Send for CopyEnd {}

impl CopyEnd {
    /// Whether the copies have ended.
    pub(crate) fn is_over(&self) -> Result<bool> {
        let mut is_over = false;
        // SAFETY: the event is live, and `is_over` lives for the call.
        check(unsafe { shoal_event_is_over(self.0.as_ptr(), &raw mut is_over) })?;
        Ok(is_over)
    }

    /// Waits until the copies have ended.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        check(unsafe { shoal_event_wait(self.0.as_ptr()) })
    }
}

impl Drop for CopyEnd {
    fn drop(&mut self) {
        // SAFETY: it is freed once.
        unsafe { shoal_event_free(self.0.as_ptr()) }
    }
}

/// Bytes that are free on a GPU.
pub(crate) fn free_memory(device: Device) -> Result<Bytes> {
    let Device::Cuda(index) = device else {
        return Err(EngineError::Torch("only a GPU has memory of its own".to_owned()));
    };
    let mut bytes = 0;
    // SAFETY: `bytes` lives for the call.
    check(unsafe { shoal_free_memory(index as i64, &raw mut bytes) })?;
    Ok(Bytes(bytes as u64))
}
