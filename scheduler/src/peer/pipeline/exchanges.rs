//! The exchanges of one microbatch at one stage: activations that come in and go on, gradients that come back.
//!
//! Almost every microbatch has one. A virtual worker of several stages, or one that joins a meeting on its way, makes
//! many, in order: those of one update may be under way together, and the next update's begin when all gradients of
//! this one are back.

use std::collections::BTreeMap;

use shoal_protocol::ids::Exchange;

use crate::action::Payload;

/// Where the input of a forward pass comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The first stage reads its samples itself.
    Samples,
    Upstream,
}

/// What answers a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The last stage starts from its own loss.
    Own,
    Downstream,
    /// The next stage said that the evaluation has ended.
    Evaluated,
}

/// How many passes of a kind the engine was given, and how many of them ended.
#[derive(Debug, Clone, Copy, Default)]
struct Passes {
    given: u32,
    ended: u32,
}

impl Passes {
    fn running(self) -> u32 {
        self.given - self.ended
    }

    /// Gives the engine the next pass.
    fn give(&mut self) -> Exchange {
        self.given += 1;
        Exchange(self.given - 1)
    }

    /// The oldest of them ended.
    fn end(&mut self) -> Exchange {
        assert!(self.running() > 0, "a pass ends after its begin");
        self.ended += 1;
        Exchange(self.ended - 1)
    }
}

/// The exchanges of one microbatch at one stage.
#[derive(Debug)]
pub(super) struct Exchanges {
    count: u32,
    at_once: u32,
    source: Source,
    answer: Answer,
    /// Activations that are here, until their pass ended.
    inputs: BTreeMap<Exchange, Payload>,
    /// Gradients that are here, until their pass ended.
    gradients: BTreeMap<Exchange, Payload>,
    forward: Passes,
    backward: Passes,
}

impl Exchanges {
    /// So many exchanges, of which `at_once` may be under way together.
    pub(super) fn new((count, at_once): (u32, u32), is_first: bool, is_last: bool) -> Self {
        assert!(count > 0 && at_once > 0, "a microbatch has a pass");
        Self {
            count,
            at_once,
            source: if is_first { Source::Samples } else { Source::Upstream },
            answer: if is_last { Answer::Own } else { Answer::Downstream },
            inputs: BTreeMap::new(),
            gradients: BTreeMap::new(),
            forward: Passes::default(),
            backward: Passes::default(),
        }
    }

    /// Whether there is more than one.
    pub(super) fn are_many(&self) -> bool {
        self.count > 1
    }

    /// The last exchange.
    pub(super) fn last(&self) -> Exchange {
        Exchange(self.count - 1)
    }

    /// The first exchange that must wait for gradients of the ones before.
    fn end_of_update(&self) -> u32 {
        self.end_of_update_after(self.backward.ended)
    }

    /// The first exchange that waits until more than `returned` have their gradients.
    pub(super) fn end_of_update_after(&self, returned: u32) -> u32 {
        (returned / self.at_once).saturating_add(1).saturating_mul(self.at_once).min(self.count)
    }

    /// Whether the next forward pass can run.
    pub(super) fn can_run_forward(&self) -> bool {
        let next = self.forward.given;
        let has_input = self.source == Source::Samples || self.inputs.contains_key(&Exchange(next));
        next < self.end_of_update() && has_input
    }

    /// Whether the input of the next forward pass is on its way.
    pub(super) fn awaits_input(&self) -> bool {
        let next = self.forward.given;
        let is_here = self.inputs.contains_key(&Exchange(next));
        self.source == Source::Upstream && next < self.end_of_update() && !is_here
    }

    /// The first exchange whose activation is lacking, as far as that is known: where all of an update are here, its last.
    pub(super) fn wanted(&self) -> Exchange {
        let mut next = Exchange(self.forward.given);
        while self.inputs.contains_key(&next) {
            next = next.next();
        }
        next.min(Exchange(self.end_of_update() - 1))
    }

    /// Whether a forward pass ended whose answer is on its way.
    pub(super) fn awaits_answer(&self) -> bool {
        let next = self.backward.given;
        let is_here = self.gradients.contains_key(&Exchange(next));
        next < self.forward.ended && self.answer == Answer::Downstream && !is_here
    }

    /// Whether the answer of the next backward pass is here, and its forward pass ended.
    pub(super) fn can_run_backward(&self) -> bool {
        let next = self.backward.given;
        let is_here = self.gradients.contains_key(&Exchange(next));
        next < self.forward.ended && (self.answer == Answer::Own || is_here)
    }

    /// Whether a backward pass follows each forward pass at once.
    pub(super) fn turn_round(&self) -> bool {
        self.answer == Answer::Own
    }

    /// Whether the only forward pass of a held-out microbatch ended, and the last stage has evaluated it.
    pub(super) fn are_evaluated(&self) -> bool {
        self.forward.ended == self.count && self.answer != Answer::Downstream
    }

    /// The exchange whose forward pass ends next.
    pub(super) fn current(&self) -> Exchange {
        Exchange(self.forward.ended)
    }

    /// The exchange whose forward pass begins next.
    pub(super) fn next(&self) -> Exchange {
        Exchange(self.forward.given)
    }

    /// Whether a forward pass began.
    pub(super) fn have_begun(&self) -> bool {
        self.forward.given > 0
    }

    /// Whether all backward passes ended.
    pub(super) fn are_over(&self) -> bool {
        self.backward.ended == self.count
    }

    /// Number of passes that the engine has.
    pub(super) fn running(&self) -> u32 {
        self.forward.running() + self.backward.running()
    }

    /// Takes an activation. Returns whether it is expected here.
    pub(super) fn receive_input(&mut self, exchange: Exchange, payload: Payload) -> bool {
        let expected = self.forward.given..self.end_of_update();
        let is_expected = self.source == Source::Upstream && expected.contains(&exchange.0);
        receive(&mut self.inputs, is_expected, exchange, payload)
    }

    /// Takes a gradient. Returns whether it is expected here.
    pub(super) fn receive_gradient(&mut self, exchange: Exchange, payload: Payload) -> bool {
        let expected = self.backward.given..self.end_of_update();
        let is_expected = self.answer == Answer::Downstream && expected.contains(&exchange.0);
        receive(&mut self.gradients, is_expected, exchange, payload)
    }

    /// The next stage has evaluated the held-out microbatch. Returns whether that was not known.
    pub(super) fn evaluate(&mut self) -> bool {
        let is_new = self.answer == Answer::Downstream;
        if is_new {
            self.answer = Answer::Evaluated;
        }
        is_new
    }

    /// The first exchange whose gradient has not arrived from the next stage.
    pub(super) fn unanswered(&self) -> Exchange {
        let mut next = Exchange(self.backward.given);
        while self.gradients.contains_key(&next) {
            next = next.next();
        }
        next
    }

    /// Whether every answer of the next stage arrived, or none is due.
    pub(super) fn are_answered(&self) -> bool {
        self.answer != Answer::Downstream || self.unanswered().0 == self.count
    }

    /// Begins the next forward pass. Returns it with the activation that it reads.
    pub(super) fn start_forward(&mut self) -> (Exchange, Option<Payload>) {
        assert!(self.can_run_forward(), "only a pass that can run begins");
        let exchange = self.forward.give();
        (exchange, self.inputs.get(&exchange).copied())
    }

    /// Begins the next backward pass. Returns it with the gradient that it reads.
    pub(super) fn start_backward(&mut self) -> (Exchange, Option<Payload>) {
        assert!(
            self.backward.given < self.forward.given,
            "a backward pass follows its forward pass"
        );
        let exchange = self.backward.give();
        (exchange, self.gradients.get(&exchange).copied())
    }

    /// A forward pass ended. Returns it with the activation that it read.
    pub(super) fn end_forward(&mut self) -> (Exchange, Option<Payload>) {
        let exchange = self.forward.end();
        (exchange, self.inputs.remove(&exchange))
    }

    /// A backward pass ended. Returns it with the gradient that it read.
    pub(super) fn end_backward(&mut self) -> (Exchange, Option<Payload>) {
        let exchange = self.backward.end();
        (exchange, self.gradients.remove(&exchange))
    }

    /// The tensors that the engine reads, and the others.
    pub(super) fn into_received(self) -> (Vec<Payload>, Vec<Payload>) {
        let given = |all: BTreeMap<Exchange, Payload>, passes: Passes| {
            let (used, waiting): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(exchange, _)| exchange.0 < passes.given);
            [used, waiting].map(|some| some.into_iter().map(|(_, payload)| payload))
        };
        let [inputs, early] = given(self.inputs, self.forward);
        let [gradients, more] = given(self.gradients, self.backward);
        (inputs.chain(gradients).collect(), early.chain(more).collect())
    }
}

/// Puts an expected tensor among those that are here, once. Returns whether it did.
fn receive(
    here: &mut BTreeMap<Exchange, Payload>,
    is_expected: bool,
    exchange: Exchange,
    payload: Payload,
) -> bool {
    let takes = is_expected && !here.contains_key(&exchange);
    if takes {
        here.insert(exchange, payload);
    }
    takes
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Bytes;

    use super::*;
    use crate::action::PayloadId;

    fn payload(id: u64) -> Payload {
        Payload { id: PayloadId(id), size: Bytes(1), hash: None, seal: None }
    }

    #[test]
    fn the_next_update_waits_for_all_gradients_of_this_one() {
        let mut middle = Exchanges::new((5, 2), false, false);
        for exchange in [1, 0] {
            assert!(middle.receive_input(Exchange(exchange), payload(exchange.into())));
        }
        assert!(!middle.receive_input(Exchange(2), payload(2)), "too early");
        for exchange in 0..2 {
            assert_eq!(
                middle.start_forward(),
                (Exchange(exchange), Some(payload(exchange.into())))
            );
            middle.end_forward();
        }
        assert!(!middle.can_run_forward() && !middle.awaits_input() && middle.awaits_answer());
        for exchange in 0..2 {
            assert!(middle.receive_gradient(Exchange(exchange), payload(9)));
            assert!(middle.can_run_backward());
            middle.start_backward();
            middle.end_backward();
        }
        assert!(middle.awaits_input());
        assert!(!middle.receive_input(Exchange(1), payload(1)), "used");
        assert!(middle.receive_input(Exchange(2), payload(2)));
        assert!(middle.can_run_forward() && !middle.are_over());
    }

    #[test]
    fn the_last_exchange_is_an_update_of_its_own() {
        let mut only = Exchanges::new((3, 2), true, true);
        for _ in 0..3 {
            assert!(only.can_run_forward());
            only.start_forward();
            only.start_backward();
            only.end_forward();
            only.end_backward();
        }
        assert!(only.are_over() && !only.can_run_forward());
    }
}
