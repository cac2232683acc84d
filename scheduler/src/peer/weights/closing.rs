//! Rounds as the weights take part in them: closes, pieces and tasks.

use shoal_protocol::ids::{ClaimKey, ContentHash, Microbatch, Stage, WeightGroup};
use shoal_protocol::message::{
    Followed, Mended, Round, RoundGroupChange, RoundGroupMember, RoundId,
};

use super::Weights;
use super::follower::{Close, StepMessage};
use super::rounds::{Piece, Received, round_of};
use crate::action::{Fault, PeerLoad, TaskResult};
use crate::peer::Out;
use crate::peer::context::Context;
use crate::peer::links::LinkEstimates;
use crate::peer::pipeline::Counted;

/// Closes.
impl Weights {
    /// A step is closed for some weights: listens to their round, or queues it until the steps before it are applied.
    /// Returns a new round that it listens to.
    pub(in crate::peer) fn handle_close(
        &mut self,
        ctx: &Context<'_>,
        (id, change, mended): (RoundId, &RoundGroupChange, Mended),
        counted: Vec<(Stage, Microbatch)>,
        hosts: impl Fn(Stage) -> bool,
        out: &mut Out,
    ) -> Option<RoundId> {
        let round = self.rounds.close(ctx, id, change, mended, out)?;
        if round.group.listeners.contains(&ctx.me()) {
            let is_hosted = ctx.config.manifest.stages_of(id.weights).any(hosts);
            return self.listen(ctx, round, is_hosted, out).then_some(id);
        }
        let close = Close { round, counted, outdated: false };
        self.queue(ctx, Followed::Own, StepMessage::Close(close), out);
        None
    }

    /// Listens to a round's result. Returns whether the round is new.
    fn listen(&mut self, ctx: &Context<'_>, round: Round, is_hosted: bool, out: &mut Out) -> bool {
        let id = round.id;
        let needed = self.migration.needs(id.weights, id.step);
        let is_old = match needed {
            Some(needed) => !needed,
            None => self.is_newcomer() && self.own.is_past(id.step),
        };
        (needed.is_some() || is_hosted) && !is_old && self.rounds.listen(ctx, round, out)
    }

    /// Takes one page of a whole round group.
    pub(in crate::peer) fn take_group_page(
        &mut self,
        ctx: &Context<'_>,
        weights: WeightGroup,
        number: u64,
        page: (u32, u32),
        members: Vec<RoundGroupMember>,
    ) {
        self.rounds.take_group_page(ctx, weights, number, page, members);
    }

    /// Repeats unanswered requests for round groups.
    pub(in crate::peer) fn repeat_group_requests(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.rounds.repeat_group_requests(ctx, out);
    }

    /// Begins this peer's part in a round, or follows its mend, with the contents of its accumulators.
    /// Returns whether the round is new. Fails where they differ from what the coordinator counted.
    pub(in crate::peer) fn begin_round(
        &mut self,
        ctx: &Context<'_>,
        close: Close,
        own: &Counted,
        out: &mut Out,
    ) -> Result<bool, Fault> {
        self.rounds.begin(ctx, close, own, out)
    }

    /// A microbatch is about to be added to a step's sums: neither its rounds nor those that wait to begin may read
    /// them until they are mended.
    pub(in crate::peer) fn sums_change(&mut self, ctx: &Context<'_>, key: ClaimKey) {
        for weights in ctx.config.manifest.groups_of(key.stage) {
            self.rounds.sums_change(key.step, weights);
            self.own.sums_change(key.step, weights);
        }
    }
}

/// Pieces and tasks.
impl Weights {
    /// Takes a piece of a round. Returns whether it completed a received result.
    #[must_use]
    pub(in crate::peer) fn receive_piece(
        &mut self,
        ctx: &Context<'_>,
        piece: Piece,
        out: &mut Out,
    ) -> bool {
        let round = round_of(&piece.tag).map(|(round, _)| round);
        let useful = round.is_some_and(|round| self.is_useful(ctx, round));
        match self.rounds.receive(ctx, piece, useful, out) {
            Received::Done => false,
            Received::Result { weights, whole } => {
                self.own.note_progress(ctx.now);
                let ongoing = self.migration.ongoing();
                if let Some(ongoing) = ongoing.filter(|one| one.weights.contains(&weights)) {
                    ongoing.follower.note_progress(ctx.now);
                }
                whole
            }
            Received::Overflow { weights } => {
                let is_fetched = ctx.is_moving_to_weights(weights);
                let of = if is_fetched { Followed::Destination } else { Followed::Own };
                self.fall_behind(ctx, of, out);
                false
            }
        }
    }

    /// Whether a piece of an unknown round may be useful. The rewind to a new era may arrive after its
    /// first pieces, and a newcomer without a start needs every step.
    fn is_useful(&self, ctx: &Context<'_>, round: RoundId) -> bool {
        if ctx.is_over() || round.era != ctx.position.era {
            return !ctx.is_over() && round.era > ctx.position.era;
        }
        if self.migration.needs(round.weights, round.step) == Some(true) {
            return true;
        }
        if self.is_newcomer() { !self.own.is_past(round.step) } else { ctx.is_open(round.step) }
    }

    /// Takes the pieces that came before the close of their round.
    pub(in crate::peer) fn take_early(&mut self, round: RoundId) -> Vec<Piece> {
        self.rounds.take_early(round)
    }

    /// A task of a round ended. Returns whether that completed a received result.
    #[must_use]
    pub(in crate::peer) fn handle_round_task(
        &mut self,
        result: TaskResult,
        links: &LinkEstimates,
        out: &mut Out,
    ) -> bool {
        self.rounds.handle_task(result, links, out)
    }

    /// Whether this member holds results of these rounds or of later attempts, so that none of them goes on.
    pub(in crate::peer) fn have_results(&self, rounds: &[(RoundId, ContentHash)]) -> bool {
        self.rounds.are_over(rounds)
    }

    /// The part of the load that the rounds know.
    pub(in crate::peer) fn load(&self) -> PeerLoad {
        PeerLoad {
            rounds: self.rounds.held(),
            heard: self.rounds.result_bytes(),
            ..PeerLoad::default()
        }
    }
}
