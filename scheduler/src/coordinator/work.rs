//! An open step: giving out the first stage's microbatches, claims, reports.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, GrantNumber, Member, Microbatch, Stage};
use shoal_protocol::message::{FixedLoss, FromCoordinator};

use super::{Coordinator, Out, Phase, event, send};
use crate::action::CoordinatorEvent;
use crate::ledger::{ClaimAnswer, DoneAnswer, Ledger};
use crate::router::Router;

/// The open step and who wants to work on it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) ledger: Option<Ledger>,
    wishes: BTreeMap<Member, Wish>,
    router: Router,
    next_grant: GrantNumber,
    /// Done reports of this step that came again.
    repeated: u64,
}

/// What a replica of the first stage wants.
#[derive(Debug, Default)]
struct Wish {
    /// Room beyond the grants up to `through`.
    room: u32,
    through: GrantNumber,
    /// Grants beyond `through`.
    given: BTreeSet<GrantNumber>,
}

impl Wish {
    fn unmet(&self) -> usize {
        (self.room as usize).saturating_sub(self.given.len())
    }
}

impl Work {
    pub(super) fn new() -> Self {
        Self {
            ledger: None,
            wishes: BTreeMap::new(),
            router: Router::new(0),
            next_grant: GrantNumber(1),
            repeated: 0,
        }
    }

    /// The replicas of the first stage.
    pub(super) fn set_givers(&mut self, members: impl IntoIterator<Item = Member>) {
        self.router.set_candidates(members);
    }

    pub(super) fn forget(&mut self, member: Member) {
        self.wishes.remove(&member);
    }

    /// Takes in a wish. It may come again or late: an older one changes nothing, and room beyond
    /// the same grants only ever grows.
    pub(super) fn wanted(&mut self, member: Member, room: u32, through: GrantNumber, pace: u64) {
        self.router.measured(member, pace);
        let wish = self.wishes.entry(member).or_default();
        if through > wish.through {
            wish.through = through;
            wish.room = room;
            wish.given.retain(|grant| *grant > through);
        } else if through == wish.through {
            wish.room = wish.room.max(room);
        }
    }

    /// Takes the step's books away; returns how many reports came again.
    pub(super) fn close_books(&mut self) -> u64 {
        if let Some(ledger) = self.ledger.take() {
            self.next_grant = ledger.next_grant();
        }
        std::mem::take(&mut self.repeated)
    }
}

impl Coordinator {
    pub(super) fn open_step(&mut self, out: &mut Out) {
        let manifest = &self.config.manifest;
        let step = self.version;
        let ledger = Ledger::open(
            step,
            manifest.training.stages,
            manifest.training.microbatches,
            manifest.microbatches_of(step.0),
            self.work.next_grant,
        );
        self.work.ledger = Some(ledger);
        self.phase = Phase::Open;
        event(CoordinatorEvent::Opened { step }, out);
        self.give_out(out);
    }

    /// Gives out the first stage's microbatches to those who want them, in proportion to their
    /// speed.
    pub(super) fn give_out(&mut self, out: &mut Out) {
        let Work { ledger: Some(ledger), wishes, router, .. } = &mut self.work else { return };
        let mut given: BTreeMap<Member, Vec<(Microbatch, GrantNumber)>> = BTreeMap::new();
        while let Some(microbatch) = ledger.lowest_free() {
            let wants = |member: &Member| wishes.get(member).is_some_and(|wish| wish.unmet() > 0);
            let Some(member) = router.choose_where(wants) else { break };
            let key = ClaimKey { step: ledger.step(), stage: Stage(0), microbatch };
            let ClaimAnswer::Granted { grant, .. } = ledger.claim(key, member) else {
                unreachable!("the microbatch was free");
            };
            wishes.get_mut(&member).expect("it wants work").given.insert(grant);
            given.entry(member).or_default().push((microbatch, grant));
        }
        let step = ledger.step();
        for (member, grants) in given {
            send(member, FromCoordinator::Work { step, grants }, out);
        }
    }

    pub(super) fn claim(&mut self, from: Member, key: ClaimKey, out: &mut Out) {
        let answer = match &mut self.work.ledger {
            // The first stage's claims come with the work and are not asked for.
            Some(ledger) if key.stage > Stage(0) => ledger.claim(key, from),
            _ => ClaimAnswer::NotOpen,
        };
        let message = match answer {
            ClaimAnswer::Granted { grant, next_holder } => {
                FromCoordinator::Granted { key, grant, next_holder }
            }
            ClaimAnswer::Held { holder } => FromCoordinator::Held { key, holder },
            ClaimAnswer::NotOpen => FromCoordinator::NotOpen { key },
        };
        send(from, message, out);
    }

    pub(super) fn done(
        &mut self,
        from: Member,
        key: ClaimKey,
        grant: GrantNumber,
        loss: Option<FixedLoss>,
        out: &mut Out,
    ) {
        let answer = match &mut self.work.ledger {
            Some(ledger) => ledger.done(key, from, grant, loss),
            None => DoneAnswer::Refused,
        };
        // A report of a step that is committed was taken in before that: only its answer is late.
        let committed = key.step < self.version;
        if answer == DoneAnswer::Repeated {
            self.work.repeated += 1;
        }
        if answer != DoneAnswer::Refused || committed {
            send(from, FromCoordinator::Noted { key, grant }, out);
        }
        let complete = self.work.ledger.as_ref().is_some_and(Ledger::is_complete);
        if answer == DoneAnswer::Noted && complete {
            self.close_step(out);
        }
    }
}
