//! What two members state of a tensor that one handed to the other.
//!
//! The seal of its maker says who is wrong: a maker that sealed two contents of one tensor, or a member that states
//! something which its maker did not seal. Honest members take no tensor without its maker's seal.

use shoal_protocol::ids::{ClaimKey, Member};
use shoal_protocol::message::{Evidence, Handed, InputId};

use super::{Coordinator, Out};
use crate::coordinator::context::Context;
use crate::coordinator::work::ledger::Dispute;

/// Who stated something wrong, and what shows it. Nobody where the tensor is of a maker that is gone, whose own inputs
/// nobody knows.
fn judge(context: &Context, dispute: Dispute) -> Option<(Member, Evidence)> {
    let Dispute { of, made: (maker, made), taken: (taker, taken) } = dispute;
    let is_sealed = |handed: &Handed| {
        handed.seal.era == context.progress.era && context.config.sealer.is_sealed(of, handed)
    };
    let unsealed = |who: Member, stated: Option<Handed>, other: Option<Handed>| {
        Some((who, Evidence::Unsealed { of, stated, other }))
    };
    let Some(stated) = made.filter(|made| made.seal.by == maker && is_sealed(made)) else {
        return unsealed(maker, made, taken);
    };
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
        let disputes: Vec<Dispute> = ledger.disputes(key).collect();
        for dispute in disputes {
            if let Some((member, evidence)) = judge(&self.context, dispute) {
                self.convict(member, (key.step, dispute.of.key.stage), evidence, out);
            }
        }
    }

    /// A new coordinator knows all claims: compares what was stated to the one before it.
    pub(in crate::coordinator) fn compare_all_handovers(&mut self, out: &mut Out) {
        let ledgers = self.work.ledgers();
        let finished: Vec<ClaimKey> = ledgers.flat_map(|(_, ledger)| ledger.finished()).collect();
        for key in finished {
            self.compare_handovers(key, out);
        }
    }

    /// An auditor got another input than the member that is audited states.
    pub(super) fn input_differs(&mut self, of: InputId, sent: Handed, out: &mut Out) {
        let Self { work, context, .. } = self;
        let ledger = work.ledger(of.key.step);
        let Some((maker, Some(stated))) = ledger.and_then(|ledger| ledger.made(of)) else { return };
        let sealer = &context.config.sealer;
        let era = context.progress.era;
        let is_by_maker = |handed: &Handed| {
            (handed.seal.by, handed.seal.era) == (maker, era) && sealer.is_sealed(of, handed)
        };
        if stated.hash != sent.hash && is_by_maker(&stated) && is_by_maker(&sent) {
            let evidence = Evidence::Handed { of, stated, sent };
            self.convict(maker, (of.key.step, of.key.stage), evidence, out);
        }
    }
}
