//! How much of the way out files may take from training.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

/// Pieces of files on their way at once while nothing else goes out.
const TURNS: u32 = 8;

/// While tensors go out, files have one part of so many of the time.
const PARTS: u32 = 4;

/// Tensors go out for as long after the last one.
const RECENT: Duration = Duration::from_secs(1);

/// The way out of this peer, which training and files share.
///
/// How fast it is nobody knows, and need not: a piece that took a while to arrive is followed by a
/// pause of three times as long.
#[derive(Debug)]
pub(super) struct Uplink {
    turns: Semaphore,
    trained: Mutex<Option<Instant>>,
}

impl Default for Uplink {
    fn default() -> Self {
        Self { turns: Semaphore::new(TURNS as usize), trained: Mutex::default() }
    }
}

impl Uplink {
    /// A tensor goes out.
    pub(super) fn trains(&self) {
        *self.trained.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Waits for a turn, sends a piece of a file, which ends when it has arrived, and pauses.
    pub(super) async fn give(&self, piece: impl Future<Output = ()>) {
        let turns = if self.is_training() { TURNS } else { 1 };
        let turn = self.turns.acquire_many(turns).await;
        let begun = Instant::now();
        piece.await;
        if self.is_training() {
            sleep(begun.elapsed() * (PARTS - 1)).await;
        }
        drop(turn);
    }

    fn is_training(&self) -> bool {
        let trained = self.trained.lock().unwrap_or_else(PoisonError::into_inner);
        trained.is_some_and(|last| last.elapsed() < RECENT)
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;

    /// How long it takes to give 16 pieces of 100 ms to whoever asks for all at once.
    async fn time_for_all(training: bool) -> Duration {
        let (uplink, begun) = (Uplink::default(), Instant::now());
        let tensors_go_out = || {
            if training {
                uplink.trains();
            }
        };
        tensors_go_out();
        let piece = || async {
            tensors_go_out();
            sleep(Duration::from_millis(100)).await;
        };
        join_all((0..16).map(|_| uplink.give(piece()))).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn files_have_the_way_out_to_themselves_where_nothing_else_goes_out() {
        assert_eq!(time_for_all(false).await.as_millis(), 2 * 100);
    }

    #[tokio::test(start_paused = true)]
    async fn files_have_a_quarter_of_the_time_while_tensors_go_out() {
        assert_eq!(time_for_all(true).await.as_millis(), 16 * 400);
    }
}
