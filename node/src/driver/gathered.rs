//! What was done in the background, and what follows from it.

use shoal_protocol::ids::{Member, PeerId, Stage, Step};
use shoal_protocol::message::LinkEstimate;
use shoal_scheduler::action::{CoordinatorInput, PeerInput};

use super::collect::Collected;
use super::{Driver, Ending, Own};
use crate::events::RunEvent;

/// Files that were brought here in the background, or could not be.
#[derive(Debug)]
pub(super) enum Gathered {
    Checkpoint {
        version: Step,
        whole: anyhow::Result<Collected>,
    },
    Kept {
        version: Step,
        stage: Stage,
        whole: anyhow::Result<()>,
    },
    /// Something that was to be sent could not be read back.
    LogLost(anyhow::Error),
    /// What the links to some members are.
    LinksProbed(Vec<(PeerId, LinkEstimate)>),
    /// Members whose processes are no more.
    Gone(Vec<Member>),
    Snapshot {
        version: Step,
        stage: Stage,
        whole: anyhow::Result<()>,
    },
}

impl Driver<'_> {
    pub(super) fn gathered(&mut self, gathered: Gathered) {
        match gathered {
            Gathered::Checkpoint { version, whole } => {
                self.archiving -= 1;
                match whole {
                    Ok(Collected { directory, hash }) => {
                        self.own.push_back(Own::Peer(PeerInput::Archived { version }));
                        let directory = directory.display().to_string();
                        self.note(&RunEvent::Checkpoint { version: version.0, directory, hash });
                    }
                    Err(error) => {
                        self.meters.checkpoint_failed();
                        let error = format!("{error:#}");
                        tracing::warn!(%version, error, "a checkpoint could not be archived");
                    }
                }
            }
            Gathered::LogLost(error) => {
                self.ending.get_or_insert(Ending::Stopped(format!("{error:#}")));
            }
            Gathered::LinksProbed(link_estimates) => {
                self.own.push_back(Own::Peer(PeerInput::LinksProbed(link_estimates)));
            }
            Gathered::Gone(members) => {
                for member in members {
                    let input = CoordinatorInput::Disconnected { member };
                    self.own.push_back(Own::Coordinator(input));
                }
            }
            Gathered::Kept { version, stage, whole } => {
                if let Err(error) = &whole {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, %stage, error, "a checkpoint's part is not kept");
                }
                let whole = whole.is_ok();
                self.own.push_back(Own::Peer(PeerInput::Kept { version, stage, whole }));
            }
            Gathered::Snapshot { version, stage, whole } => {
                if let Err(error) = &whole {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, %stage, error, "a snapshot could not be fetched");
                }
                let whole = whole.is_ok();
                self.own.push_back(Own::Peer(PeerInput::Fetched { version, stage, whole }));
            }
        }
    }
}
