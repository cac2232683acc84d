//! No member gives up a committed result whose pieces all arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{Member, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{CommitRecord, Round, RoundId};

use crate::round::Layout;
use crate::round::RoundCut;
use crate::sim::scenario::Scenario;

/// Results in transit.
#[derive(Debug)]
pub(in crate::sim) struct Results {
    manifest: Arc<Manifest>,
    parameters: BTreeMap<WeightGroup, usize>,
    cut: RoundCut,
    codec: SumCodec,
    /// Each round after its latest mend, and its layout.
    rounds: BTreeMap<RoundId, (Round, Layout)>,
    received: BTreeMap<(Member, RoundId), BTreeSet<u32>>,
    /// The rounds that the last commit of a step names.
    named: BTreeMap<Step, Vec<RoundId>>,
    /// Results that were given up: a new coordinator receives the report again.
    given_up: BTreeSet<(Member, Step)>,
}

impl Results {
    pub(in crate::sim) fn new(scenario: &Scenario) -> Self {
        Self {
            manifest: Arc::clone(&scenario.manifest),
            parameters: scenario.parameters.clone(),
            cut: scenario.peers[0].limits.cut,
            codec: scenario.manifest.codec.all_reduce,
            rounds: BTreeMap::new(),
            received: BTreeMap::new(),
            named: BTreeMap::new(),
            given_up: BTreeSet::new(),
        }
    }

    /// The coordinator began a round.
    pub(in crate::sim) fn closed(&mut self, round: &Round) {
        let elements = self.parameters[&round.id.weights];
        let layout = match self.rounds.get(&round.id) {
            Some((known, _)) if known.mended.mend == round.mended.mend => return,
            Some((known, layout)) => layout.mended(known, round),
            None => Layout::new(round, elements, self.cut, self.codec),
        };
        self.rounds.insert(round.id, (round.clone(), layout));
    }

    /// A piece arrived at a member that knows its round.
    pub(in crate::sim) fn received(&mut self, to: Member, round: RoundId, piece: u32) {
        self.received.entry((to, round)).or_default().insert(piece);
    }

    /// A step was committed.
    pub(in crate::sim) fn committed(&mut self, record: &CommitRecord) {
        let (era, term, step) = (record.era, record.term, record.step);
        let rounds = (0..).map(WeightGroup).zip(&record.rounds);
        let rounds = rounds.map(|(weights, (attempt, _))| RoundId {
            era,
            term,
            step,
            weights,
            attempt: *attempt,
        });
        self.named.insert(step, rounds.collect());
    }

    /// A member that hosts these stages gives up a step's result.
    pub(in crate::sim) fn given_up(
        &mut self,
        member: Member,
        span: StageSpan,
        step: Step,
    ) -> Result<(), String> {
        let named = self.named.get(&step).into_iter().flatten();
        let hosts = |round: &&RoundId| {
            self.manifest.stages_of(round.weights).any(|stage| span.contains(stage))
        };
        let lacks = named.filter(hosts).any(|round| {
            let received = self.received.get(&(member, *round));
            self.rounds.get(round).is_none_or(|(_, layout)| {
                !layout
                    .numbers()
                    .all(|piece| received.is_some_and(|received| received.contains(&piece)))
            })
        });
        let again = !self.given_up.insert((member, step));
        if lacks || again {
            Ok(())
        } else {
            Err(format!("{member} gave up the result of step {step}, which it has"))
        }
    }
}
