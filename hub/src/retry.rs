//! Retries with exponential back-off.

use std::thread::sleep;
use std::time::Duration;

use crate::config::RetryPolicy;
use crate::error::HubError;

/// A failed request.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection fails, breaks or makes no progress.
    Lost {
        /// The URL.
        url: String,
        /// The cause.
        reason: String,
    },
    /// The server fails.
    Server {
        /// The URL.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// The server limits the rate of requests.
    Limited {
        /// The URL.
        url: String,
        /// The time that the server asks for.
        retry_after: Option<Duration>,
    },
    /// Only a part of a file has arrived.
    Half {
        /// The file.
        file: String,
        /// Bytes that are there.
        have: u64,
        /// Length of the file.
        length: u64,
        /// The cause.
        reason: String,
    },
    /// A retry cannot help.
    Fatal(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Fatal(error)
    }
}

impl Failure {
    fn into_error(self) -> HubError {
        match self {
            Self::Lost { url, reason } => HubError::Unreachable { url, reason },
            Self::Server { url, status } => HubError::ServerFailure { url, status },
            Self::Limited { url, .. } => HubError::RateLimited { url },
            Self::Half { file, have, length, reason } => {
                HubError::Incomplete { file, have, length, reason }
            }
            Self::Fatal(error) => error,
        }
    }
}

/// The retries of one request.
#[derive(Debug)]
pub(crate) struct Retry {
    policy: RetryPolicy,
    failures: u32,
}

impl Retry {
    /// No failure so far.
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        Self { policy, failures: 0 }
    }

    /// Forgets earlier failures, after progress.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Sleeps before the next attempt.
    ///
    /// # Errors
    /// The failure, if a retry cannot help or all attempts have failed.
    pub(crate) fn pause(&mut self, failure: Failure) -> Result<(), HubError> {
        self.failures += 1;
        if matches!(failure, Failure::Fatal(_)) || self.failures >= self.policy.attempts {
            return Err(failure.into_error());
        }
        let pause = self.length_of(&failure);
        tracing::warn!(?failure, ?pause, "a request is repeated");
        sleep(pause);
        Ok(())
    }

    fn length_of(&self, failure: &Failure) -> Duration {
        match failure {
            Failure::Limited { retry_after: Some(asked), .. } => {
                (*asked).min(self.policy.longest_retry_after)
            }
            _ => {
                let doubled = 1_u32.checked_shl(self.failures - 1).unwrap_or(u32::MAX);
                self.policy.first_pause.saturating_mul(doubled).min(self.policy.longest_pause)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> Failure {
        Failure::Lost { url: "http://hub".to_owned(), reason: "reset".to_owned() }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut retry = Retry::new(RetryPolicy::default());
        let mut pauses = Vec::new();
        for failures in 1..40 {
            retry.failures = failures;
            pauses.push(retry.length_of(&lost()).as_secs());
        }
        assert_eq!(pauses[..6], [1, 2, 4, 8, 16, 30]);
        assert!(pauses[6..].iter().all(|&pause| pause == 30));
    }

    #[test]
    fn a_server_cannot_ask_for_more_than_the_bound() {
        let mut retry = Retry::new(RetryPolicy::default());
        retry.failures = 1;
        for (asked, pause) in [(Some(7), 7), (Some(u64::MAX), 300), (None, 1)] {
            let retry_after = asked.map(Duration::from_secs);
            let failure = Failure::Limited { url: String::new(), retry_after };
            assert_eq!(retry.length_of(&failure).as_secs(), pause);
        }
    }

    #[test]
    fn attempts_end() {
        let policy =
            RetryPolicy { attempts: 3, first_pause: Duration::ZERO, ..RetryPolicy::default() };
        let mut retry = Retry::new(policy);
        retry.pause(lost()).expect("another attempt");
        retry.pause(lost()).expect("another attempt");
        assert!(matches!(retry.pause(lost()), Err(HubError::Unreachable { .. })));
        retry.reset();
        retry.pause(lost()).expect("another attempt");
        assert!(retry.pause(Failure::Fatal(HubError::NoCache)).is_err());
    }
}
