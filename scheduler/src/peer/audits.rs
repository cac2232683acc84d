//! Audits at a peer: work of another replica that it computes again before the commit of its step.
//!
//! The inputs come from the output logs of the stages before and behind. While an audit computes, this peer's own sums
//! of the step are set aside, and it begins no passes of its own. So the passes, and what adds to the sums, are those of
//! any work. An audit gives way to work of its step that the loss of a member brings.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, Exchange, Member};
use shoal_protocol::message::{
    AuditId, AuditOrder, AuditedWork, FixedLoss, Handover, HandoverDigest, PeerMessage, Recalled,
    TensorTag, ToCoordinator, WorkDigest,
};
use shoal_protocol::units::{Bytes, Moment};

use super::Out;
use super::context::Context;
use super::pipeline::Pipeline;
use super::senders::{Host, Keeper, Listed};
use super::weights::Rounds;
use crate::action::{DeviceIndex, Payload, PeerAction, Task, TaskResult};

/// Orders that wait at most; the coordinator repeats others.
const WAITING: usize = 64;

/// Microbatches whose inputs are here or on their way.
const AHEAD: usize = 2;

/// Repetitions of a request for an input without an answer, after which the audit is given up.
const UNANSWERED: u32 = 8;

/// The audits that this peer was ordered to make in the present step.
#[derive(Debug, Default)]
pub(super) struct Audits {
    present: Option<Audit>,
    waiting: VecDeque<Arc<AuditOrder>>,
    /// What was found; repeated when an order is.
    found: BTreeMap<AuditId, (Arc<AuditOrder>, Option<WorkDigest>)>,
    /// A pass of an audit that was given up, and the tensors that it reads, until the engine has discarded it.
    leaving: Option<(ClaimKey, Vec<Payload>)>,
    /// Tasks that the engine has which set sums aside, put them back or print them.
    moving: u32,
}

/// An audit under way.
#[derive(Debug)]
struct Audit {
    order: Arc<AuditOrder>,
    /// The microbatch that is computed, by its place in the order.
    at: usize,
    /// Inputs that are here.
    inputs: BTreeMap<(ClaimKey, Recalled), Payload>,
    /// Inputs that were asked for.
    asked: BTreeSet<(ClaimKey, Recalled)>,
    /// When the last of them was asked for, and how often all of them were in vain.
    asked_at: Moment,
    in_vain: u32,
    /// The task that the engine has.
    running: Running,
    handover: Handover,
    loss: Option<FixedLoss>,
    digest: HandoverDigest,
}

/// What the engine does for an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Running {
    Nothing,
    Pass(ClaimKey),
    Print,
}

impl Audit {
    fn work(&self, place: usize) -> Option<(ClaimKey, AuditedWork)> {
        let work = *self.order.work.get(place)?;
        Some((self.order.id.key(work.microbatch), work))
    }

    /// An input that a microbatch has, and its holder.
    fn holder(&self, work: AuditedWork, input: Recalled) -> Option<Member> {
        let place = match input {
            Recalled::Activation => work.activation,
            Recalled::Gradient => work.gradient,
        };
        self.order.holders.get(usize::from(place?)).copied()
    }

    /// The inputs of the next microbatches that are not here, with their holders.
    fn missing(&self) -> impl Iterator<Item = (Member, ClaimKey, Recalled)> + '_ {
        let works = (self.at..self.at + AHEAD).filter_map(|place| self.work(place));
        let both = works.flat_map(|(key, work)| {
            [Recalled::Activation, Recalled::Gradient].map(|input| (key, work, input))
        });
        let wanted =
            both.filter_map(|(key, work, input)| Some((self.holder(work, input)?, key, input)));
        wanted.filter(|(_, key, input)| !self.inputs.contains_key(&(*key, *input)))
    }

    /// Asks for the missing inputs that it has not asked for.
    fn ask(&mut self, now: Moment, out: &mut Out) {
        let missing: Vec<_> = self.missing().collect();
        for (to, key, input) in missing {
            if !self.asked.insert((key, input)) {
                continue;
            }
            self.asked_at = now;
            out.push(PeerAction::Send { to, message: PeerMessage::Recall { key, input } });
        }
    }

    /// Releases an input that was used.
    fn release(&mut self, key: ClaimKey, input: Recalled, out: &mut Out) {
        let used = self.inputs.remove(&(key, input));
        out.extend(used.map(|payload| PeerAction::Release(payload.id)));
    }
}

impl Audits {
    /// The coordinator orders an audit, perhaps again.
    pub(super) fn order(&mut self, ctx: &Context<'_>, order: Arc<AuditOrder>, out: &mut Out) {
        let id = order.id;
        if id.era != ctx.position.era || id.step != ctx.version() {
            return;
        }
        if let Some((of, digest)) = self.found.get(&id)
            && *of == order
        {
            return answer(id, digest.clone(), out);
        }
        self.found.remove(&id);
        if let Some(present) = &self.present {
            if present.order == order {
                return;
            }
            // The rounds of the step are others now.
            if present.order.id == id {
                self.give_up(out);
                self.found.remove(&id);
            }
        }
        self.waiting.retain(|waiting| waiting.id != id);
        if self.waiting.len() < WAITING {
            self.waiting.push_back(order);
        }
    }

    /// Whether the engine computes for an audit, or has yet to end that: no pass of this peer's own may begin.
    pub(super) fn are_busy(&self) -> bool {
        self.present.is_some() || self.leaving.is_some() || self.moving > 0
    }

    /// Bytes of inputs that are here.
    pub(super) fn held(&self) -> Bytes {
        let inputs = self.present.iter().flat_map(|audit| audit.inputs.values());
        let leaving = self.leaving.iter().flat_map(|(_, payloads)| payloads);
        inputs.chain(leaving).map(|payload| payload.size).sum()
    }

    /// Begins the next audit when that is possible, or gives up the present one where the step has other work.
    pub(super) fn advance(
        &mut self,
        ctx: &Context<'_>,
        (pipeline, rounds): (&Pipeline, &Rounds),
        out: &mut Out,
    ) {
        // Its own sums are needed while a round goes on.
        let is_possible = |order: &AuditOrder| {
            !pipeline.jobs.has_granted(ctx.version(), order.id.stage)
                && rounds.are_over(&order.rounds)
        };
        if let Some(present) = &self.present {
            if !is_possible(&present.order) {
                self.give_up(out);
            } else {
                self.compute(pipeline, out);
            }
            return;
        }
        if self.are_busy() {
            return;
        }
        let Some(place) = self.waiting.iter().position(|order| is_possible(order)) else { return };
        let order = self.waiting.remove(place).expect("it was just found");
        let AuditId { step, stage, .. } = order.id;
        if !pipeline.hosts_at(ctx, stage, step) {
            return self.note(order, None, out);
        }
        let mut audit = Audit {
            order,
            at: 0,
            inputs: BTreeMap::new(),
            asked: BTreeSet::new(),
            asked_at: ctx.now,
            in_vain: 0,
            running: Running::Nothing,
            handover: Handover::default(),
            loss: None,
            digest: HandoverDigest::default(),
        };
        self.moving += 1;
        out.push(PeerAction::Compute(Task::SetSumsAside { step, stage }));
        audit.ask(ctx.now, out);
        self.present = Some(audit);
        self.compute(pipeline, out);
    }

    /// Gives the engine the next pass if its inputs are here.
    fn compute(&mut self, pipeline: &Pipeline, out: &mut Out) {
        let Some(audit) = &mut self.present else { return };
        if audit.running != Running::Nothing {
            return;
        }
        let Some((key, work)) = audit.work(audit.at) else {
            let AuditId { step, stage, .. } = audit.order.id;
            audit.running = Running::Print;
            self.moving += 1;
            let rounds = audit.order.rounds.clone();
            return out.push(PeerAction::Compute(Task::PrintSums { step, stage, rounds }));
        };
        let is_here =
            |input| audit.holder(work, input).is_none() || audit.inputs.contains_key(&(key, input));
        // Passes of its own work may have the same name, where it was to do it or has done it again.
        if is_here(Recalled::Activation)
            && is_here(Recalled::Gradient)
            && !pipeline.is_dropping(key)
            && !pipeline.jobs.is_open(key)
        {
            let activation = audit.inputs.get(&(key, Recalled::Activation));
            let activation = activation.map(|payload| payload.id);
            let (exchange, device) = (Exchange(0), DeviceIndex::default());
            audit.running = Running::Pass(key);
            let held_out = false;
            let task = Task::Forward { key, exchange, activation, held_out, device };
            out.push(PeerAction::Compute(task));
        }
    }

    /// The member that was asked for an input; `None` for any other, and where none is missing.
    pub(super) fn awaited(&self, from: Listed, key: ClaimKey, input: Recalled) -> Option<Keeper> {
        let audit = self.present.as_ref()?;
        let mut missing = audit.missing();
        let (asked, ..) = missing.find(|(_, of, which)| (*of, *which) == (key, input))?;
        Keeper::of(asked, from, (key, input))
    }

    /// An input arrived.
    pub(super) fn take_input(&mut self, from: Keeper, payload: Payload) {
        let audit = self.present.as_mut().expect("it was just asked for its missing inputs");
        let before = audit.inputs.insert(from.input(), payload);
        assert!(before.is_none(), "the input was missing");
        audit.in_vain = 0;
    }

    /// Asks for missing inputs again, and gives up where that is in vain.
    pub(super) fn repeat(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let Some(audit) = &mut self.present else { return };
        if audit.missing().next().is_none() || ctx.now.since(audit.asked_at) < ctx.retry() {
            return;
        }
        audit.in_vain += 1;
        if audit.in_vain > UNANSWERED {
            self.give_up(out);
        } else {
            audit.asked.clear();
            audit.ask(ctx.now, out);
        }
    }

    /// A task ended. Returns the result if it is not of an audit.
    #[must_use]
    pub(super) fn handle_task(
        &mut self,
        ctx: &Context<'_>,
        result: TaskResult,
        out: &mut Out,
    ) -> Option<TaskResult> {
        let result = self.handle_late_task(result, out)?;
        let audit = self.present.as_mut();
        match audit.filter(|audit| audit.runs(&result)) {
            None => Some(result),
            Some(audit) => {
                match result {
                    TaskResult::SumsPrinted { sums, .. } => {
                        let audit = self.present.take().expect("it runs");
                        self.note(audit.order, Some(audit.digest.with(sums)), out);
                    }
                    TaskResult::Diverged { .. } => self.give_up(out),
                    pass => audit.end_pass(ctx, pass, out),
                }
                None
            }
        }
    }

    /// A task ended that may be of an audit which was given up. Returns the result if it is not.
    #[must_use]
    pub(super) fn handle_late_task(
        &mut self,
        result: TaskResult,
        out: &mut Out,
    ) -> Option<TaskResult> {
        match &result {
            TaskResult::SumsMoved { .. } => {
                self.moving -= 1;
                return None;
            }
            TaskResult::SumsPrinted { .. } => {
                self.moving -= 1;
                return self.present.is_some().then_some(result);
            }
            _ => {}
        }
        let leaves = |(key, _): &mut (ClaimKey, _)| key_of(&result) == Some(*key);
        match result {
            TaskResult::Discarded { .. } => {
                let Some((_, payloads)) = self.leaving.take_if(leaves) else {
                    return Some(result);
                };
                out.extend(payloads.into_iter().map(|payload| PeerAction::Release(payload.id)));
            }
            _ if !self.leaving.as_mut().is_some_and(leaves) => return Some(result),
            TaskResult::Forwarded { output: made, .. }
            | TaskResult::Returned { gradient: made, .. } => {
                out.extend(made.map(|payload| PeerAction::Release(payload.id)));
            }
            _ => {}
        }
        None
    }

    /// Gives the present audit up: the engine drops what it has of it, and gets the sums back.
    pub(super) fn give_up(&mut self, out: &mut Out) {
        let Some(mut audit) = self.present.take() else { return };
        let AuditId { step, stage, .. } = audit.order.id;
        if let Running::Pass(key) = audit.running {
            let used = [Recalled::Activation, Recalled::Gradient];
            let used = used.into_iter().filter_map(|input| audit.inputs.remove(&(key, input)));
            self.leaving = Some((key, used.collect()));
            let device = DeviceIndex::default();
            out.push(PeerAction::Compute(Task::Discard { key, device }));
        }
        let unused = audit.inputs.into_values();
        out.extend(unused.map(|payload| PeerAction::Release(payload.id)));
        // Those that are being printed are put back after it.
        if audit.running != Running::Print {
            self.moving += 1;
            out.push(PeerAction::Compute(Task::PutSumsBack { step, stage }));
        }
        self.note(audit.order, None, out);
    }

    /// The step ends, or this peer's part in it: gives all audits up, and forgets what they found.
    pub(super) fn abandon_all(&mut self, out: &mut Out) {
        self.give_up(out);
        self.waiting.clear();
        self.found.clear();
    }

    /// Reports what an audit found.
    fn note(&mut self, order: Arc<AuditOrder>, digest: Option<WorkDigest>, out: &mut Out) {
        let id = order.id;
        answer(id, digest.clone(), out);
        self.found.insert(id, (order, digest));
    }
}

impl Audit {
    /// Whether a result is that of the task which the engine has.
    fn runs(&self, result: &TaskResult) -> bool {
        match self.running {
            Running::Nothing => false,
            Running::Pass(key) => key_of(result) == Some(key),
            Running::Print => matches!(result, TaskResult::SumsPrinted { .. }),
        }
    }

    /// A pass of the microbatch ended, or its sums are added: goes on with the next.
    fn end_pass(&mut self, ctx: &Context<'_>, result: TaskResult, out: &mut Out) {
        let hash = |payload: Option<Payload>| payload.and_then(|payload| payload.hash);
        let device = DeviceIndex::default();
        match result {
            TaskResult::Forwarded { key, output, loss } => {
                let activation = self.inputs.get(&(key, Recalled::Activation)).copied();
                let gradient = self.inputs.get(&(key, Recalled::Gradient)).copied();
                self.handover.activation = hash(activation);
                self.handover.output = hash(output);
                self.handover.gradient = hash(gradient);
                self.loss = loss;
                out.extend(output.map(|payload| PeerAction::Release(payload.id)));
                let (exchange, gradient) = (Exchange(0), gradient.map(|payload| payload.id));
                let task = Task::Backward { key, exchange, gradient, device };
                out.push(PeerAction::Compute(task));
            }
            TaskResult::Returned { key, gradient } => {
                self.handover.returned = hash(gradient);
                out.extend(gradient.map(|payload| PeerAction::Release(payload.id)));
                out.push(PeerAction::Compute(Task::Accumulate { key, device }));
            }
            TaskResult::Accumulated { key } => {
                self.release(key, Recalled::Activation, out);
                self.release(key, Recalled::Gradient, out);
                let handover = std::mem::take(&mut self.handover);
                self.digest.add(key.microbatch, handover, self.loss.take());
                self.at += 1;
                self.running = Running::Nothing;
                self.ask(ctx.now, out);
            }
            other => unreachable!("not of an audit: {other:?}"),
        }
    }
}

/// The work that a result of a pass is of.
fn key_of(result: &TaskResult) -> Option<ClaimKey> {
    match result {
        TaskResult::Forwarded { key, .. }
        | TaskResult::Returned { key, .. }
        | TaskResult::Accumulated { key }
        | TaskResult::Discarded { key }
        | TaskResult::Diverged { key, .. } => Some(*key),
        _ => None,
    }
}

fn answer(id: AuditId, digest: Option<WorkDigest>, out: &mut Out) {
    out.push(PeerAction::ToCoordinator(ToCoordinator::Audited { id, digest }));
}

/// A replica of the work's stage audits it: sends it the input from the output log, if it is there.
pub(super) fn send_recalled(
    pipeline: &Pipeline,
    to: Host,
    (key, input): (ClaimKey, Recalled),
    out: &mut Out,
) {
    let payload = match input {
        Recalled::Activation => {
            key.upstream().and_then(|before| pipeline.downstream.logged_output(before))
        }
        Recalled::Gradient => pipeline.jobs.logged_gradient(key.downstream()),
    };
    let tag = TensorTag::Recalled { key, input };
    let to = to.member();
    out.extend(payload.map(|payload| PeerAction::SendTensor { to, tag, payload: payload.id }));
}
