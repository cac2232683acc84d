//! A checkpoint that another run goes on from. That run may be cut into other stages.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::manifest::Manifest;

use super::read::{TensorFile, check_bytes};
use super::{
    CheckpointError, CheckpointFile, Description, StageState, optimizer_file, optimizer_tensors,
    weights_file,
};
use crate::base::Find;
use crate::model::parameters::{Parameter, parameter_count, parameters, source_of};
use crate::optimizer::{Slot, guard_layout, layout_of_run};

type Result<T> = std::result::Result<T, CheckpointError>;

/// The files of the checkpoint that a run goes on from, as far as they are here.
#[derive(Clone)]
pub struct StartFiles {
    manifest: Arc<Manifest>,
    description: Arc<Description>,
    /// The stage of the checkpoint's run that has each weight.
    places: Arc<BTreeMap<String, Stage>>,
    find: Arc<Find>,
}

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
        let step = manifest.version_after(&description.manifest, description.step);
        let (step, first) = (step.map_err(|error| error.to_string())?, manifest.first_version());
        if step != first {
            return Err(format!("it is of version {step}, and the run begins at {first}"));
        }
        let mut places = BTreeMap::new();
        for earlier in description.manifest.stages() {
            let listed = parameters(&description.manifest, earlier);
            for parameter in listed {
                places.entry(parameter.name).or_insert(earlier);
            }
        }
        Ok(Self { manifest, description, places: Arc::new(places), find: Arc::new(find) })
    }

    /// The files with weights and optimizer state of a stage of the run.
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

    /// The two files of a stage of the checkpoint's run: weights, and optimizer state.
    fn files_of_earlier(&self, earlier: Stage) -> Result<[&CheckpointFile; 2]> {
        let manifest = &self.description.manifest;
        let listed = |name: String| {
            let found = self.description.files.iter().find(|file| file.name == name);
            found.ok_or(CheckpointError::Absent { name })
        };
        Ok([listed(weights_file(manifest, earlier))?, listed(optimizer_file(manifest, earlier))?])
    }

    /// Weights and optimizer state of a stage of the run. Of the versions that the checkpoint of a run with
    /// stale reads has, it takes the newest.
    ///
    /// # Errors
    /// If a file is missing or damaged, or has no such weights.
    pub fn read_stage(&self, stage: Stage) -> Result<StageState> {
        let slots = layout_of_run(&self.manifest, &parameters(&self.manifest, stage));
        let mut weights = vec![0.0; parameter_count(&self.manifest, stage)];
        let mut vectors: Vec<Vec<f32>> = slots.iter().map(|slot| vec![0.0; slot.len()]).collect();
        let of_checkpoint = &self.description.manifest;
        for (earlier, wanted) in self.sources(stage) {
            let [of_weights, of_optimizer] = self.files_of_earlier(earlier)?;
            let (of_weights, of_optimizer) = (self.open(of_weights)?, self.open(of_optimizer)?);
            let of_weights = by_name(&of_weights, &[("", parameters(of_checkpoint, earlier))])?;
            let rest = by_name(&of_optimizer, &optimizer_tensors(of_checkpoint, earlier))?;
            for (source, parameter) in wanted {
                copy(of_weights[&source], &mut weights[parameter.range()]);
                for (slot, vector) in slots.iter().zip(&mut vectors) {
                    let tensor = slot.tensors.iter().find(|one| one.name == parameter.name);
                    let Some(tensor) = tensor else { continue };
                    let kept = rest.get(&format!("{}{source}", slot.slot.prefix()));
                    let kept = kept.expect("both runs keep the same beside their weights");
                    copy(kept, &mut vector[tensor.range()]);
                }
            }
        }
        let mut slots: BTreeMap<_, _> = slots.iter().map(|slot| slot.slot).zip(vectors).collect();
        if let Some(remembered) = slots.get_mut(&Slot::Guard) {
            self.read_guard(stage, remembered)?;
        }
        Ok(StageState { weights, stale_weights: Vec::new(), slots })
    }

    /// The weights of a stage by the stage of the checkpoint that has them, each with its name there.
    /// Takes what the checkpoint's guard remembers, if it remembers as many steps; else zeros stay.
    fn read_guard(&self, stage: Stage, remembered: &mut [f32]) -> Result<()> {
        let of_checkpoint = &self.description.manifest;
        let window = |manifest: &Manifest| manifest.guard.map(|guard| guard.window);
        let layout = guard_layout(&self.manifest)
            .filter(|_| window(of_checkpoint) == window(&self.manifest));
        let (Some(layout), Some(earlier)) = (layout, self.sources(stage).into_keys().next()) else {
            return Ok(());
        };
        let [_, of_optimizer] = self.files_of_earlier(earlier)?;
        let file = self.open(of_optimizer)?;
        let rest = by_name(&file, &optimizer_tensors(of_checkpoint, earlier))?;
        for tensor in &layout.tensors {
            let kept = rest.get(&format!("{}{}", layout.slot.prefix(), tensor.name));
            copy(kept.expect("both guards remember the same"), &mut remembered[tensor.range()]);
        }
        Ok(())
    }

    fn sources(&self, stage: Stage) -> BTreeMap<Stage, Vec<(String, Parameter)>> {
        let mut sources: BTreeMap<Stage, Vec<(String, Parameter)>> = BTreeMap::new();
        for parameter in parameters(&self.manifest, stage) {
            // Both copies of a tied matrix get the same updates.
            let name = source_of(&parameter, self.manifest.model.block.tied).to_owned();
            let earlier = *self.places.get(&name).expect("both runs train the same weights");
            sources.entry(earlier).or_default().push((name, parameter));
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

/// The data of all tensors of a file by their names.
fn by_name<'a>(
    file: &'a TensorFile,
    lists: &[(&str, Vec<Parameter>)],
) -> Result<BTreeMap<String, &'a [u8]>> {
    let names = lists.iter().flat_map(|(prefix, parameters)| {
        parameters.iter().map(move |parameter| format!("{prefix}{}", parameter.name))
    });
    Ok(names.zip(file.tensors(lists)?.into_iter().flatten()).collect())
}

fn copy(from: &[u8], to: &mut [f32]) {
    let words = from.as_chunks::<4>().0;
    to.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_le_bytes(*word));
}
