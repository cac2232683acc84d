//! Audits at a peer: work of another replica that it computes again before the commit of its step.
//!
//! The inputs come from the output logs of the stages before and behind. While an audit computes, this peer's own sums
//! of the step are set aside, and it begins no passes of its own. So the passes, and what adds to the sums, are those of
//! any work. An audit gives way to work of its step that the loss of a member brings.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Member};
use shoal_protocol::message::{
    AuditId, AuditOrder, AuditedInput, AuditedWork, Finding, FixedLoss, HandoverDigest,
    HandoverHashes, InputId, PeerMessage, Recalled, TensorTag, ToCoordinator,
};
use shoal_protocol::units::{Bytes, Moment};

use super::Out;
use super::context::Context;
use super::pipeline::Pipeline;
use super::senders::{Host, Keeper, Listed};
use super::weights::Weights;
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
    found: BTreeMap<AuditId, (Arc<AuditOrder>, Finding)>,
    /// A pass of an audit that was given up, and the tensors that it reads, until the engine has discarded it.
    leaving: Option<(ClaimKey, Vec<Payload>)>,
    /// Tasks that the engine has which set sums aside, put them back or print them.
    moving: u32,
}

/// An audit under way.
#[derive(Debug)]
struct Audit {
    order: Arc<AuditOrder>,
    /// Where it is computed.
    device: DeviceIndex,
    /// The microbatch that is computed, by its place in the order.
    at: usize,
    /// Inputs that are here.
    inputs: BTreeMap<InputId, Payload>,
    /// Inputs that were asked for.
    asked: BTreeSet<InputId>,
    /// When the last of them was asked for, and how often all of them were in vain.
    asked_at: Moment,
    in_vain: u32,
    /// The task that the engine has.
    running: Running,
    handover: HandoverHashes,
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

    /// An input of the microbatch at a place, if it has that.
    fn input(&self, place: usize, input: Recalled) -> Option<(InputId, AuditedInput)> {
        let (key, work) = self.work(place)?;
        let stated = match input {
            Recalled::Activation => work.activation,
            Recalled::Gradient => work.gradient,
        };
        Some((InputId { key, input }, stated?))
    }

    /// The inputs of a microbatch.
    fn inputs_of(&self, place: usize) -> impl Iterator<Item = (InputId, AuditedInput)> + '_ {
        let both = [Recalled::Activation, Recalled::Gradient].into_iter();
        both.filter_map(move |input| self.input(place, input))
    }

    /// The inputs of the next microbatches that are not here, with their holders and hashes.
    fn missing(&self) -> impl Iterator<Item = (Member, InputId, ContentHash)> + '_ {
        let wanted = (self.at..self.at + AHEAD).flat_map(|place| self.inputs_of(place));
        let wanted = wanted.filter(|(of, _)| !self.inputs.contains_key(of));
        wanted.filter_map(|(of, AuditedInput { holder, hash })| {
            let holder = self.order.holders.get(usize::from(holder))?;
            Some((*holder, of, hash))
        })
    }

    /// Asks for the missing inputs that it has not asked for.
    fn ask(&mut self, now: Moment, out: &mut Out) {
        let missing: Vec<_> = self.missing().collect();
        for (to, of, _) in missing {
            if self.asked.insert(of) {
                self.asked_at = now;
                let InputId { key, input } = of;
                out.push(PeerAction::Send { to, message: PeerMessage::Recall { key, input } });
            }
        }
    }

    /// Releases an input that was used.
    fn release(&mut self, of: InputId, out: &mut Out) {
        let used = self.inputs.remove(&of);
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
        if let Some((of, finding)) = self.found.get(&id)
            && *of == order
            && *finding != Finding::NotComputed
        {
            return answer(id, finding.clone(), out);
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
        (pipeline, weights): (&Pipeline, &Weights),
        out: &mut Out,
    ) {
        // Its own sums are needed while a round goes on.
        let is_possible = |order: &AuditOrder| {
            !pipeline.has_granted(ctx.version(), order.id.stage)
                && weights.have_results(&order.rounds)
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
            return self.note(order, Finding::NotComputed, out);
        }
        let mut audit = Audit {
            order,
            device: pipeline.device_for(stage),
            at: 0,
            inputs: BTreeMap::new(),
            asked: BTreeSet::new(),
            asked_at: ctx.now,
            in_vain: 0,
            running: Running::Nothing,
            handover: HandoverHashes::default(),
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
        let Some((key, _)) = audit.work(audit.at) else {
            let AuditId { step, stage, .. } = audit.order.id;
            audit.running = Running::Print;
            self.moving += 1;
            let rounds = audit.order.rounds.clone();
            return out.push(PeerAction::Compute(Task::PrintSums { step, stage, rounds }));
        };
        let is_here = audit.inputs_of(audit.at).all(|(of, _)| audit.inputs.contains_key(&of));
        // Passes of its own work may have the same name, where it was to do it or has done it again.
        if is_here && !pipeline.has_passes(key) {
            let activation = audit.inputs.get(&InputId { key, input: Recalled::Activation });
            let activation = activation.map(|payload| payload.id);
            let (exchange, device) = (Exchange(0), audit.device);
            audit.running = Running::Pass(key);
            let held_out = false;
            let task = Task::Forward { key, exchange, activation, held_out, device };
            out.push(PeerAction::Compute(task));
        }
    }

    /// The member that was asked for an input; `None` for any other, and where none is missing.
    pub(super) fn awaited(&self, from: Listed, of: InputId) -> Option<Keeper> {
        let audit = self.present.as_ref()?;
        let (asked, ..) = audit.missing().find(|(_, missing, _)| *missing == of)?;
        Keeper::of(asked, from, of)
    }

    /// An input arrived. One that is not what the member took ends the audit: whoever sealed it has sealed two.
    pub(super) fn take_input(&mut self, from: Keeper, payload: Payload, out: &mut Out) {
        let audit = self.present.as_mut().expect("it was just asked for its missing inputs");
        let of = from.input();
        let asked = audit.missing().find(|(_, missing, _)| *missing == of);
        let (.., stated) = asked.expect("it is missing");
        let sent = payload.handed().expect("unsealed tensors are refused");
        audit.inputs.insert(of, payload);
        audit.in_vain = 0;
        if sent.hash != stated {
            self.end_early(Finding::OtherInput { of, sent }, out);
        }
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
                        let digest = audit.digest.with(sums);
                        let sealer = &ctx.config.sealer;
                        let signature = sealer.sign_finding(ctx.me(), &audit.order.id, &digest);
                        self.note(audit.order, Finding::Computed { digest, signature }, out);
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

    /// Gives the present audit up.
    pub(super) fn give_up(&mut self, out: &mut Out) {
        self.end_early(Finding::NotComputed, out);
    }

    /// Ends the present audit: the engine drops what it has of it, and gets the sums back.
    fn end_early(&mut self, finding: Finding, out: &mut Out) {
        let Some(mut audit) = self.present.take() else { return };
        let AuditId { step, stage, .. } = audit.order.id;
        if let Running::Pass(key) = audit.running {
            let used = [Recalled::Activation, Recalled::Gradient];
            let used = used.map(|input| audit.inputs.remove(&InputId { key, input }));
            let used = used.into_iter().flatten();
            self.leaving = Some((key, used.collect()));
            out.push(PeerAction::Compute(Task::Discard { key, device: audit.device }));
        }
        let unused = audit.inputs.into_values();
        out.extend(unused.map(|payload| PeerAction::Release(payload.id)));
        // Those that are being printed are put back after it.
        if audit.running != Running::Print {
            self.moving += 1;
            out.push(PeerAction::Compute(Task::PutSumsBack { step, stage }));
        }
        self.note(audit.order, finding, out);
    }

    /// The step ends, or this peer's part in it: gives all audits up, and forgets what they found.
    pub(super) fn abandon_all(&mut self, out: &mut Out) {
        self.give_up(out);
        self.waiting.clear();
        self.found.clear();
    }

    /// Reports what an audit found.
    fn note(&mut self, order: Arc<AuditOrder>, finding: Finding, out: &mut Out) {
        let id = order.id;
        answer(id, finding.clone(), out);
        self.found.insert(id, (order, finding));
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
        let device = self.device;
        match result {
            TaskResult::Forwarded { key, output, loss } => {
                let input = |input| self.inputs.get(&InputId { key, input }).copied();
                let [activation, gradient] = [Recalled::Activation, Recalled::Gradient].map(input);
                self.handover.taken = [hash(activation), hash(gradient)];
                self.handover.made = [hash(output), None];
                self.loss = loss;
                out.extend(output.map(|payload| PeerAction::Release(payload.id)));
                let (exchange, gradient) = (Exchange(0), gradient.map(|payload| payload.id));
                let task = Task::Backward { key, exchange, gradient, device };
                out.push(PeerAction::Compute(task));
            }
            TaskResult::Returned { key, gradient, .. } => {
                self.handover.made[1] = hash(gradient);
                out.extend(gradient.map(|payload| PeerAction::Release(payload.id)));
                out.push(PeerAction::Compute(Task::Accumulate { key, device }));
            }
            TaskResult::Accumulated { key, broken } => {
                if broken {
                    self.loss = Some(self.loss.unwrap_or_default().of_broken());
                }
                self.release(InputId { key, input: Recalled::Activation }, out);
                self.release(InputId { key, input: Recalled::Gradient }, out);
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
        | TaskResult::Accumulated { key, .. }
        | TaskResult::Discarded { key }
        | TaskResult::Diverged { key, .. } => Some(*key),
        _ => None,
    }
}

fn answer(id: AuditId, finding: Finding, out: &mut Out) {
    out.push(PeerAction::ToCoordinator(ToCoordinator::Audited { id, finding }));
}

/// A replica of the work's stage audits it: sends it the input from the output log, if it is there.
pub(super) fn send_recalled(pipeline: &Pipeline, to: Host, of: InputId, out: &mut Out) {
    let (logged, tag) = (pipeline.logged(of), TensorTag::Recalled { key: of.key, input: of.input });
    out.extend(logged.map(|payload| PeerAction::send_tensor(to.member(), tag, &payload)));
}
