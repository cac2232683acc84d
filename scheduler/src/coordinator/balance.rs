//! Keeping the stages equally fast: every so often they are compared, and who is of more use elsewhere
//! moves.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::message::MemberRecord;
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, Phase};
use crate::rebalance::{self, Rebalance, Replica};

/// When the stages are compared.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Next.
    pub(super) at: Option<Moment>,
    /// How often they were.
    looks: u64,
}

impl Coordinator {
    /// Compares the stages when it is time to, and has members move where that pays.
    pub(super) fn balance(&mut self, out: &mut Out) {
        let Some(every) = self.config.rebalance.every() else { return };
        let due = *self.balance.at.get_or_insert(self.now + every);
        let trains = matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing);
        if self.now < due {
            return;
        }
        self.balance.at = Some(self.now + every);
        self.balance.looks += 1;
        // A move that began shortly before the end would come to nothing.
        let last = self.version.next().0 >= self.config.manifest.training.steps;
        if !trains || last || self.is_expelling() {
            return;
        }
        let moves = match self.config.rebalance {
            Rebalance::Never => Vec::new(),
            Rebalance::When { gain, .. } => self.useful_moves(gain),
            Rebalance::Restless { .. } => self.any_move().into_iter().collect(),
        };
        for (member, to) in moves {
            self.move_member(member, to, out);
        }
    }

    /// Moves that make the swarm faster by so many thousandths.
    fn useful_moves(&self, gain: u32) -> Vec<(Member, Stage)> {
        let stages = self.config.manifest.stages();
        let costs: BTreeMap<Stage, f64> = stages.map(|stage| (stage, 1.0)).collect();
        let plan = rebalance::plan(&self.placed(), &costs);
        let enough = plan.before * (1.0 + f64::from(gain) / 1000.0);
        if plan.after >= enough { plan.moves } else { Vec::new() }
    }

    /// The members with one stage each where they serve or will.
    fn placed(&self) -> Vec<Replica> {
        let replica = |record: &MemberRecord| {
            let stage = record.moves.map_or(record.span.first, |moves| moves.to);
            let mobile = self.may_move(record);
            Replica { member: record.member, stage, speed: 1.0, mobile }
        };
        let hosts = |record: &&MemberRecord| !record.span.is_empty();
        self.membership.records().filter(hosts).map(replica).collect()
    }

    /// Whether a member may be given another stage now.
    fn may_move(&self, record: &MemberRecord) -> bool {
        record.mobile
            && record.serving
            && record.moves.is_none()
            && record.span.stages().count() == 1
            && self.membership.staying(record.span.first).count() > 1
    }

    /// Some move, whether it is of use or not.
    fn any_move(&self) -> Option<(Member, Stage)> {
        let stages = u64::from(self.config.manifest.training.stages);
        let movers: Vec<&MemberRecord> =
            self.membership.records().filter(|record| self.may_move(record)).collect();
        let mover = movers.get(self.balance.looks as usize % movers.len().max(1))?;
        let to = Stage((self.balance.looks / 2 % stages) as u16);
        (!mover.span.contains(to)).then_some((mover.member, to))
    }
}
