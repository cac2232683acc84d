//! Additions to accumulators that other threads have begun or have yet to begin.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::several::SumsKey;

/// The number of additions to each accumulator that have not ended.
#[derive(Debug, Clone, Default)]
pub(super) struct Additions(Arc<(Mutex<BTreeMap<SumsKey, usize>>, Condvar)>);

/// An addition, which ends when this is dropped, also with its thread.
#[derive(Debug)]
pub(super) struct Addition {
    all: Additions,
    to: SumsKey,
}

impl Additions {
    /// An addition is given to a thread.
    pub(super) fn begin(&self, to: SumsKey) -> Addition {
        *self.lock().entry(to).or_default() += 1;
        Addition { all: self.clone(), to }
    }

    /// Waits until all additions to an accumulator have ended.
    pub(super) fn wait(&self, to: SumsKey) {
        let goes_on = |counts: &mut BTreeMap<SumsKey, usize>| counts.contains_key(&to);
        drop(self.0.1.wait_while(self.lock(), goes_on).unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SumsKey, usize>> {
        // Counts are whole between any two statements.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Addition {
    fn drop(&mut self) {
        let mut counts = self.all.lock();
        if let Some(count) = counts.get_mut(&self.to) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.to);
            }
        }
        drop(counts);
        self.all.0.1.notify_all();
    }
}
