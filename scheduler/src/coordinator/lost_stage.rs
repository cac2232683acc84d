//! A stage that lost its last replica: the search for a checkpoint to rewind to.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, SnapshotPart};
use shoal_protocol::units::Moment;

use super::config::CoordinatorConfig;
use super::members::Members;
use super::weights::Archive;
use super::{Out, send};

/// The search for the newest checkpoint whose stages are all held by members.
#[derive(Debug)]
pub(super) struct Search {
    version: Step,
    /// The stages that members were asked for.
    asked: BTreeSet<(Stage, Member)>,
    /// The stages that members do not hold.
    lacking: BTreeSet<(Stage, Member)>,
    /// The stages that at least one member holds.
    found: BTreeSet<Stage>,
    /// Until when the search waits for peers that are not members at present.
    until: Moment,
}

/// The result of a search.
#[derive(Debug)]
pub(super) enum Found {
    /// Members hold all stages of this version.
    Version(Step),
    /// Some stage cannot be had; an older version is next.
    Older(Step),
}

impl Search {
    /// A search that begins with a version.
    pub(super) fn new(version: Step, until: Moment) -> Self {
        let (asked, lacking, found) = <_>::default();
        Self { version, asked, lacking, found, until }
    }

    pub(super) fn until(&self) -> Moment {
        self.until
    }

    /// Asks the listed holders and all archives for the missing stages, each once. Returns the result, if there
    /// is one.
    pub(super) fn advance(
        &mut self,
        config: &CoordinatorConfig,
        members: &Members,
        archive: &Archive,
        now: Moment,
        out: &mut Out,
    ) -> Option<Found> {
        let version = self.version;
        if config.manifest.is_initial(version) {
            return Some(Found::Version(version));
        }
        let archives: Vec<Member> = members.current.with_duty(|duties| duties.archive).collect();
        let mut hopeless = now >= self.until;
        for stage in config.manifest.stages() {
            if self.found.contains(&stage) {
                continue;
            }
            let Some(stored) = archive.stage(version, stage) else { continue };
            let lacks = |archive: &Member| self.lacking.contains(&(stage, *archive));
            hopeless |= stored.holders.is_empty() && archives.iter().all(lacks);
            let lives = stored.holders.iter().filter_map(|peer| members.current.member_of(*peer));
            for member in lives.chain(archives.iter().copied()) {
                if self.asked.insert((stage, member)) {
                    let part = SnapshotPart { stage, stored: stored.clone() };
                    send(member, FromCoordinator::Keep { version, part }, out);
                }
            }
        }
        if self.found.len() == usize::from(config.manifest.training.stages) {
            Some(Found::Version(version))
        } else {
            hopeless.then(|| Found::Older(archive.before(version)))
        }
    }

    /// A member answers whether it holds a stage. Returns whether the answer is about the searched version.
    pub(super) fn record(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        holds: bool,
    ) -> bool {
        if self.version != version {
            return false;
        }
        if holds {
            self.found.insert(stage);
        } else {
            self.lacking.insert((stage, from));
        }
        true
    }
}
