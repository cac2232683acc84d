//! Loads a run configuration from the disk, with the folders that it names.

use std::path::Path;

use shoal_data::prepared::Index;
use shoal_engine::{BaseIndex, Checkpoint};
use shoal_protocol::manifest::{Base, Model, Prepared};

use crate::config::{ConfigError, RunConfig, Sources, StartSource, read_capped};

/// Reads folders of the disk.
struct OnDisk;

impl Sources for OnDisk {
    fn base(&self, folder: &Path) -> Result<(Model, Base), String> {
        let (index, base) = BaseIndex::read(folder).map_err(|error| error.to_string())?;
        Ok((index.model, base))
    }

    fn checkpoint(&self, folder: &Path) -> Result<StartSource, String> {
        let checkpoint = Checkpoint::open(folder).map_err(|error| error.to_string())?;
        let (description, folder) = (checkpoint.description(), folder.to_owned());
        let (checkpoint, bytes, step, manifest) =
            (description.hash, description.bytes, checkpoint.step(), checkpoint.manifest().clone());
        Ok(StartSource { folder, checkpoint, bytes, step, manifest })
    }

    fn prepared(&self, folder: &Path) -> Result<Prepared, String> {
        let index = Index::read(folder).map_err(|error| error.to_string())?;
        Ok(index.prepared())
    }
}

impl RunConfig {
    /// Reads a run configuration and checks everything that does not depend on its text. A relative
    /// path in it starts at the file's folder.
    ///
    /// # Errors
    /// If the file or a folder that it names cannot be read, it has unknown keys, or a value is out of
    /// range.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&read_capped(path)?, path, &OnDisk)
    }

    /// Goes on from the checkpoint in a folder.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn go_on_from(&mut self, folder: &Path) -> Result<(), String> {
        self.start = Some(OnDisk.checkpoint(folder)?);
        Ok(())
    }
}
