//! The tensors behind the scheduler's handles.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame, FrameError};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::units;
use shoal_scheduler::action::{Payload, PayloadId};

use super::spill::{SpillFile, Spilled};

/// A tensor outside the engine: plain little-endian bytes.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// The kind of the elements.
    pub(crate) element: Element,
    /// The sizes, outermost first.
    pub(crate) shape: Vec<u32>,
    pub(crate) bytes: Bytes,
}

impl Tensor {
    /// Makes a tensor of one dimension.
    pub(crate) fn flat(element: Element, count: usize, bytes: Bytes) -> Self {
        let length = u32::try_from(count).expect("a piece under its cap");
        Self { element, shape: vec![length], bytes }
    }

    /// Makes a frame for a link from the packed bytes.
    pub(crate) fn to_frame(&self, packed: (Packing, Bytes)) -> Result<Frame, FrameError> {
        Frame::seal(self.element, &self.shape, self.bytes.len(), packed)
    }

    /// Unpacks a frame from a link.
    pub(crate) fn from_frame(frame: &Frame) -> Result<Self, FrameError> {
        Ok(Self { element: frame.element(), shape: frame.shape().to_vec(), bytes: frame.unpack()? })
    }
}

/// The tensors behind one handle; an activation comes with its labels.
pub(crate) type Tensors = Arc<[Tensor]>;

/// The hash of tensors whose elements the manifest fixes, by which audits compare them.
pub(crate) fn hash_of(tensors: &[Tensor]) -> ContentHash {
    let mut hasher = blake3::Hasher::new_derive_key("shoal audited tensors v1");
    for Tensor { shape, bytes, .. } in tensors {
        hasher.update(&(shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|size| {
            hasher.update(&size.to_le_bytes());
        });
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    }
    hasher.finalize().into()
}

/// Tensors behind a handle, in memory or on the disk.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    Memory(Tensors),
    Disk(Arc<Spilled>),
}

impl Held {
    /// Returns the tensors, and reads them from the disk if they are there.
    ///
    /// # Errors
    /// When the disk does not give back the bytes that were written.
    pub(crate) fn load(&self) -> io::Result<Tensors> {
        match self {
            Self::Memory(tensors) => Ok(tensors.clone()),
            Self::Disk(spilled) => spilled.read(),
        }
    }

    fn size(&self) -> units::Bytes {
        match self {
            Self::Memory(tensors) => size_of(tensors),
            Self::Disk(spilled) => spilled.size(),
        }
    }
}

/// All payloads of this process, shared by the driver and the engine's thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Payloads {
    store: Arc<Mutex<Store>>,
    last: Arc<AtomicU64>,
    /// Whether the output log is hashed, for audits.
    hashes: bool,
}

#[derive(Debug, Default)]
struct Store {
    /// The tensors, with their hash if it is known.
    all: BTreeMap<PayloadId, (Held, Option<ContentHash>)>,
    log: Log,
}

/// The output log: payloads that may have to be sent again. Payloads over the memory budget are on
/// the disk, the oldest first.
#[derive(Debug, Default)]
struct Log {
    budget: units::Bytes,
    file: Option<Arc<SpillFile>>,
    in_memory: Counted,
    on_disk: Counted,
    failures: u64,
}

/// Payloads and their total size.
#[derive(Debug, Default)]
struct Counted {
    each: BTreeMap<PayloadId, units::Bytes>,
    all: units::Bytes,
}

impl Counted {
    fn insert(&mut self, id: PayloadId, size: units::Bytes) {
        self.each.insert(id, size);
        self.all += size;
    }

    fn remove(&mut self, id: PayloadId) {
        if let Some(size) = self.each.remove(&id) {
            self.all = self.all - size;
        }
    }

    fn oldest(&self) -> Option<PayloadId> {
        self.each.keys().next().copied()
    }
}

/// The place of the output log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LogUse {
    /// Bytes on the disk.
    pub(crate) on_disk: units::Bytes,
    /// Payloads that stayed in memory since the disk did not take them.
    pub(crate) failures: u64,
}

impl Payloads {
    /// No payloads yet, of a run with audits or without.
    pub(crate) fn new(hashes: bool) -> Self {
        Self { hashes, ..Self::default() }
    }

    /// Sets the memory budget of the output log, and the file for the rest.
    pub(crate) fn spill_into(&self, file: Option<Arc<SpillFile>>, budget: units::Bytes) {
        let log = &mut self.lock().log;
        log.budget = budget;
        log.file = file;
    }

    /// Stores tensors under a new handle.
    pub(crate) fn keep(&self, tensors: impl Into<Tensors>) -> Payload {
        self.keep_hashed(tensors, None)
    }

    /// Like [`Self::keep`], with the hash if it is known.
    pub(crate) fn keep_hashed(
        &self,
        tensors: impl Into<Tensors>,
        hash: Option<ContentHash>,
    ) -> Payload {
        self.insert(Held::Memory(tensors.into()), hash)
    }

    /// Stores tensors of the output log under a new handle. Blocks until the log is within its
    /// memory budget.
    pub(crate) fn log(&self, tensors: impl Into<Tensors>) -> Payload {
        let tensors = tensors.into();
        let hash = self.hashes.then(|| hash_of(&tensors));
        let payload = self.keep_hashed(tensors, hash);
        self.lock().log.in_memory.insert(payload.id, payload.size);
        while self.spill_one() {}
        payload
    }

    /// Makes another handle for the same tensors.
    pub(crate) fn share(&self, id: PayloadId) -> Payload {
        let (held, hash) = self.known(id);
        self.insert(held, hash)
    }

    /// Returns the tensors behind a handle.
    ///
    /// # Panics
    /// When the scheduler uses a handle that it has released.
    pub(crate) fn get(&self, id: PayloadId) -> Held {
        self.known(id).0
    }

    fn known(&self, id: PayloadId) -> (Held, Option<ContentHash>) {
        self.lock().all.get(&id).cloned().expect("a payload is used before it is released")
    }

    /// Drops a handle.
    ///
    /// # Panics
    /// When the scheduler releases a handle twice.
    pub(crate) fn release(&self, id: PayloadId) {
        let mut store = self.lock();
        assert!(store.all.remove(&id).is_some(), "a payload is released once");
        store.log.in_memory.remove(id);
        store.log.on_disk.remove(id);
    }

    /// Returns the place of the output log.
    pub(crate) fn log_use(&self) -> LogUse {
        let log = &self.lock().log;
        LogUse { on_disk: log.on_disk.all, failures: log.failures }
    }

    fn insert(&self, held: Held, hash: Option<ContentHash>) -> Payload {
        let id = PayloadId(self.last.fetch_add(1, Ordering::Relaxed));
        let size = held.size();
        self.lock().all.insert(id, (held, hash));
        Payload { id, size, hash, seal: None }
    }

    /// Moves the oldest payload of the output log to the disk, if the log is over its budget. Returns
    /// whether another call may move one more.
    fn spill_one(&self) -> bool {
        let (id, tensors, file) = {
            let mut store = self.lock();
            let Some(file) = store.log.file.clone() else { return false };
            if store.log.in_memory.all <= store.log.budget {
                return false;
            }
            let id = store.log.in_memory.oldest().expect("something is over the budget");
            store.log.in_memory.remove(id);
            let (Held::Memory(tensors), _) = &store.all[&id] else { return true };
            (id, tensors.clone(), file)
        };
        let written = file.write(&tensors);
        let mut store = self.lock();
        match written {
            Ok(spilled) => {
                // It may have been released during the write.
                if let Some((held, _)) = store.all.get_mut(&id) {
                    *held = Held::Disk(Arc::new(spilled));
                    store.log.on_disk.insert(id, size_of(&tensors));
                }
            }
            Err(error) => {
                store.log.failures += 1;
                tracing::warn!(%error, "a part of the output log stays in memory");
            }
        }
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn size_of(tensors: &Tensors) -> units::Bytes {
    tensors.iter().map(|tensor| units::Bytes(tensor.bytes.len() as u64)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: units::Bytes = units::Bytes(16);

    fn tensors(byte: u8) -> [Tensor; 1] {
        [Tensor::flat(Element::U8, SIZE.0 as usize, vec![byte; SIZE.0 as usize].into())]
    }

    /// Makes payloads whose log has room for two in memory and for `places` on the disk.
    fn payloads(places: u64) -> Payloads {
        let payloads = Payloads::default();
        let file = SpillFile::create(&std::env::temp_dir(), SIZE, places).expect("a file");
        payloads.spill_into(Some(file), SIZE + SIZE);
        payloads
    }

    fn in_memory(payloads: &Payloads, logged: &[Payload]) -> Vec<bool> {
        let held = logged.iter().map(|payload| payloads.get(payload.id));
        held.map(|held| matches!(held, Held::Memory(_))).collect()
    }

    #[test]
    fn only_the_oldest_payloads_of_the_log_go_to_the_disk() {
        let payloads = payloads(2);
        let other = payloads.keep(tensors(9));
        let logged: Vec<Payload> = (0..4).map(|byte| payloads.log(tensors(byte))).collect();
        assert_eq!(in_memory(&payloads, &logged), [false, false, true, true]);
        assert_eq!(in_memory(&payloads, &[other]), [true]);
        assert_eq!(payloads.log_use(), LogUse { on_disk: SIZE + SIZE, failures: 0 });
        for (byte, payload) in (0..).zip(&logged) {
            let read = payloads.get(payload.id).load().expect("read");
            assert_eq!(read[0].bytes, tensors(byte)[0].bytes);
        }
    }

    #[test]
    fn a_place_is_free_again_after_its_last_handle() {
        let payloads = payloads(1);
        let logged: Vec<Payload> = (0..3).map(|byte| payloads.log(tensors(byte))).collect();
        let shared = payloads.share(logged[0].id);
        payloads.release(logged[0].id);
        assert_eq!(payloads.log_use().on_disk, units::Bytes(0));
        let read = payloads.get(shared.id).load().expect("still there");
        assert_eq!(read[0].bytes, tensors(0)[0].bytes);
        payloads.release(shared.id);
        let last = payloads.log(tensors(3));
        assert_eq!(in_memory(&payloads, &[logged[1], last]), [false, true]);
    }

    #[test]
    fn payloads_that_the_disk_does_not_take_stay_in_memory_and_are_counted() {
        let payloads = payloads(1);
        let logged: Vec<Payload> = (0..5).map(|byte| payloads.log(tensors(byte))).collect();
        assert_eq!(in_memory(&payloads, &logged), [false, true, true, true, true]);
        assert_eq!(payloads.log_use(), LogUse { on_disk: SIZE, failures: 2 });
        let read = payloads.get(logged[1].id).load().expect("in memory");
        assert_eq!(read[0].bytes, tensors(1)[0].bytes);
    }
}
