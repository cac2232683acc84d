//! The run's decisions.

mod config;

pub use config::CoordinatorConfig;
use shoal_protocol::units::Moment;

use crate::action::{CoordinatorAction, CoordinatorInput};

/// The run's decisions: who is a member, who works on what, when a step is closed and committed.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
}

impl Coordinator {
    /// A coordinator at the beginning of its term.
    #[must_use]
    pub fn new(config: CoordinatorConfig) -> Self {
        Self { config }
    }

    /// Begins the term. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<CoordinatorAction>) {
        let _ = (now, out, &self.config);
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
        out: &mut Vec<CoordinatorAction>,
    ) {
        let _ = (now, input, out);
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        None
    }
}
