//! Catching up: the start of a newcomer from a snapshot, and its reports to the coordinator.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Stage, Step};
use shoal_protocol::message::ToCoordinator;

use crate::action::PeerAction;
use crate::peer::Out;

/// The progress of a peer that does not serve yet.
#[derive(Debug)]
pub(in crate::peer) struct CatchUp {
    /// None once the peer serves.
    newcomer: Option<Newcomer>,
    report: BehindReport,
    /// A peer that serves cannot follow. Nothing happens here any more until the coordinator expels it, so
    /// it reports that until then.
    is_lost: bool,
}

/// A peer without the current weights.
#[derive(Debug, Default)]
struct Newcomer {
    /// None until a snapshot is known.
    start: Option<Start>,
}

/// The start of a newcomer.
#[derive(Debug)]
struct Start {
    /// The version of the snapshot.
    version: Step,
    /// The stages that the engine does not hold at that version.
    missing: BTreeSet<Stage>,
}

/// The last report that this peer cannot follow. Repeated failures are reported once per retry interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BehindReport {
    #[default]
    None,
    Sent,
    /// Another failure followed since.
    Due,
}

impl Default for CatchUp {
    fn default() -> Self {
        let (newcomer, report) = (Some(Newcomer::default()), BehindReport::default());
        Self { newcomer, report, is_lost: false }
    }
}

impl CatchUp {
    pub(super) fn is_newcomer(&self) -> bool {
        self.newcomer.is_some()
    }

    /// Whether the engine holds the weights of the current version.
    pub(super) fn has_weights(&self) -> bool {
        self.newcomer.as_ref().is_none_or(|newcomer| {
            newcomer.start.as_ref().is_some_and(|start| start.missing.is_empty())
        })
    }

    /// The peer is admitted at a version. It holds the weights if they are the initial ones; any others
    /// come by a snapshot.
    pub(in crate::peer) fn admit(&mut self, version: Step, is_initial: bool) {
        let start = Start { version, missing: BTreeSet::new() };
        self.newcomer = Some(Newcomer { start: is_initial.then_some(start) });
    }

    /// The peer serves from now on.
    pub(super) fn finish(&mut self) {
        self.newcomer = None;
    }

    /// The peer has no weights any more, for a rewind.
    pub(super) fn restart(&mut self) {
        self.newcomer = Some(Newcomer::default());
        self.is_lost = false;
    }

    /// A newcomer forgets its start and waits for a newer snapshot.
    pub(super) fn forget_start(&mut self) {
        if let Some(newcomer) = &mut self.newcomer {
            newcomer.start = None;
        }
    }

    /// Whether a snapshot is newer than the start, or than the current version if that is reached: a
    /// second message about the same snapshot may come late.
    pub(super) fn is_newer(&self, version: Step, current: Step) -> bool {
        self.start().is_none_or(|start| {
            version > if start.missing.is_empty() { current } else { start.version }
        })
    }

    /// Starts from a snapshot of these stages.
    pub(super) fn begin(&mut self, version: Step, missing: BTreeSet<Stage>) {
        if let Some(newcomer) = &mut self.newcomer {
            newcomer.start = Some(Start { version, missing });
        }
    }

    /// Whether the start needs this stage.
    pub(super) fn awaits(&self, version: Step, stage: Stage) -> bool {
        self.start().is_some_and(|start| start.version == version && start.missing.contains(&stage))
    }

    /// The engine holds a stage at a version. Returns whether that is the start's.
    pub(super) fn note_restored(&mut self, version: Step, stage: Stage) -> bool {
        let start = self.newcomer.as_mut().and_then(|newcomer| newcomer.start.as_mut());
        let Some(start) = start.filter(|start| start.version == version) else { return false };
        start.missing.remove(&stage);
        true
    }

    /// Whether a newcomer has a start.
    pub(super) fn has_start(&self) -> bool {
        self.start().is_some()
    }

    /// Reports that this peer cannot follow from its weights: its own or, for a migration, those of the
    /// other stage (`there`). A repeated report waits for [`Self::repeat_report`].
    pub(super) fn report_behind(&mut self, there: bool, out: &mut Out) {
        self.is_lost |= !there && !self.is_newcomer();
        if std::mem::replace(&mut self.report, BehindReport::Sent) == BehindReport::None {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there }));
        } else {
            self.report = BehindReport::Due;
        }
    }

    /// Whether a peer that serves cannot follow.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Sends a report that is due. Without one, the next failure is reported at once.
    pub(super) fn repeat_report(&mut self, there: bool, out: &mut Out) {
        if std::mem::take(&mut self.report) == BehindReport::Due || self.is_lost {
            self.report = BehindReport::Sent;
            let there = there && !self.is_lost;
            out.push(PeerAction::ToCoordinator(ToCoordinator::Stale { there }));
        }
    }

    fn start(&self) -> Option<&Start> {
        self.newcomer.as_ref()?.start.as_ref()
    }
}
