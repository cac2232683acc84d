//! One stage of the model: its weights and its microbatches in flight.

mod output;
mod pending;
mod state;
mod update;
mod workers;

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use shoal_protocol::codec::{Codec, Rounding};
use shoal_protocol::ids::{ClaimKey, Exchange, Stage, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use tch::{Kind, Tensor};

pub use self::output::ForwardOutput;
use self::pending::{Pending, may_leave_products};
pub use self::workers::WorkerForward;

use crate::device::setup::Device;
use crate::device::shim;
use crate::device::tensor::kind;
use crate::error::{EngineError, Result};
use crate::model::loss::{Loss, LossGradients, Objective, loss_of};
use crate::model::microbatch::{Labels, per_token, token_ids};
use crate::model::norm::normalise;
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{
    Parameter, parameters, range_in_stage, range_within, summed_elements,
};
use crate::model::sliced_loss::SlicedHead;
use crate::numeric::codec;
use crate::optimizer::OptimizerState;
use crate::optimizer::guard::GuardState;
use crate::subspace::{Projection, Subspace};
use crate::train::accumulator::Accumulator;
use crate::train::frozen::Frozen;
use crate::train::inner::InnerTrainer;
use crate::weights::blocks::{Blocks, Head};
use crate::weights::gradient::{Gradient, Piece};
use crate::weights::held::Held;
use crate::weights::init::draw_weights;
use crate::weights::leaves::Leaf;
use crate::weights::place::WeightsPlace;
use crate::weights::share::Share;
use crate::weights::version::Weights;

/// One stage: weights, optimizer state, accumulators, and microbatches in flight.
#[derive(Debug)]
pub(crate) struct StageModel {
    pub(crate) stage: Stage,
    /// Whether the weights have values.
    has_weights: bool,
    last: bool,
    manifest: Manifest,
    device: tch::Device,
    pub(crate) parameters: Vec<Parameter>,
    /// The weights that are updated here, as a range of the list above. Other devices of the same island
    /// update the others.
    own: Range<usize>,
    /// The subspace that crosses boundaries, in a run that has one: as numbers for updates, and in passes.
    subspace: Option<(Subspace, Projection)>,
    threads: usize,
    /// The ranges of the stage's weight groups in the vector that is summed.
    groups: BTreeMap<WeightGroup, Range<usize>>,
    /// The version of the weights: the number of applied updates.
    version: Step,
    pub(crate) weights: Weights,
    /// The model's weights, in a run that trains adapters.
    pub(crate) frozen: Option<Frozen>,
    /// The weights of earlier versions that the run's steps read, the newest first.
    pub(crate) stale: Vec<Weights>,
    pub(crate) optimizer: OptimizerState,
    /// What judges each step, in a run that has a guard.
    guard: Option<GuardState>,
    /// One for each step that can run at the same time, used in turn.
    pub(crate) accumulators: Vec<Accumulator>,
    /// Forward passes without a backward pass yet.
    forwards: BTreeMap<ClaimKey, Kept>,
    /// Whether the passes are repeated for the backward pass, so that their graphs take no memory.
    pub(crate) recomputes: bool,
    /// Whether backward passes that keep their graphs leave products to the addition of weight gradients.
    may_leave_products: bool,
    pending: BTreeMap<ClaimKey, Pending>,
    /// What does a microbatch's work, in a run of virtual workers.
    inner: Option<Box<InnerTrainer>>,
}

/// The state kept of a forward pass.
#[derive(Debug)]
enum Kept {
    /// The graph of the pass.
    Graph(Pass),
    /// The input and the labels, to repeat the pass.
    Input(Bytes, Option<Bytes>),
    /// The weight gradient that a virtual worker came to.
    Distance(Vec<Piece>),
}

/// A pass through the layers.
#[derive(Debug)]
struct Pass {
    /// The input of the layers, which gets a gradient: an activation, or rows of the embedding.
    leaf: Tensor,
    /// The tokens of those rows, in the first stage.
    tokens: Option<Vec<i64>>,
    /// The activation for the next stage or, in the last stage, the input of the head.
    output: Tensor,
    /// The loss, in the last stage.
    loss: Option<Loss>,
    /// Tokens or pairs that count towards it, and tokens that are followed by padding.
    targets: u64,
    padded: u64,
}

impl StageModel {
    /// Creates the stage: with its initial weights if they are drawn from the seed, without weights
    /// if the run loads them from files.
    pub(crate) fn new(
        manifest: &Manifest,
        stage: Stage,
        device: Device,
        share: Share,
    ) -> Result<Self> {
        let own = OwnSlices::new(&manifest.model, share.seat());
        let frozen = Frozen::new(manifest, stage, device, &own)?;
        Self::with_frozen(manifest, stage, (device, share), frozen)
    }

    /// The stage of a virtual worker, without any values of its trained weights yet. `frozen` are those of the run.
    pub(crate) fn of_worker(
        manifest: &Manifest,
        stage: Stage,
        place: (Device, Share),
        frozen: Option<&Frozen>,
    ) -> Result<Self> {
        let frozen = frozen.map(|frozen| Frozen::beside(frozen, place.0)).transpose()?;
        Self::build(manifest, stage, place, (frozen, None), false)
    }

    /// Like [`Self::new`], with the weights of another device of the same memory.
    pub(crate) fn beside(first: &Self, place: (Device, Share)) -> Result<Self> {
        let frozen = first.frozen.as_ref().map(|frozen| Frozen::beside(frozen, place.0));
        let weights = (frozen.transpose()?, Some(first));
        let has_weights = first.has_weights;
        let model = Self::build(&first.manifest, first.stage, place, weights, false)?;
        Ok(Self { has_weights, version: first.version, ..model })
    }

    /// Like [`Self::new`], with frozen weights that may have values already.
    pub(crate) fn with_frozen(
        manifest: &Manifest,
        stage: Stage,
        place: (Device, Share),
        frozen: Option<Frozen>,
    ) -> Result<Self> {
        let from_base = frozen.is_none() && manifest.model.loads_weights();
        let drawn = manifest.start.is_none() && !from_base;
        Self::build(manifest, stage, place, (frozen, None), drawn)
    }

    /// `drawn` says whether the weights are drawn from the seed. `first` has them if they are there already.
    fn build(
        manifest: &Manifest,
        stage: Stage,
        (device, share): (Device, Share),
        (frozen, first): (Option<Frozen>, Option<&Self>),
        drawn: bool,
    ) -> Result<Self> {
        let parameters = parameters(manifest, stage);
        let own = share.of(&parameters);
        let place = WeightsPlace::of_share(manifest, &parameters, device, &share);
        let count = summed_elements(manifest, stage);
        let subspace = Subspace::of(manifest, stage);
        let scale = manifest.model.block.embedding_scale;
        let with_projection = |subspace| -> Result<_> {
            let projection = Projection::new(&subspace, scale, device.torch)?;
            Ok((subspace, projection))
        };
        let unchanged = frozen.as_ref().map(Frozen::source);
        let version = |age: usize| match first.map(|first| first.versions().nth(age)) {
            Some(first) => {
                let first = first.expect("both have all versions");
                Weights::beside(first, manifest, stage, unchanged, &place)
            }
            None => Weights::zeros(manifest, stage, unchanged, &place),
        };
        let mut weights = version(0)?;
        let mut stale: Vec<_> =
            (1..=manifest.training.staleness.into()).map(version).collect::<Result<_>>()?;
        if drawn {
            let versions = stale.iter_mut().chain([&mut weights]).collect();
            draw_weights(manifest, &parameters, subspace.as_ref(), versions, device.threads)?;
        }
        let sums = if share.is_apart() { manifest.steps_at_once() } else { 0 };
        let inner = InnerTrainer::new(manifest, stage, (device, &share), frozen.as_ref())?;
        let counted = match &inner {
            Some(inner) => inner.counted(),
            None => share.seat().map(|_| Held::of_gradients(&parameters, &place.own)),
        };
        let accumulator = |_| Accumulator::new(manifest, count, counted.clone(), device.state());
        Ok(Self {
            stage,
            has_weights: drawn,
            last: stage == manifest.last_stage(),
            manifest: manifest.clone(),
            device: device.torch,
            subspace: subspace.map(with_projection).transpose()?,
            threads: device.threads,
            groups: manifest
                .groups_of(stage)
                .map(|weights| (weights, range_in_stage(manifest, stage, weights)))
                .collect(),
            optimizer: OptimizerState::new(
                &manifest.optimizer.rule,
                &parameters[own.clone()],
                device.state(),
                device.threads,
            )?,
            guard: GuardState::new(manifest),
            accumulators: (0..sums).map(accumulator).collect::<Result<_>>()?,
            version: manifest.first_version(),
            weights,
            frozen,
            stale,
            parameters,
            own,
            forwards: BTreeMap::new(),
            recomputes: manifest.training.recompute,
            may_leave_products: may_leave_products(manifest, stage, &share),
            pending: BTreeMap::new(),
            inner: inner.map(Box::new),
        })
    }

    /// Runs the stage on one microbatch; see [`crate::Engine::forward`].
    pub(crate) fn forward(
        &mut self,
        key: ClaimKey,
        input: &Bytes,
        labels: Option<&Bytes>,
    ) -> Result<ForwardOutput> {
        if self.forwards.contains_key(&key) || self.pending.contains_key(&key) {
            return Err(EngineError::AlreadyInFlight(key));
        }
        let trains = key.microbatch.0 < self.manifest.training.microbatches;
        if trains && self.inner.is_some() {
            return self.train_worker(key, [input, labels.ok_or(EngineError::MissingLabels(key))?]);
        }
        // The last stage begins its backward pass at once, so recomputation would save nothing
        // there.
        let keeps_graph = trains && (self.last || !self.recomputes);
        let pass = self.run(key, input, labels, keeps_graph)?;
        let result = match &pass.loss {
            Some(loss) => ForwardOutput::Loss {
                share: loss.value.f_double_value(&[])? as f32,
                targets: pass.targets,
                padded: pass.padded,
                preferences: loss.preferences,
            },
            None => {
                let codec = self.manifest.codec.activations;
                ForwardOutput::Activation(codec::encode(&pass.output, codec, Rounding::Nearest)?)
            }
        };
        if keeps_graph {
            self.forwards.insert(key, Kept::Graph(pass));
        } else if trains {
            self.forwards.insert(key, Kept::Input(input.clone(), labels.cloned()));
        }
        Ok(result)
    }

    /// The pass itself.
    fn run(
        &self,
        key: ClaimKey,
        input: &[u8],
        labels: Option<&Bytes>,
        keeps_graph: bool,
    ) -> Result<Pass> {
        let _guard = (!keeps_graph).then(tch::no_grad_guard);
        let training = &self.manifest.training;
        let blocks = &self.weights_of(key)?.blocks;
        let device = self.device;
        let labels = labels.map(|labels| Labels::decode(&self.manifest, labels, device));
        let labels = labels.transpose()?;
        let documents = labels.as_ref().and_then(|labels| labels.documents.as_ref());
        let (leaf, tokens, x, initial) = match &blocks.embedding {
            Some(embedding) => {
                let ids = token_ids(&self.manifest, input)?;
                let tokens = per_token(&self.manifest, &ids, device)?;
                let trains = keeps_graph && embedding.is_trained;
                let leaf = embedding.rows(&tokens)?.set_requires_grad(trains);
                let places = documents.map(|documents| &documents.places);
                let x = embedding.embed(&leaf, (0, places), &blocks.shape, training.dtype)?;
                let initial = self.initial(Some(&ids), key)?;
                (leaf, Some(ids), x, initial)
            }
            None => {
                let ids = labels.as_ref().and_then(|labels| labels.tokens.as_deref());
                let initial = self.initial(ids, key)?;
                let codec = self.manifest.codec.activations;
                let leaf = self
                    .boundary_tensor(input, codec, "an activation")?
                    .f_to_kind(self.boundary_kind())?
                    .set_requires_grad(keeps_graph);
                let x = match &initial {
                    Some((projection, rows)) => {
                        projection.expand(&leaf, rows, kind(training.dtype))?
                    }
                    None => leaf.shallow_clone(),
                };
                (leaf, None, x, initial)
            }
        };
        let counted = self.counted(key, labels.as_ref())?;
        let mut output = blocks.through(x, (documents, counted), None)?;
        if let (false, Some((projection, rows))) = (self.last, &initial) {
            output = projection.compress(&output, rows)?;
        }
        let (mut loss, mut targets, mut padded) = (None, 0, 0);
        if let Some(head) = &blocks.head {
            let labels = labels.as_ref().ok_or(EngineError::MissingLabels(key))?;
            let objective = labels.objective(&self.manifest);
            (targets, padded) = (labels.terms(objective), labels.padded);
            output = normalise(&output, &head.norm, &blocks.shape)?.f_flatten(0, 1)?;
            loss = Some(self.loss(
                (blocks, head),
                (&output, &labels.targets),
                objective,
                keeps_graph,
            )?);
        }
        Ok(Pass { leaf, tokens, output, loss, targets, padded })
    }

    /// The share of the microbatch's terms that count towards the loss, by which the balance of experts counts it.
    fn counted(&self, key: ClaimKey, labels: Option<&Labels>) -> Result<f64> {
        if !self.manifest.model.has_balance_loss() {
            return Ok(1.0);
        }
        let labels = labels.ok_or(EngineError::MissingLabels(key))?;
        let terms = labels.terms(labels.objective(&self.manifest));
        Ok(terms as f64 / self.manifest.terms_per_microbatch() as f64)
    }

    /// The loss of rows `[N, H]` under the head.
    fn loss(
        &self,
        (blocks, head): (&Blocks, &Head),
        (rows, targets): (&Tensor, &Tensor),
        objective: Objective<'_>,
        keeps_graph: bool,
    ) -> Result<Loss> {
        if let (1, [matrix]) = (self.manifest.model.slices, &head.matrices[..]) {
            return loss_of(rows, &matrix.tensor, targets, objective, keeps_graph);
        }
        let (own, vocabulary) = (&blocks.own, self.manifest.model.vocabulary as usize);
        let slice = |(number, matrix): (usize, &'_ Leaf)| {
            let tokens = own.rows_of(number, vocabulary);
            (tokens.start as i64..tokens.end as i64, matrix.tensor.shallow_clone())
        };
        let slices: Vec<_> = own.numbers().zip(&head.matrices).map(slice).collect();
        let head = SlicedHead { own, slices: &slices, vocabulary };
        head.loss_of((rows, targets), objective, keeps_graph)
    }

    /// In a run with a subspace, the initial embedding of tokens.
    fn initial(&self, ids: Option<&[i64]>, key: ClaimKey) -> Result<Option<(&Projection, Tensor)>> {
        let Some((_, projection)) = &self.subspace else { return Ok(None) };
        let ids = ids.ok_or(EngineError::MissingLabels(key))?;
        Ok(Some((projection, projection.initial(ids)?)))
    }

    /// The kind of numbers on this side of a boundary: coordinates in a subspace are not rounded to bf16.
    fn boundary_kind(&self) -> Kind {
        match self.subspace {
            Some(_) => Kind::Float,
            None => kind(self.manifest.training.dtype),
        }
    }

    /// The gradient of a weight, as far as a constraint leaves it.
    fn within_constraint(&self, offset: usize, gradient: &Tensor) -> Result<Tensor> {
        let Some((subspace, projection)) = &self.subspace else {
            return Ok(gradient.shallow_clone());
        };
        match subspace.constraint_at(offset) {
            Some(constraint) => projection.gradient(constraint, gradient),
            None => Ok(gradient.shallow_clone()),
        }
    }

    /// Runs the backward pass of one microbatch; see [`crate::Engine::backward`].
    pub(crate) fn backward(
        &mut self,
        key: ClaimKey,
        gradient: Option<&Bytes>,
    ) -> Result<Option<Bytes>> {
        if let Some(Kept::Distance(pieces)) = self.forwards.get_mut(&key) {
            self.pending.insert(key, std::mem::take(pieces).into());
            self.forwards.remove(&key);
            return Ok(None);
        }
        let kept = self.forwards.get(&key).ok_or(EngineError::NotInFlight(key))?;
        let rerun;
        let pass = match kept {
            Kept::Distance(_) => unreachable!("it was taken above"),
            Kept::Graph(pass) => pass,
            Kept::Input(input, labels) => {
                rerun = self.run(key, input, labels.as_ref(), true)?;
                &rerun
            }
        };
        let (mut pieces, mut factors) = (Vec::new(), Vec::new());
        let blocks = &self.weights_of(key)?.blocks;
        let gradient = match (&pass.loss, &blocks.head) {
            (Some(Loss { gradients: Some(LossGradients { rows, heads }), .. }), Some(head)) => {
                for (matrix, of_head) in head.matrices.iter().zip(heads) {
                    let of_head = self.within_constraint(matrix.offset, of_head)?;
                    pieces.push(Piece::dense(matrix.offset, &of_head)?);
                }
                rows.shallow_clone()
            }
            _ => {
                let bytes = gradient.ok_or(EngineError::MissingGradient(key))?;
                let codec = self.manifest.codec.activation_gradients;
                let gradient = self.boundary_tensor(bytes, codec, "an activation gradient")?;
                gradient.f_to_kind(self.boundary_kind())?
            }
        };
        let input = Some(&pass.leaf).filter(|leaf| leaf.requires_grad());
        let inputs: Vec<&Tensor> = blocks.leaves.tensors().chain(input).collect();
        let mut gradients = self.gradients(pass, &gradient, &inputs)?.into_iter();
        for (leaf, gradient) in blocks.leaves.counted(&blocks.own, &mut gradients)? {
            match gradient {
                Gradient::Whole(gradient) => {
                    let gradient = self.within_constraint(leaf.offset, &gradient)?;
                    pieces.push(leaf.piece(&gradient)?);
                }
                left => factors.push((leaf.offset, left)),
            }
        }
        let of_input = gradients.next().map(Gradient::into_whole).transpose()?;
        let input_gradient = match (&blocks.embedding, &pass.tokens, of_input) {
            (_, _, None) => None,
            (Some(embedding), Some(tokens), Some(of_input)) => {
                let rows = of_input.f_flatten(0, 1)?;
                let rows = self.within_constraint(embedding.offset, &rows)?;
                pieces.push(Piece::embedding(embedding.offset, &embedding.tokens, tokens, &rows)?);
                None
            }
            (_, _, Some(of_input)) => {
                let codec = self.manifest.codec.activation_gradients;
                let rounding = self.manifest.gradient_rounding(key);
                Some(codec::encode(&of_input, codec, rounding)?)
            }
        };
        self.forwards.remove(&key);
        self.pending.insert(key, Pending { pieces, factors });
        Ok(input_gradient)
    }

    /// The gradients of a pass's inputs and weights.
    fn gradients(&self, pass: &Pass, gradient: &Tensor, of: &[&Tensor]) -> Result<Vec<Gradient>> {
        if self.leaves_products() {
            let all = shim::gradients_or_factors(&pass.output, gradient, of)?;
            return Ok(all.into_iter().map(Gradient::from).collect());
        }
        let all = shim::gradients(&pass.output, Some(gradient), of)?;
        Ok(all.into_iter().map(Gradient::Whole).collect())
    }

    /// The index of a step's accumulator.
    pub(crate) fn turn(&self, step: Step) -> usize {
        (step.0 % self.manifest.steps_at_once()) as usize
    }

    /// The weights that the passes of this work item read, or those of a virtual worker at first.
    fn weights_of(&self, key: ClaimKey) -> Result<&Weights> {
        self.weights_in(key, Exchange(0))
    }

    /// The weights that an exchange of this work item reads.
    fn weights_in(&self, key: ClaimKey, exchange: Exchange) -> Result<&Weights> {
        self.check_weights()?;
        if self.stale.is_empty() {
            return Ok(&self.weights);
        }
        let reads = self.manifest.exchange_reads(key.step, exchange);
        let age = self.version.0.checked_sub(reads.0);
        let mut held = [&self.weights].into_iter().chain(&self.stale);
        let read = age.and_then(|age| held.nth(usize::try_from(age).ok()?));
        read.ok_or(EngineError::WrongVersion { key, version: self.version })
    }

    fn check_weights(&self) -> Result<()> {
        if self.has_weights && !self.needs_base() {
            return Ok(());
        }
        Err(EngineError::NoWeights(self.stage))
    }

    /// Drops all state of one microbatch.
    pub(crate) fn discard(&mut self, key: ClaimKey) {
        self.forwards.remove(&key);
        self.pending.remove(&key);
        self.inner.iter_mut().for_each(|inner| inner.discard(key));
    }

    /// Passes a step's accumulated sums of a range of a weight group of this stage to a function.
    pub(crate) fn read_sums<T>(
        &self,
        weights: WeightGroup,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let range = range_within(&self.groups[&weights], range)?;
        self.accumulators[self.turn(step)].read(range, read)
    }

    /// Clears an accumulator.
    pub(crate) fn clear(&mut self, turn: usize) -> Result<()> {
        self.accumulators[turn].clear()
    }

    /// Drops everything in flight. What was accumulated is cleared by [`Self::clear`].
    pub(crate) fn drop_in_flight(&mut self) {
        self.forwards.clear();
        self.pending.clear();
        self.inner.iter_mut().for_each(|inner| inner.discard_through(Step(u64::MAX)));
    }

    /// Decodes an activation or gradient at a stage boundary.
    fn boundary_tensor(&self, bytes: &[u8], codec: Codec, what: &'static str) -> Result<Tensor> {
        let shape = self.manifest.boundary_shape().map(i64::from);
        codec::decode(bytes, codec, &shape, self.device, what)
    }
}
