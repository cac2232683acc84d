//! The end of a wait in which nothing moves.
//!
//! A slow link takes its time, and is no reason to give up; one that carries nothing is. So such waits end by
//! what moved lately, not by how long they took.

use std::time::Duration;

use tokio::time::{Instant, timeout};

/// How often it is looked at what has moved, for each patience.
const LOOKS: u32 = 4;

/// Does some work, and gives it up when what `moved` counts has not changed for as long as `patience`, or up to
/// a quarter longer; `None` then.
pub(super) async fn while_moving<T>(
    patience: Duration,
    moved: impl Fn() -> u64,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(work);
    let (mut before, mut since) = (moved(), Instant::now());
    loop {
        if let Ok(done) = timeout(patience / LOOKS, &mut work).await {
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
    async fn what_stands_still_is_given_up() {
        let begun = Instant::now();
        assert_eq!(while_moving(PATIENCE, || 7, pending::<()>()).await, None);
        assert!((PATIENCE..=PATIENCE * 5 / 4).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn what_moves_may_take_as_long_as_it_needs() {
        let (moved, begun) = (AtomicU64::new(0), Instant::now());
        let work = async {
            for _ in 0..100 {
                sleep(PATIENCE * 3 / 4).await;
                moved.fetch_add(1, Ordering::Relaxed);
            }
        };
        let done = while_moving(PATIENCE, || moved.load(Ordering::Relaxed), work).await;
        assert_eq!(done, Some(()));
        assert_eq!(begun.elapsed(), PATIENCE * 75);
    }
}
