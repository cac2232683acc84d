//! Moments at which a test has this process die as `kill -9` has it die: `SHOAL_DIE_AT=storing:2` the
//! second time that it is about to say that it wrote a part of a checkpoint. Release builds never do.

/// A moment at which the death of a process once was, or could be, a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    /// An activation was handed to the connection.
    ForwardSent,
    /// A gradient is about to be sent: nobody else has it.
    GradientUnsent,
    /// A piece of an all-reduce is about to be sent.
    Reducing,
    /// The result of an all-reduce is here and reported, the commit is not.
    Reduced,
    /// A part of a checkpoint is written, and nobody knows.
    Storing,
    /// The coordinator has decided on a commit, and the log does not have it.
    Committing,
    /// The log has a commit, and nobody has heard of it.
    Committed,
}

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::FaultPoint;

    /// The moment that this process dies at, and how often it still passes it before.
    struct Wanted {
        name: String,
        left: AtomicU64,
    }

    fn wanted() -> Option<&'static Wanted> {
        static WANTED: OnceLock<Option<Wanted>> = OnceLock::new();
        let read = || {
            let text = std::env::var("SHOAL_DIE_AT").ok()?;
            let (name, times) = text.split_once(':')?;
            Some(Wanted { name: name.to_owned(), left: AtomicU64::new(times.parse().ok()?) })
        };
        WANTED.get_or_init(read).as_ref()
    }

    impl FaultPoint {
        fn name(self) -> &'static str {
            match self {
                Self::ForwardSent => "forward-sent",
                Self::GradientUnsent => "gradient-unsent",
                Self::Reducing => "reducing",
                Self::Reduced => "reduced",
                Self::Storing => "storing",
                Self::Committing => "committing",
                Self::Committed => "committed",
            }
        }

        /// The moment has come; it may be the last one.
        pub(crate) fn pass(self) {
            let Some(wanted) = wanted().filter(|wanted| wanted.name == self.name()) else { return };
            if wanted.left.fetch_sub(1, Ordering::Relaxed) == 1 {
                // It cannot fail for the process itself, and nothing follows it.
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
    /// Nothing happens.
    pub(crate) fn pass(self) {}
}
