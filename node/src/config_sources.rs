//! The folders that a run configuration names, on the disk.

use std::path::Path;

use shoal_data::prepared::Index;
use shoal_engine::{BaseIndex, Checkpoint};
use shoal_formats::config::{PreparedFolder, Sources, StartSource};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{Base, Model};

/// Reads folders of the disk.
pub struct OnDisk;

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
