//! Audits: work that like replicas compute again before the commit of its step.
//!
//! When every member holds the results of a step, the hash of all results says whether the step is audited: nobody
//! knew it while there was work to do. Then a like replica computes each member's work again, all at the same time,
//! from the inputs in the output logs. What it comes to must be what the member stated: the hashes of what it handed
//! on, the losses, and the prints of its sums at the point that the result poses. The commit waits for that.
//!
//! Where they differ more replicas compute it (`votes`). Who states another thing than most is convicted, in the log:
//! its peer is out for good, and the run goes back to a checkpoint that nothing of its work is in.
//!
//! What two members state of a tensor that one handed to the other is compared in every step, audited or not
//! (`handovers`).

mod handovers;
mod votes;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, ContentHash, Member, PeerId, Stage, Step};
use shoal_protocol::message::{
    AuditId, AuditOrder, AuditedInput, AuditedWork, Conviction, Evidence, Finding, FromCoordinator,
    Handed, HandoverDigest, LogRecord, SignedFinding, WorkDigest,
};
use shoal_protocol::units::Moment;

use self::votes::{Ruling, Votes};
use super::context::Context;
use super::progress::Progress;
use super::rounds::{Complete, Rounds};
use super::{Coordinator, Out, Phase, event, send};
use crate::action::{AuditOutcome, CoordinatorAction, CoordinatorEvent, LossCause};
use crate::coordinator::work::ledger::{Ledger, Statement};

/// Times that a step took to be computed after which an audit of it is late.
const LATE: u32 = 3;

/// The audits of the present step.
#[derive(Debug, Default)]
pub(super) struct Audits {
    /// When the present step was opened.
    opened_at: Moment,
    /// Whether the audits are those of the results that all members hold now.
    drawn: bool,
    open: BTreeMap<(Stage, Member), Audit>,
    /// Statements of which no more is to be found out.
    closed: BTreeMap<(Stage, Member), WorkDigest>,
    /// Peers whose conviction is being appended to the log.
    convicting: BTreeSet<PeerId>,
    /// When orders without an answer are repeated.
    retry_at: Option<Moment>,
}

/// An audit of one member's work at a stage.
#[derive(Debug)]
struct Audit {
    votes: Votes,
    order: Arc<AuditOrder>,
    /// The replicas that were ordered to compute it, and until when.
    asked: BTreeMap<Member, Moment>,
    /// What they signed.
    signed: BTreeMap<Member, SignedFinding>,
}

impl Audit {
    /// Orders replicas to compute the work that were not asked.
    fn ask(&mut self, members: Vec<Member>, until: Moment, out: &mut Out) {
        for to in members {
            self.asked.entry(to).or_insert_with(|| {
                send(to, FromCoordinator::Audit(Arc::clone(&self.order)), out);
                until
            });
        }
    }

    /// What shows that a member stated or found something wrong.
    fn evidence(&self) -> Evidence {
        Evidence::Computed {
            id: self.order.id,
            stated: self.votes.statement().clone(),
            found: self.signed.values().cloned().collect(),
        }
    }
}

/// What the step's results and its ledger say.
#[derive(Debug, Clone, Copy)]
struct Inputs<'a> {
    context: &'a Context,
    rounds: &'a Rounds,
    ledger: &'a Ledger,
}

impl Inputs<'_> {
    /// Hash of the results of all rounds; `None` while some are lacking.
    fn seed(&self) -> Option<ContentHash> {
        let mut hasher = blake3::Hasher::new_derive_key("shoal audit draw v1");
        hasher.update(&self.context.progress.version.0.to_le_bytes());
        for weights in self.context.config.manifest.weight_groups() {
            hasher.update(&self.rounds.complete(weights)?.result.0);
        }
        Some(hasher.finalize().into())
    }

    /// The rounds of a stage's weight groups, all of which are complete.
    fn rounds_of(&self, stage: Stage) -> impl Iterator<Item = Complete<'_>> {
        let complete = |weights| self.rounds.complete(weights).expect("all rounds are complete");
        self.context.config.manifest.groups_of(stage).map(complete)
    }

    /// What a member states about its work at a stage.
    fn digest(&self, of: Member, stage: Stage, stated: &[Statement]) -> WorkDigest {
        let mut digest = HandoverDigest::default();
        for (microbatch, handover, loss) in stated {
            digest.add(*microbatch, (*handover).into(), *loss);
        }
        let sums = self.rounds_of(stage).filter_map(|round| {
            let mut sums = round.reports.get(&of)?.sums.iter();
            sums.find(|(at, _)| *at == stage).map(|(_, print)| *print)
        });
        digest.with(sums.collect())
    }

    /// The order to compute this work again.
    fn order(&self, of: Member, stage: Stage, stated: &[Statement]) -> AuditOrder {
        let Progress { era, term, version: step, .. } = self.context.progress;
        let id = AuditId { era, term, step, stage, of };
        let inputs = |(microbatch, handover, _): &Statement| {
            let key = id.key(*microbatch);
            [(key.upstream(), handover.activation), (Some(key.downstream()), handover.gradient)]
        };
        let holder = |key: Option<ClaimKey>| self.ledger.holder(key?);
        let holders: BTreeSet<Member> =
            stated.iter().flat_map(inputs).filter_map(|(key, _)| holder(key)).collect();
        let holders: Vec<Member> = holders.into_iter().collect();
        let input = |(key, taken): (Option<ClaimKey>, Option<Handed>)| {
            let place = holders.binary_search(&holder(key)?).ok()?;
            Some(AuditedInput { holder: u16::try_from(place).ok()?, hash: taken?.hash })
        };
        let work = |statement: &Statement| {
            let [activation, gradient] = inputs(statement).map(input);
            AuditedWork { microbatch: statement.0, activation, gradient }
        };
        let work = stated.iter().map(work).collect();
        let rounds = self.rounds_of(stage).map(|round| (round.id, round.result)).collect();
        AuditOrder { id, rounds, holders, work }
    }

    /// The replicas of a stage that compute the same bits as a member, in the order in which they audit it: each begins
    /// with another one.
    fn auditors(&self, of: Member, stage: Stage, seed: ContentHash) -> Vec<Member> {
        let members = &self.context.members;
        let replicas = members.replicas_at(stage, self.context.progress.version);
        let order = |member: &Member| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&seed.0).update(&stage.0.to_le_bytes()).update(&member.peer.0);
            *hasher.finalize().as_bytes()
        };
        let own = order(&of);
        // Who has come to serve since the step's rounds began only listens to them.
        let is_in =
            |one: &Member| self.rounds_of(stage).all(|round| round.reports.contains_key(one));
        let is_like = |one: &Member| *one != of && members.current.are_like(*one, of) && is_in(one);
        let mut others: Vec<([u8; 32], Member)> =
            replicas.iter().filter(|one| is_like(one)).map(|one| (order(one), *one)).collect();
        others.sort_unstable();
        let after = others.partition_point(|(order, _)| *order < own);
        others.rotate_left(after);
        others.into_iter().map(|(_, member)| member).collect()
    }

    /// Whether all work of a member is audited, however the step is drawn.
    fn is_on_probation(&self, member: Member) -> bool {
        let version = self.context.progress.version;
        let since = self.context.members.stays.since(member.peer, version);
        version.0 < since.0 + u64::from(self.context.config.manifest.audit.probation)
    }
}

impl Audits {
    /// A step is opened: its audits are other ones.
    pub(super) fn begin_step(&mut self, now: Moment) {
        let convicting = take(&mut self.convicting);
        *self = Self { opened_at: now, convicting, ..Self::default() };
    }

    /// The step is open again: audits of members that are gone stay, and those of others are drawn again.
    pub(super) fn reopen_step(&mut self) {
        self.drawn = false;
        self.retry_at = None;
    }

    /// When orders are repeated.
    pub(super) fn next_timeout(&self) -> Option<Moment> {
        self.retry_at
    }

    /// All members hold the results: draws the audits.
    fn draw(&mut self, inputs: &Inputs<'_>) {
        let Some(seed) = inputs.seed().filter(|_| !self.drawn) else { return };
        self.drawn = true;
        let Context { config, members, .. } = inputs.context;
        let number = u64::from_le_bytes(seed.0[..8].try_into().expect("eight bytes"));
        let all = config.manifest.audit.draws(number);
        let mut wanted: BTreeMap<(Stage, Member), Audit> = BTreeMap::new();
        // Who left meanwhile is not spared.
        for ((stage, of), mut audit) in take(&mut self.open) {
            if !members.current.contains(of) {
                audit.votes.forgive();
                audit.asked.clear();
                wanted.insert((stage, of), audit);
            }
        }
        // Most steps are not drawn, and have nothing to look through.
        let looks = all || config.manifest.audit.probation > 0;
        for stage in config.manifest.stages().filter(|_| looks) {
            for (of, stated) in inputs.ledger.stated(stage) {
                if !all && !inputs.is_on_probation(of) {
                    continue;
                }
                // What it states may name no inputs, from which nobody can compute.
                if self.convicting.contains(&of.peer) {
                    continue;
                }
                let statement = inputs.digest(of, stage, &stated);
                if self.closed.get(&(stage, of)) == Some(&statement) {
                    continue;
                }
                let auditors = inputs.auditors(of, stage, seed);
                let audit = Audit {
                    votes: Votes::new(of, statement, auditors),
                    order: Arc::new(inputs.order(of, stage, &stated)),
                    asked: BTreeMap::new(),
                    signed: BTreeMap::new(),
                };
                wanted.insert((stage, of), audit);
            }
        }
        self.open = wanted;
    }

    /// Asks for findings, and closes audits. Returns who stated what is wrong, with the stage.
    fn rule(&mut self, context: &Context, out: &mut Out) -> Verdicts {
        let (now, home) = (context.now, context.config.home);
        let took = now.since(self.opened_at);
        let patience: Duration = (took * LATE).max(context.config.patience);
        let mut verdicts = Verdicts::default();
        let Self { open, closed, .. } = self;
        open.retain(|(stage, of), audit| {
            let (stage, of) = (*stage, *of);
            let outcome = match audit.votes.ruling(home) {
                Ruling::Ask(members) => {
                    audit.ask(members, now + patience, out);
                    return true;
                }
                Ruling::AskAgain(members) => {
                    audit.asked.retain(|asked, _| !members.contains(asked));
                    audit.ask(members, now + patience, out);
                    return true;
                }
                Ruling::Sound => AuditOutcome::Sound,
                Ruling::NotAudited => AuditOutcome::NotAudited,
                Ruling::Wrong(members) => {
                    let evidence = audit.evidence();
                    let wrong = |member| (member, (stage, evidence.clone()));
                    verdicts.wrong.extend(members.into_iter().map(wrong));
                    return true;
                }
                Ruling::Unclear => {
                    verdicts.unclear.get_or_insert((of, stage));
                    return true;
                }
            };
            closed.insert((stage, of), audit.votes.statement().clone());
            event(CoordinatorEvent::Audited { of, stage, step: audit.order.id.step, outcome }, out);
            false
        });
        if self.open.is_empty() {
            self.retry_at = None;
        } else {
            self.retry_at.get_or_insert_with(|| context.retry_at());
        }
        verdicts
    }

    /// A replica's finding.
    fn find(&mut self, from: Member, id: AuditId, found: Option<SignedFinding>) {
        let audit = self.open.get_mut(&(id.stage, id.of));
        if let Some(audit) = audit.filter(|audit| audit.order.id == id)
            && audit.asked.contains_key(&from)
        {
            audit.votes.find(from, found.as_ref().map(|found| found.digest.clone()));
            if let Some(found) = found {
                audit.signed.entry(from).or_insert(found);
            }
        }
    }

    /// Repeats orders without an answer; those that are late, or of members that are gone, go to others.
    fn retry(&mut self, context: &Context, out: &mut Out) {
        self.retry_at = Some(context.retry_at());
        for audit in self.open.values_mut() {
            for (to, until) in &audit.asked {
                if !audit.votes.lacks(*to) {
                    continue;
                }
                if context.now >= *until || !context.members.current.contains(*to) {
                    audit.votes.find(*to, None);
                } else {
                    send(*to, FromCoordinator::Audit(Arc::clone(&audit.order)), out);
                }
            }
        }
    }

    /// A peer is convicted: neither an audit of its work nor its word on others' is of use any more.
    fn forget(&mut self, peer: PeerId) {
        self.convicting.remove(&peer);
        self.open.retain(|(_, of), _| of.peer != peer);
        for audit in self.open.values_mut() {
            audit.votes.forget(peer);
        }
    }
}

/// What audits show.
#[derive(Debug, Default)]
struct Verdicts {
    /// Who stated or found what is wrong, at which stage, and what shows it.
    wrong: BTreeMap<Member, (Stage, Evidence)>,
    /// Whose work nobody can judge.
    unclear: Option<(Member, Stage)>,
}

impl Coordinator {
    /// All members hold the results of the step. Returns whether it may be committed: nothing of it is being audited.
    pub(super) fn are_audits_closed(&mut self, out: &mut Out) -> bool {
        if !self.context.config.manifest.audit.is_on() {
            return true;
        }
        let Self { audits, rounds, work, context, .. } = self;
        let ledger = work.ledger(context.progress.version).expect("a closed step has a ledger");
        audits.draw(&Inputs { context, rounds, ledger });
        let verdicts = audits.rule(context, out);
        if !audits.open.is_empty() {
            rounds.await_audits();
        }
        if let Some((of, stage)) = verdicts.unclear {
            let step = self.context.progress.version.next();
            let reason = format!(
                "another replica of stage {stage} came to another result of the work of {of} in step {step}, and no \
                 third one is like them: check both machines with `shoal doctor`, and start again with three"
            );
            self.stop(reason, out);
            return false;
        }
        let step = self.context.progress.version;
        for (member, (stage, evidence)) in verdicts.wrong {
            self.convict(member, (step, stage), evidence, out);
        }
        self.audits.open.is_empty() && self.audits.convicting.is_empty()
    }

    /// A member's work is wrong: appends that to the log.
    fn convict(
        &mut self,
        member: Member,
        (step, stage): (Step, Stage),
        evidence: Evidence,
        out: &mut Out,
    ) {
        let peer = member.peer;
        if member == self.context.config.home {
            let reason = format!(
                "this machine's work of step {} at stage {stage} is wrong: it {}. Check its memory and its device, \
                 and start the run on another machine",
                step.next(),
                evidence.charge()
            );
            return self.stop(reason, out);
        }
        if !self.audits.convicting.insert(peer) {
            return;
        }
        let back = self.context.members.stays.since(peer, step);
        let conviction = Conviction { peer, step, stage, back, evidence };
        out.push(CoordinatorAction::Append(LogRecord::Convicted(Box::new(conviction))));
    }

    /// A conviction is in the log: the peer is out, and the run goes back to before its work.
    pub(super) fn convicted(&mut self, conviction: Box<Conviction>, out: &mut Out) {
        let Conviction { peer, back, .. } = *conviction;
        self.context.members.stays.convict(&conviction);
        event(CoordinatorEvent::Convicted(conviction), out);
        self.audits.forget(peer);
        if let Some(member) = self.context.members.current.member_of(peer) {
            self.member_lost(member, LossCause::Convicted, out);
        }
        // Even where nothing of it is committed, the present step has what others made of what it handed on.
        self.context.progress.taint(back);
        self.weights.forget_after(back);
        self.go_back(out);
    }

    /// A replica answers what became of an audit.
    pub(super) fn audited(&mut self, from: Member, id: AuditId, finding: Finding, out: &mut Out) {
        let found = match finding {
            Finding::Computed { digest, signature } => {
                let sealer = &self.context.config.sealer;
                let is_signed = sealer.is_finding(from, (&id, &digest), &signature);
                is_signed.then_some(SignedFinding { by: from, digest, signature })
            }
            Finding::OtherInput { of, sent } => {
                self.input_differs(of, sent, out);
                None
            }
            Finding::NotComputed => None,
        };
        self.audits.find(from, id, found);
        self.commit_when_reduced(out);
    }

    /// Repeats orders, and goes on without late answers.
    pub(super) fn retry_audits(&mut self, out: &mut Out) {
        let due = self.audits.retry_at.is_some_and(|at| self.context.now >= at);
        if due && matches!(self.context.progress.phase, Phase::Closing) {
            self.audits.retry(&self.context, out);
            self.commit_when_reduced(out);
        }
    }
}
