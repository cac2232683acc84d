//! How the engine's thread waits for asynchronous work, and how its waits end.

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// The runtime that fetches files for the engine's thread, until the engine is closed.
#[derive(Debug, Clone)]
pub(crate) struct EngineWaits {
    runtime: Handle,
    closed: CancellationToken,
}

impl EngineWaits {
    /// Waits on the runtime of the caller.
    ///
    /// # Panics
    /// Outside a runtime.
    pub(crate) fn here() -> Self {
        Self { runtime: Handle::current(), closed: CancellationToken::new() }
    }

    /// The runtime, for tasks that go on beside the thread.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Blocks the thread until the work is done.
    ///
    /// # Errors
    /// When the engine is closed. Nothing is polled then: after the end of its runtime a timer panics.
    pub(crate) fn wait<T>(&self, work: impl Future<Output = T>) -> anyhow::Result<T> {
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                () = self.closed.cancelled() => Err(anyhow::anyhow!("the engine is closed")),
                done = work => Ok(done),
            }
        })
    }

    /// Ends every wait, now and later.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }
}
