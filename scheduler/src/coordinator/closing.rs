//! The end of a step: all-reduce and commit.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Attempt, Era, Member, Microbatch, Stage, Step};
use shoal_protocol::message::{
    CommitRecord, FixedLoss, FromCoordinator, LogRecord, Round, RoundId, RoundMember, RoundOutcome,
};

use super::{Coordinator, Out, Phase, event};
use crate::action::{CoordinatorAction, CoordinatorEvent};
use crate::round::proof_of;

/// The rounds of a closed step.
#[derive(Debug)]
pub(super) struct Closing {
    rounds: BTreeMap<Stage, OpenRound>,
    loss: FixedLoss,
    held_out_loss: Option<FixedLoss>,
}

#[derive(Debug)]
struct OpenRound {
    round: Round,
    /// The sum of the tags of the whole batch.
    proof: u64,
    /// What its members came to.
    outcomes: BTreeMap<Member, RoundOutcome>,
}

impl Coordinator {
    /// Everything is done: every replica hears what its accumulator must hold.
    pub(super) fn close_step(&mut self, out: &mut Out) {
        let step = self.version;
        let ledger = &self.work.ledgers[&step];
        let mut rounds = BTreeMap::new();
        for (stage, members) in self.replicas() {
            let id = RoundId {
                era: self.config.era,
                term: self.config.term,
                step,
                stage,
                attempt: Attempt(0),
            };
            let members = members
                .into_iter()
                .map(|member| {
                    let counted = ledger.counted_by(stage, member);
                    RoundMember { member, counted, weight: 1 }
                })
                .collect();
            let round = Round { id, members };
            for part in &round.members {
                let message = FromCoordinator::Close(round.clone());
                out.push(CoordinatorAction::Send { to: part.member, message });
            }
            let batch = (0..self.config.manifest.training.microbatches).map(Microbatch);
            let proof = proof_of(step, stage, batch);
            rounds.insert(stage, OpenRound { round, proof, outcomes: BTreeMap::new() });
        }
        let (loss, held_out_loss) = ledger.losses();
        self.phase = Phase::Closing(Closing { rounds, loss, held_out_loss });
        self.announce_step(step.next(), out);
    }

    /// A member holds a result. When all do, and the same, the step's last word goes into the log.
    pub(super) fn reduced(
        &mut self,
        from: Member,
        round: RoundId,
        outcome: RoundOutcome,
        out: &mut Out,
    ) {
        let Phase::Closing(closing) = &mut self.phase else { return };
        let Some(open) = closing.rounds.get_mut(&round.stage) else { return };
        if open.round.id != round || !open.round.members.iter().any(|part| part.member == from) {
            return;
        }
        if outcome.proof != open.proof {
            let reason = format!(
                "{from} proves {:#018x} instead of {:#018x} for step {}, stage {}: a microbatch \
                 was lost or counted twice",
                outcome.proof, open.proof, round.step, round.stage
            );
            return self.stop(reason, out);
        }
        let differs = open.outcomes.values().any(|other| !equal_bits(other, &outcome));
        if differs {
            let reason = format!(
                "the replicas of stage {} came to different results in step {}",
                round.stage, round.step
            );
            return self.stop(reason, out);
        }
        open.outcomes.insert(from, outcome);
        let whole = |open: &OpenRound| open.outcomes.len() == open.round.members.len();
        if closing.rounds.values().all(whole) {
            let record = commit_record(closing, self.config.era, self.version);
            self.phase = Phase::Committing;
            out.push(CoordinatorAction::Append(LogRecord::Commit(record)));
        }
    }

    /// The step's last word is down for good: everybody applies it.
    pub(super) fn committed(&mut self, record: CommitRecord, out: &mut Out) {
        assert!(matches!(self.phase, Phase::Committing), "only a closed step is committed");
        assert_eq!(record.step, self.version, "steps are committed one after the other");
        self.version = self.version.next();
        self.tell_all(&FromCoordinator::Commit(record.clone()), out);
        let repeated = self.work.close_books(record.step);
        event(CoordinatorEvent::Committed { record, repeated }, out);
        let every = self.config.manifest.checkpoint.every;
        if self.is_last_version() {
            self.phase = Phase::Saving;
            self.start_checkpoint(out);
        } else {
            if every > 0 && self.version.0.is_multiple_of(every) {
                self.start_checkpoint(out);
            }
            self.open_step(out);
        }
    }
}

fn equal_bits(one: &RoundOutcome, other: &RoundOutcome) -> bool {
    one.hash == other.hash
        && one.proof == other.proof
        && one.square_norm.to_bits() == other.square_norm.to_bits()
}

/// The norm over all stages is the root of the sum of their squares, added in order of stages.
fn commit_record(closing: &Closing, era: Era, step: Step) -> CommitRecord {
    let stages: Vec<(Attempt, RoundOutcome)> = closing
        .rounds
        .values()
        .map(|open| {
            let outcome = open.outcomes.values().next().expect("a round has members");
            (open.round.id.attempt, *outcome)
        })
        .collect();
    let gradient_norm =
        stages.iter().fold(0.0, |sum, (_, outcome)| sum + outcome.square_norm).sqrt();
    let Closing { loss, held_out_loss, .. } = *closing;
    CommitRecord { era, step, stages, gradient_norm, loss, held_out_loss }
}
