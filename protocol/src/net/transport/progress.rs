//! A timeout that depends on progress.
//!
//! A slow link is not a reason to abort, but a link without progress is. Such waits therefore end
//! by the time since the last progress, not by their total duration.

use std::time::Duration;

use tokio::time::{Instant, timeout};

/// Number of progress checks per `patience`.
const CHECKS: u32 = 4;

/// Runs `work`, and aborts it if `moved` returns the same value for `patience`, or up to a quarter
/// longer. Returns `None` in this case.
pub(super) async fn with_progress_timeout<T>(
    patience: Duration,
    moved: impl Fn() -> u64,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(work);
    let (mut before, mut since) = (moved(), Instant::now());
    loop {
        if let Ok(done) = timeout(patience / CHECKS, &mut work).await {
            return Some(done);
        }
        let seen = moved();
        if seen != before {
            (before, since) = (seen, Instant::now());
        } else if since.elapsed() >= patience {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::sleep;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test(start_paused = true)]
    async fn work_without_progress_is_aborted() {
        let begun = Instant::now();
        assert_eq!(with_progress_timeout(PATIENCE, || 7, pending::<()>()).await, None);
        assert!((PATIENCE..=PATIENCE * 5 / 4).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn work_with_progress_has_no_time_limit() {
        let (moved, begun) = (AtomicU64::new(0), Instant::now());
        let work = async {
            for _ in 0..100 {
                sleep(PATIENCE * 3 / 4).await;
                moved.fetch_add(1, Ordering::Relaxed);
            }
        };
        let done = with_progress_timeout(PATIENCE, || moved.load(Ordering::Relaxed), work).await;
        assert_eq!(done, Some(()));
        assert_eq!(begun.elapsed(), PATIENCE * 75);
    }
}
