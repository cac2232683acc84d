//! Waiting for a moment that may not be set.

use std::time::Instant;

/// Waits until a moment; without end where there is none.
pub(super) async fn sleep_to(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end.into()).await,
        None => std::future::pending().await,
    }
}
