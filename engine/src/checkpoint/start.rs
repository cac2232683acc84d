//! A checkpoint that another run goes on from. That run may be cut into other stages.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::manifest::Manifest;

use super::read::{TensorFile, check_bytes};
use super::{
    CheckpointError, CheckpointFile, Description, StageState, optimizer_file, optimizer_prefixes,
    weights_file,
};
use crate::base::Find;
use crate::parameters::{Parameter, parameter_count, parameters, source_of};

type Result<T> = std::result::Result<T, CheckpointError>;

/// The files of the checkpoint that a run goes on from, as far as they are here.
#[derive(Clone)]
pub struct StartFiles {
    manifest: Arc<Manifest>,
    description: Arc<Description>,
    /// The place of each weight in the checkpoint.
    places: Arc<BTreeMap<String, Place>>,
    find: Arc<Find>,
}

/// The place of a weight in a checkpoint: a stage of its run, and a place in that stage's list of weights.
type Place = (Stage, usize);

impl fmt::Debug for StartFiles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.description.step;
        formatter.debug_struct("StartFiles").field("step", &step).finish_non_exhaustive()
    }
}

impl StartFiles {
    /// The checkpoint with this description, of the run with this manifest. `find` finds its files by their
    /// hashes.
    ///
    /// # Errors
    /// What is wrong with the description, or does not fit the run.
    pub fn new(
        manifest: Arc<Manifest>,
        description: &[u8],
        find: impl Fn(&ContentHash) -> Option<PathBuf> + Send + Sync + 'static,
    ) -> std::result::Result<Self, String> {
        let description = Arc::new(Description::parse(description)?);
        manifest.check_goes_on_from(&description.manifest).map_err(|error| error.to_string())?;
        let (step, first) = (description.step, manifest.first_version());
        if step != first {
            return Err(format!("it is of version {step}, and the run begins at {first}"));
        }
        let mut places = BTreeMap::new();
        for earlier in description.manifest.stages() {
            let listed = parameters(&description.manifest, earlier);
            for (place, parameter) in listed.into_iter().enumerate() {
                places.entry(parameter.name).or_insert((earlier, place));
            }
        }
        Ok(Self { manifest, description, places: Arc::new(places), find: Arc::new(find) })
    }

    /// The files with weights and moments of a stage of the run.
    ///
    /// # Errors
    /// If the description does not list one.
    pub fn files_of(&self, stage: Stage) -> Result<Vec<&CheckpointFile>> {
        let mut files = Vec::new();
        for earlier in self.sources(stage).into_keys() {
            files.extend(self.files_of_earlier(earlier)?);
        }
        Ok(files)
    }

    /// The stages of the run that need a file of the checkpoint.
    #[must_use]
    pub fn stages_with(&self, file: &CheckpointFile) -> Vec<Stage> {
        let needs = |stage: &Stage| self.files_of(*stage).is_ok_and(|files| files.contains(&file));
        self.manifest.stages().filter(needs).collect()
    }

    /// The two files of a stage of the checkpoint's run: weights, and moments.
    fn files_of_earlier(&self, earlier: Stage) -> Result<[&CheckpointFile; 2]> {
        let manifest = &self.description.manifest;
        let listed = |name: String| {
            let found = self.description.files.iter().find(|file| file.name == name);
            found.ok_or(CheckpointError::Absent { name })
        };
        Ok([listed(weights_file(manifest, earlier))?, listed(optimizer_file(manifest, earlier))?])
    }

    /// Weights and moments of a stage of the run. Of the two versions that the checkpoint of a run with
    /// stale reads has, it takes the newest.
    ///
    /// # Errors
    /// If a file is missing or damaged, or has no such weights.
    pub fn read_stage(&self, stage: Stage) -> Result<StageState> {
        let count = parameter_count(&self.manifest, stage);
        let [mut weights, mut first_moment, mut second_moment] = [(); 3].map(|()| vec![0.0; count]);
        let of_checkpoint = &self.description.manifest;
        for (earlier, wanted) in self.sources(stage) {
            let [of_weights, of_optimizer] = self.files_of_earlier(earlier)?;
            let (of_weights, of_optimizer) = (self.open(of_weights)?, self.open(of_optimizer)?);
            let listed = parameters(of_checkpoint, earlier);
            let of_weights = of_weights.tensors(&listed, &[""])?;
            let rest = of_optimizer.tensors(&listed, optimizer_prefixes(of_checkpoint))?;
            for (place, parameter) in wanted {
                let range = parameter.range();
                copy(of_weights[place], &mut weights[range.clone()]);
                copy(rest[place], &mut first_moment[range.clone()]);
                copy(rest[listed.len() + place], &mut second_moment[range]);
            }
        }
        Ok(StageState { weights, stale_weights: None, first_moment, second_moment })
    }

    /// Where each weight of a stage is in the checkpoint: for each stage there, places in its list of
    /// weights.
    fn sources(&self, stage: Stage) -> BTreeMap<Stage, Vec<(usize, Parameter)>> {
        let mut sources: BTreeMap<Stage, Vec<(usize, Parameter)>> = BTreeMap::new();
        for parameter in parameters(&self.manifest, stage) {
            // Both copies of a tied matrix get the same updates.
            let name = source_of(&parameter, self.manifest.model.block.tied);
            let (earlier, place) =
                *self.places.get(name).expect("both runs train the same weights");
            sources.entry(earlier).or_default().push((place, parameter));
        }
        sources
    }

    fn open(&self, file: &CheckpointFile) -> Result<TensorFile> {
        let absent = || CheckpointError::Absent { name: file.name.clone() };
        let path = (self.find)(&file.hash).ok_or_else(absent)?;
        // A peer may have fetched it in an earlier life.
        check_bytes(&path, file)?;
        TensorFile::open(&path)
    }
}

fn copy(from: &[u8], to: &mut [f32]) {
    let words = from.as_chunks::<4>().0;
    to.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_le_bytes(*word));
}
