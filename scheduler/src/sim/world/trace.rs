//! The trace of all events, by which two runs are compared.

use shoal_protocol::units::Moment;
use shoal_protocol::wire;

use super::event::Event;
use crate::sim::integer_model::mix;

/// Hash of all events with their times, in order.
#[derive(Debug, Default)]
pub(super) struct Trace(u64);

impl Trace {
    pub(super) fn hash(&self) -> u64 {
        self.0
    }

    /// Adds an event.
    pub(super) fn note(&mut self, at: Moment, event: &Event) {
        self.word(at.0.as_nanos() as u64);
        let bytes = wire::encode(event).expect("events are as small as messages");
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn word(&mut self, word: u64) {
        self.0 = mix(&[self.0, word]);
    }
}
