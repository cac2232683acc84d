//! What two members state of a tensor that one handed to the other.
//!
//! The seal of its maker says who is wrong: a maker that sealed two contents of one tensor, or a member that states
//! something which its maker did not seal. Honest members take no tensor without its maker's seal.

use shoal_protocol::ids::{ClaimKey, Member};
use shoal_protocol::message::{Evidence, Handed, InputId, Recalled};

use super::{Coordinator, Out};
use crate::coordinator::context::Context;
use crate::coordinator::work::ledger::Ledger;

/// The tensors that the member of some work took or made.
fn tensors_of(key: ClaimKey) -> impl Iterator<Item = InputId> {
    let taken = InputId { key, input: Recalled::Activation };
    let returned = key.upstream().map(|key| InputId { key, input: Recalled::Gradient });
    let made = InputId { key: key.downstream(), input: Recalled::Activation };
    let answered = InputId { key, input: Recalled::Gradient };
    [Some(taken), returned, Some(made), Some(answered)].into_iter().flatten()
}

/// Who stated something wrong of a tensor, and what shows it. Nobody while the work at one end is not done, and where the
/// tensor is of a maker that is gone, whose own inputs nobody knows.
fn judge(context: &Context, ledger: &Ledger, of: InputId) -> Option<(Member, Evidence)> {
    let (maker, by_maker) = ledger.handover(of.maker()?)?;
    let (taker, by_taker) = ledger.handover(of.key)?;
    let (made, taken) = (by_maker.made(of.input), by_taker.taken(of.input));
    let is_trained = of.key.microbatch.0 < context.config.manifest.training.microbatches;
    let hash = |handed: Option<Handed>| handed.map(|handed| handed.hash);
    // Two members that both state nothing hide it from the auditors.
    let is_due = of.input == Recalled::Activation || is_trained;
    if hash(made) == hash(taken) && (made.is_some() || !is_due) {
        return None;
    }
    let (sealer, era) = (&context.config.sealer, context.progress.era);
    let unsealed = |who: Member, stated: Option<Handed>, other: Option<Handed>| {
        Some((who, Evidence::Unsealed { of, stated, other }))
    };
    let Some(stated) = made.filter(|made| sealer.is_sealed_by(maker, era, of, made)) else {
        return unsealed(maker, made, taken);
    };
    let is_sealed = |taken: &Handed| taken.seal.era == era && sealer.is_sealed(of, taken);
    let Some(sent) = taken.filter(is_sealed) else { return unsealed(taker, taken, made) };
    (sent.seal.by == maker).then_some((maker, Evidence::Handed { of, stated, sent }))
}

impl Coordinator {
    /// Work is done: what its member states of the tensors that it took and made must be what those at the other ends
    /// state.
    pub(in crate::coordinator) fn compare_handovers(&mut self, key: ClaimKey, out: &mut Out) {
        let Self { work, context, .. } = self;
        if !context.config.manifest.audit.is_on() {
            return;
        }
        let Some(ledger) = work.ledger(key.step) else { return };
        let wrong = tensors_of(key).filter_map(|of| Some((of, judge(context, ledger, of)?)));
        let wrong: Vec<(InputId, (Member, Evidence))> = wrong.collect();
        for (of, (member, evidence)) in wrong {
            self.convict(member, (key.step, of.key.stage), evidence, out);
        }
    }

    /// A new coordinator knows all claims: compares what was stated to the one before it.
    pub(in crate::coordinator) fn compare_all_handovers(&mut self, out: &mut Out) {
        if !self.context.config.manifest.audit.is_on() {
            return;
        }
        let ledgers = self.work.ledgers();
        let finished: Vec<ClaimKey> = ledgers.flat_map(|(_, ledger)| ledger.finished()).collect();
        for key in finished {
            self.compare_handovers(key, out);
        }
    }

    /// An auditor got another input than the member that is audited states.
    pub(super) fn input_differs(&mut self, of: InputId, sent: Handed, out: &mut Out) {
        let Self { work, context, .. } = self;
        let (sealer, era) = (&context.config.sealer, context.progress.era);
        let ledger = work.ledger(of.key.step);
        let done = ledger.zip(of.maker()).and_then(|(ledger, key)| ledger.handover(key));
        let Some((maker, by_maker)) = done else { return };
        let Some(stated) = by_maker.made(of.input) else { return };
        let is_by_maker = |handed| sealer.is_sealed_by(maker, era, of, handed);
        if stated.hash != sent.hash && is_by_maker(&stated) && is_by_maker(&sent) {
            let evidence = Evidence::Handed { of, stated, sent };
            self.convict(maker, (of.key.step, of.key.stage), evidence, out);
        }
    }
}
