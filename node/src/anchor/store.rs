//! Opens an anchor's folder.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use shoal_formats::anchor::error::AnchorError;
use shoal_formats::anchor::journal::{self, Held};
use shoal_protocol::ids::{PeerId, Step};

use super::disk::{Disk, Paths};
use super::log::Log;
use super::state_machine::{self, StateMachine};

/// An anchor's storage.
pub(super) struct Store {
    pub(super) log: Log,
    pub(super) machine: StateMachine,
    pub(super) disk: Disk,
}

impl Store {
    /// Opens the files in a folder, or creates them. `first` is the version that the run begins with.
    ///
    /// Where too few voters are left without the `removed` ones, this anchor becomes the only voter.
    ///
    /// # Errors
    /// If they cannot be read or written, belong to another anchor, or are damaged.
    pub(super) fn open(
        folder: &Path,
        anchor: PeerId,
        first: Step,
        removed: &BTreeSet<PeerId>,
    ) -> Result<Self, AnchorError> {
        let paths = Paths::new(folder);
        std::fs::create_dir_all(folder)
            .map_err(|error| AnchorError::Write { path: folder.to_owned(), error })?;
        let image = match read(&paths.snapshot())? {
            Some(bytes) => Some(state_machine::read(&paths.snapshot(), &bytes)?),
            None => None,
        };
        let path = paths.log();
        let failed = |error| AnchorError::Write { path: path.clone(), error };
        let bytes = match read(&path)? {
            Some(bytes) => bytes,
            // The log exists before the first snapshot does.
            None if image.is_some() => return Err(AnchorError::Missing { path }),
            None => {
                let bytes = journal::empty(anchor);
                paths.replace(&path, &bytes).map_err(failed)?;
                bytes
            }
        };
        let opened = journal::read(&path, &bytes, anchor)?;
        if opened.held.purged > image.as_ref().and_then(|image| image.last) {
            return Err(AnchorError::Missing { path: paths.snapshot() });
        }
        let file = OpenOptions::new().append(true).open(&path).map_err(failed)?;
        if opened.whole < bytes.len() {
            let torn = bytes.len() - opened.whole;
            tracing::warn!(bytes = torn, "truncated a torn piece of the anchor's log");
            file.set_len(opened.whole as u64).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        let mut held = opened.held;
        let known = image.as_ref().map(|image| image.anchors.membership().clone());
        let alone = held.leaves_too_few(known.as_ref(), removed).then(|| held.keep_alone(anchor));
        let file = match alone {
            Some(events) => append(file, &journal::pieces(&events), &mut held).map_err(failed)?,
            None => file,
        };
        let disk = Disk::start(paths, file).map_err(failed)?;
        let log = Log::new(anchor, held, disk.clone());
        Ok(Self { log, machine: StateMachine::new(image, first, disk.clone()), disk })
    }
}

/// Appends to the log's file before its thread begins.
fn append(mut file: File, bytes: &[u8], held: &mut Held) -> io::Result<File> {
    file.write_all(bytes)?;
    file.sync_all()?;
    held.file_size += bytes.len() as u64;
    Ok(file)
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, AnchorError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(AnchorError::Read { path: path.to_owned(), error }),
    }
}
