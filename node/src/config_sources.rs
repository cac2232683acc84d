//! Loads a run configuration from the disk, with the folders that it names.

use std::path::Path;

use shoal_data::prepared::Index;
use shoal_engine::{BaseIndex, Checkpoint};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{Base, Model};

use crate::config::data_section::{SourceKeys, mix};
use crate::config::{ConfigError, PreparedFolder, RunConfig, Sources, StartSource, read_capped};

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

    fn prepared(&self, folder: &Path) -> Result<PreparedFolder, String> {
        let index = Index::read(folder).map_err(|error| error.to_string())?;
        Ok(PreparedFolder {
            prepared: index.prepared(),
            tokenizer: index.tokenizer,
            eos: index.eos,
            chat_template: index.chat_template.map(|source| ContentHash::of(source.as_bytes())),
        })
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

    /// Trains on a mixture of prepared data.
    ///
    /// # Errors
    /// If a folder cannot be read, or the data sets do not go together.
    pub(crate) fn mix(&mut self, sources: Vec<SourceKeys>) -> Result<(), String> {
        self.data = mix(sources, Vec::new(), Path::new(""), &OnDisk)?;
        Ok(())
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
