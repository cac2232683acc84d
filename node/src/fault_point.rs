//! Points at which a test kills this process as `kill -9` does. `SHOAL_DIE_AT=storing:2` kills it
//! the second time that it passes [`FaultPoint::Storing`]. Release builds ignore the variable.

/// A point at which the death of a process could lose data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    /// An activation was handed to the connection.
    ForwardSent,
    /// A gradient is about to be sent; no other peer has it.
    GradientUnsent,
    /// A weight gradient is about to be added; the gradient that its pass returned was sent some time ago.
    Adding,
    /// A piece of an all-reduce is about to be sent.
    Reducing,
    /// The result of an all-reduce is here and reported, but not committed.
    Reduced,
    /// The next stage of a peer that swaps is on its way into memory.
    Swapping,
    /// A part of a checkpoint is written, but not reported.
    Storing,
    /// The coordinator has decided on a commit that is not in the log yet.
    Committing,
    /// A commit is in the log, but not announced.
    Committed,
}

#[cfg(debug_assertions)]
pub(crate) use armed::named_number;

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::FaultPoint;

    /// The point at which this process dies, and how many passes are left until then.
    struct Trigger {
        name: String,
        left: AtomicU64,
    }

    /// What a variable for tests says, in the form `NAME:N`.
    pub(crate) fn named_number(variable: &str) -> Option<(String, u64)> {
        let text = std::env::var(variable).ok()?;
        let (name, number) = text.split_once(':')?;
        Some((name.to_owned(), number.parse().ok()?))
    }

    fn trigger() -> Option<&'static Trigger> {
        static TRIGGER: OnceLock<Option<Trigger>> = OnceLock::new();
        let read = || {
            let (name, times) = named_number("SHOAL_DIE_AT")?;
            Some(Trigger { name, left: AtomicU64::new(times) })
        };
        TRIGGER.get_or_init(read).as_ref()
    }

    impl FaultPoint {
        fn name(self) -> &'static str {
            match self {
                Self::ForwardSent => "forward-sent",
                Self::GradientUnsent => "gradient-unsent",
                Self::Adding => "adding",
                Self::Reducing => "reducing",
                Self::Reduced => "reduced",
                Self::Swapping => "swapping",
                Self::Storing => "storing",
                Self::Committing => "committing",
                Self::Committed => "committed",
            }
        }

        /// Passes the point. The process dies here if the variable says so.
        pub(crate) fn pass(self) {
            let Some(trigger) = trigger().filter(|trigger| trigger.name == self.name()) else {
                return;
            };
            if trigger.left.fetch_sub(1, Ordering::Relaxed) == 1 {
                // A process can always kill itself, and nothing runs after that.
                let _ = kill(Pid::this(), Signal::SIGKILL);
                loop {
                    std::thread::park();
                }
            }
        }
    }
}

#[cfg(not(debug_assertions))]
impl FaultPoint {
    /// Does nothing in release builds.
    pub(crate) fn pass(self) {}
}
