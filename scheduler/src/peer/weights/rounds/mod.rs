//! Rounds: the all-reduces in which this peer takes part, and those whose results it receives.

mod early;
mod groups;
mod listener;
mod received_result;

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ContentHash, Era, Member, Microbatch, Stage, Step, WeightGroup};
use shoal_protocol::message::{
    CommitRecord, Mended, Round, RoundGroupChange, RoundGroupMember, RoundId, RoundMember,
    RoundOutcome, TensorTag, ToCoordinator,
};
use shoal_protocol::units::Bytes;

use self::early::EarlyPieces;
pub(in crate::peer) use self::early::Piece;
pub(super) use self::early::round_of;
use self::groups::RoundGroups;
use self::listener::RoundListener;
use crate::action::{Fault, PeerAction, PeerEvent, TaskResult};
use crate::peer::config::PeerConfig;
use crate::peer::context::Context;
use crate::peer::links::LinkEstimates;
use crate::peer::pipeline::Counted;
use crate::peer::senders::Host;
use crate::peer::weights::follower::Close;
use crate::peer::{Out, report_invalid, report_unentitled};
use crate::round::{
    AHEAD, Layout, Reduction, ahead, is_next, most_ahead, packed, piece_bytes, place_in,
};

/// The rounds of the hosted stages' weights.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// The last round of each weight group, until its step is committed.
    running: BTreeMap<WeightGroup, Reduction>,
    /// Aborted rounds of which the engine still has tasks.
    ended: Vec<Reduction>,
    early: EarlyPieces,
    groups: RoundGroups,
    listener: RoundListener,
}

/// The consequence of a received piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// Nothing follows.
    Done,
    /// A piece of a received result arrived.
    Result { weights: WeightGroup, whole: bool },
    /// A received result exceeds the limits: this peer cannot follow the weights.
    Overflow { weights: WeightGroup },
}

/// The results that a commit names, as far as they are here.
pub(super) enum Results {
    /// Every result is the named one: those of these rounds.
    Here(Vec<RoundId>),
    /// A piece must arrive, or a whole result is unknown here.
    Missing,
    /// The engine must assemble a result.
    Assembling,
    /// A result differs from the named one.
    Differ,
}

/// Groups and attempts.
impl Rounds {
    /// Applies the close of a round. Returns the round once its whole group is known.
    pub(super) fn close(
        &mut self,
        ctx: &Context<'_>,
        id: RoundId,
        change: &RoundGroupChange,
        mended: Mended,
        out: &mut Out,
    ) -> Option<Round> {
        if !ctx.config.manifest.has_weights(id.weights) {
            return None;
        }
        let group = self.groups.apply(ctx.now, ctx.retry(), id, change, out)?;
        Some(Round { id, group, mended })
    }

    /// Takes one page of a whole group.
    pub(super) fn take_group_page(
        &mut self,
        ctx: &Context<'_>,
        weights: WeightGroup,
        number: u64,
        page: (u32, u32),
        members: Vec<RoundGroupMember>,
    ) {
        if ctx.config.manifest.has_weights(weights) {
            self.groups.take_page(weights, number, page, members);
        }
    }

    /// Repeats unanswered requests for groups.
    pub(super) fn repeat_group_requests(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let open = (ctx.position.era, ctx.version());
        self.groups.repeat_requests(ctx.now, ctx.retry(), open, out);
    }

    /// Begins this peer's part in a round, or follows its mend, with the contents of its accumulators.
    /// Returns whether the round is new. Fails where they differ from what the coordinator counted.
    pub(super) fn begin(
        &mut self,
        ctx: &Context<'_>,
        close: Close,
        own: &Counted,
        out: &mut Out,
    ) -> Result<bool, Fault> {
        let Close { round, counted, outdated } = close;
        let id = round.id;
        let known = self.running.get(&id.weights).map(Reduction::round);
        if place_in(&round, ctx.me()).is_none() || !is_next(known, &round) {
            return Ok(false);
        }
        let expected: BTreeSet<(Stage, Microbatch)> = counted.into_iter().collect();
        let missing = expected.difference(&own.microbatches).count();
        let surplus = own.microbatches.difference(&expected).count();
        if missing > 0 || surplus > 0 && !outdated {
            return Err(Fault::AccumulatorDiffers { round: id, missing, surplus });
        }
        let begun = match self.running.get_mut(&id.weights).filter(|known| known.round().id == id) {
            Some(known) => known.go_on(round, own.proof, outdated, out),
            None => self.begin_attempt(ctx, round, (own.proof, outdated), out),
        };
        refuse_faulty(id, None, begun, out);
        Ok(true)
    }

    /// Begins this peer's part in a new attempt.
    fn begin_attempt(
        &mut self,
        ctx: &Context<'_>,
        round: Round,
        (own_proof, sums_change): (u64, bool),
        out: &mut Out,
    ) -> Result<(), Fault> {
        let weights = round.id.weights;
        let whole_proof = ctx.config.manifest.whole_proof(round.id.step, weights);
        let layout = layout_of(ctx.config, &round);
        let piece = largest_piece(ctx.config);
        let most = most_ahead(piece, ctx.config.limits.round_bytes, round.group.members.len());
        let link = |part: &RoundMember| ctx.links.get(part.member.peer);
        let piece = packed(piece, ctx.config.manifest.codec.all_reduce);
        let ahead = round.group.members.iter().map(|part| ahead(piece, most, link(part))).collect();
        let mut reduction = Reduction::new(round, ctx.me(), layout, ahead, own_proof, whole_proof)
            .expect("this peer is a member of the round");
        if sums_change {
            reduction.sums_change();
        }
        let started = reduction.start(out);
        if let Some(old) = self.running.insert(weights, reduction) {
            self.abort(old, out);
        }
        started
    }

    /// Listens to a round, or follows its mend. Returns whether the round is new.
    pub(super) fn listen(&mut self, ctx: &Context<'_>, round: Round, out: &mut Out) -> bool {
        let proof = ctx.config.manifest.whole_proof(round.id.step, round.id.weights);
        self.listener.listen(round, |round| layout_of(ctx.config, round), proof, out)
    }

    /// A microbatch is about to be added to a step's sums: a round of them must not read them.
    pub(super) fn sums_change(&mut self, step: Step, weights: WeightGroup) {
        let round = self.running.get_mut(&weights);
        if let Some(round) = round.filter(|known| known.round().id.step == step) {
            round.sums_change();
        }
    }

    /// Ends this peer's part in all rounds.
    pub(super) fn abort_all(&mut self, out: &mut Out) {
        for round in std::mem::take(&mut self.running).into_values() {
            self.abort(round, out);
        }
    }

    fn abort(&mut self, mut round: Reduction, out: &mut Out) {
        round.abort(out);
        if round.is_busy() {
            self.ended.push(round);
        }
    }
}

/// Pieces and tasks.
impl Rounds {
    /// Takes a piece of a round. A piece of an unknown round is kept if it is `useful` later.
    pub(super) fn receive(
        &mut self,
        ctx: &Context<'_>,
        Piece { from, tag, payload }: Piece,
        useful: bool,
        out: &mut Out,
    ) -> Received {
        let Some((id, mend)) = round_of(&tag) else { return Received::Done };
        if self.listener.expects(id, mend) {
            if !matches!(tag, TensorTag::RoundResult { .. }) {
                out.push(PeerAction::Release(payload.id));
                return Received::Done;
            }
            if self.result_bytes() + payload.size > ctx.config.limits.heard {
                out.push(PeerAction::Release(payload.id));
                return Received::Overflow { weights: id.weights };
            }
            let whole = self.listener.receive(from, tag, payload, out);
            return Received::Result { weights: id.weights, whole };
        }
        let is_known = |known: &Round| known.id == id && known.mended.mend >= mend;
        let known = self.running.get_mut(&id.weights).filter(|known| is_known(known.round()));
        let Some(reduction) = known else {
            return self.keep_early(ctx, id, Piece { from, tag, payload }, useful, out);
        };
        let taken = match tag {
            TensorTag::RoundPart { piece, proof, .. } => {
                reduction.part((from, mend), piece, proof, payload, out)
            }
            TensorTag::RoundResult { piece, proof, .. } => {
                reduction.result(from, piece, proof, payload, out)
            }
            TensorTag::Activation { .. }
            | TensorTag::ActivationGradient { .. }
            | TensorTag::Recalled { .. } => Ok(()),
        };
        // Whoever reduces a piece checks the parts of it.
        let owner = matches!(tag, TensorTag::RoundResult { .. }).then_some(from);
        refuse_faulty(id, owner, taken, out);
        Received::Done
    }

    /// Keeps a piece of a round that is not known yet, or releases it.
    fn keep_early(
        &mut self,
        ctx: &Context<'_>,
        id: RoundId,
        piece: Piece,
        useful: bool,
        out: &mut Out,
    ) -> Received {
        let closed = self.running.get(&id.weights).is_some_and(|known| known.round().id > id);
        if !useful || closed || !ctx.may_host(id.weights) {
            out.push(PeerAction::Release(piece.payload.id));
            return Received::Done;
        }
        let from = piece.from;
        let stages = || ctx.config.manifest.stages_of(id.weights);
        let is_host = |member| Host::of(ctx.view, member, stages()).is_some();
        let left = ctx.config.limits.heard - self.result_bytes();
        let most = (largest_early(ctx.config), self.early.results() + left);
        if self.early.keep(piece, is_host, most, out) {
            return Received::Done;
        }
        if !is_host(from) {
            report_unentitled(from, "a piece of a round", out);
            return Received::Done;
        }
        // No member waits for a listener, which can start over.
        if !ctx.is_serving || ctx.is_moving_to_weights(id.weights) {
            return Received::Overflow { weights: id.weights };
        }
        report_invalid(from, "more pieces than a round has", out);
        Received::Done
    }

    /// Takes the early pieces of a round.
    pub(super) fn take_early(&mut self, round: RoundId) -> Vec<Piece> {
        self.early.take(round)
    }

    /// A task of a round ended. Returns whether that completed a received result.
    #[must_use]
    pub(super) fn handle_task(
        &mut self,
        result: TaskResult,
        links: &LinkEstimates,
        out: &mut Out,
    ) -> bool {
        let round = match &result {
            TaskResult::Exported { round, .. }
            | TaskResult::Reduced { round, .. }
            | TaskResult::Installed { round, .. }
            | TaskResult::Summarised { round, .. } => *round,
            other => unreachable!("not of a round: {other:?}"),
        };
        if self.listener.knows(round) {
            return self.listener.handle_task(result, out);
        }
        let known = self.running.values_mut().chain(&mut self.ended);
        let reduction = known
            .into_iter()
            .find(|known| known.round().id == round)
            .expect("rounds stay until all their tasks are done");
        match result {
            TaskResult::Exported { to, piece, payload, .. } => {
                reduction.exported(to, piece, payload, out);
            }
            TaskResult::Reduced { piece, payload, .. } => reduction.reduced(piece, payload, out),
            TaskResult::Installed { range, .. } => reduction.installed(&range, out),
            TaskResult::Summarised { hash, square_norm, checks, sums, .. } => {
                if let Some(outcome) = reduction.summarised((hash, square_norm), checks, sums) {
                    out.push(report_of(reduction, outcome, links));
                }
            }
            _ => {}
        }
        self.ended.retain(Reduction::is_busy);
        false
    }

    /// Whether this member holds results of these rounds or of later attempts, so that none of them goes on.
    pub(super) fn are_over(&self, rounds: &[(RoundId, ContentHash)]) -> bool {
        let is_over = |(round, _): &(RoundId, ContentHash)| {
            let known = self.running.get(&round.weights);
            known.is_some_and(|known| {
                known.round().id.step == round.step && known.outcome().is_some()
            })
        };
        rounds.iter().all(is_over)
    }

    /// Bytes of other members' sums.
    pub(super) fn held(&self) -> Bytes {
        let rounds = self.running.values().chain(&self.ended);
        rounds.map(Reduction::held).sum::<Bytes>() + self.early.parts()
    }

    /// Bytes of received results.
    pub(super) fn result_bytes(&self) -> Bytes {
        self.listener.held() + self.early.results()
    }
}

/// Outcomes.
impl Rounds {
    /// Repeats the outcomes of rounds that no commit followed yet.
    pub(super) fn repeat_outcomes(&self, links: &LinkEstimates, out: &mut Out) {
        for reduction in self.running.values() {
            if let Some(outcome) = reduction.outcome() {
                out.push(report_of(reduction, outcome, links));
            }
        }
    }

    /// Looks up the results that a commit names for these weights. Received ones are assembled.
    pub(super) fn results(
        &mut self,
        record: &CommitRecord,
        weights: &BTreeSet<WeightGroup>,
        out: &mut Out,
    ) -> Results {
        let (mut rounds, mut missing, mut assembling) = (Vec::new(), false, false);
        for weights in weights.iter().copied() {
            let Some((_, named)) = record.rounds.get(usize::from(weights.0)) else {
                return Results::Differ;
            };
            let own = self.running.get(&weights).filter(|own| is_named(own.round(), record));
            let found = match own {
                Some(own) => Some((own.round().id, own.outcome())),
                None => self.received_result(record, weights, out),
            };
            match found {
                Some((round, Some(outcome))) if outcome == *named => rounds.push(round),
                Some((_, Some(_))) => return Results::Differ,
                Some((_, None)) => assembling = true,
                None => missing = true,
            }
        }
        match (missing, assembling) {
            (true, _) => Results::Missing,
            (false, true) => Results::Assembling,
            (false, false) => Results::Here(rounds),
        }
    }

    /// The received result that a commit names for some weights, once it is whole: its round, and its outcome
    /// once the engine assembled it.
    fn received_result(
        &mut self,
        record: &CommitRecord,
        weights: WeightGroup,
        out: &mut Out,
    ) -> Option<(RoundId, Option<RoundOutcome>)> {
        let place = (record.step, weights);
        let result = self.listener.result_of(place, |round| is_named(round, record))?;
        if !result.is_whole() {
            return None;
        }
        result.install(out);
        Some((result.round().id, result.outcome()))
    }

    /// Whether the engine has tasks of a received result.
    pub(super) fn is_assembling(&self) -> bool {
        self.listener.is_busy()
    }

    /// Whether pieces of these members are still to come, of the received results that the filter selects.
    pub(super) fn awaits(
        &self,
        members: &BTreeSet<Member>,
        selects: impl Fn(Step, WeightGroup) -> bool,
    ) -> bool {
        self.listener.awaits(members, selects)
    }

    /// Discards all received results.
    pub(super) fn forget_results(&mut self, out: &mut Out) {
        self.listener.forget(|_, _| true, out);
    }

    /// Discards the received results of the steps up to this one, except those for a migration.
    pub(super) fn forget_results_through(&mut self, ctx: &Context<'_>, step: Step, out: &mut Out) {
        let keeps = |weights| ctx.is_moving_to_weights(weights);
        self.listener.forget(|of, weights| of <= step && !keeps(weights), out);
    }

    /// Discards the received results of some weights, of the steps up to this one.
    pub(super) fn forget_results_of(
        &mut self,
        weights: &BTreeSet<WeightGroup>,
        step: Step,
        out: &mut Out,
    ) {
        self.listener.forget(|of, known| of <= step && weights.contains(&known), out);
    }

    /// Releases the early pieces of some weights.
    pub(super) fn drop_early_of(&mut self, weights: &BTreeSet<WeightGroup>, out: &mut Out) {
        weights.iter().for_each(|weights| self.early.drop_of(*weights, out));
    }

    /// Releases the early pieces of earlier eras.
    pub(super) fn drop_early_before(&mut self, era: Era, out: &mut Out) {
        self.early.drop_before(era, out);
    }

    /// Releases the early pieces of the steps up to this one, in this era and earlier ones.
    pub(super) fn drop_early_through(&mut self, era: Era, step: Step, out: &mut Out) {
        self.early.drop_through(era, step, out);
    }
}

/// Whether a commit names this attempt of a round.
fn is_named(round: &Round, record: &CommitRecord) -> bool {
    let named = record.rounds.get(usize::from(round.id.weights.0));
    named.is_some_and(|(attempt, _)| *attempt == round.id.attempt) && round.id.term == record.term
}

/// The division of a round's vector into pieces.
fn layout_of(config: &PeerConfig, round: &Round) -> Layout {
    let elements = config.parameters[&round.id.weights];
    Layout::new(round, elements, config.limits.cut, config.manifest.codec.all_reduce)
}

/// The size of a member's sums in one piece of a round, at most.
fn largest_piece(config: &PeerConfig) -> Bytes {
    piece_bytes(config.limits.cut, config.manifest.codec.all_reduce)
}

/// The size of one member's sums that may arrive before the close of their rounds: pieces up to its own
/// limit, for two steps and two attempts of every weight group.
fn largest_early(config: &PeerConfig) -> Bytes {
    let window = largest_piece(config).0 * u64::from(AHEAD);
    Bytes(window * 4 * config.parameters.len() as u64)
}

/// Refuses a round that would not count every microbatch once.
fn refuse_faulty(round: RoundId, owner: Option<Member>, taken: Result<(), Fault>, out: &mut Out) {
    let Err(fault) = taken else { return };
    let reason = fault.to_string();
    out.push(PeerAction::Event(PeerEvent::Fault(fault)));
    out.push(PeerAction::ToCoordinator(ToCoordinator::RoundRefused { round, owner, reason }));
}

/// The report of a round's outcome, with the measured rates of the links to its members.
fn report_of(reduction: &Reduction, outcome: RoundOutcome, links: &LinkEstimates) -> PeerAction {
    let (round, checks) = (reduction.round(), reduction.checks().to_vec());
    let places = (0..).zip(&round.group.members);
    let rates =
        places.filter_map(|(place, part)| Some((place, links.rate(part.member.peer)?))).collect();
    let (round, mend, sums) = (round.id, round.mended.mend, reduction.sums().to_vec());
    PeerAction::ToCoordinator(ToCoordinator::Reduced { round, mend, outcome, checks, sums, rates })
}
