//! The section `[model]` of `run.toml`: a shape, or an imported model.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use shoal_protocol::manifest::{Balance, Base, Block, Boundary, BoundaryKind, Experts, Model};

use super::{Sources, text_of};

/// The section as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelSection {
    /// Start from the weights of the base in this folder.
    from: Option<PathBuf>,
    /// Start from random weights, in the shape of the base in this folder.
    like: Option<PathBuf>,
    context: Option<u32>,
    boundary: Option<Boundary>,
    slices: Option<u16>,
    vocabulary: Option<u32>,
    hidden: Option<u32>,
    layers: Option<u32>,
    heads: Option<u32>,
    key_value_heads: Option<u32>,
    intermediate: Option<u32>,
    rope_theta: Option<f64>,
    norm_epsilon: Option<f64>,
    initializer_range: Option<f64>,
    experts: Option<Experts>,
    /// What keeps the experts of a base equally busy, where that is not what its `config.json` says.
    balance: Option<Balance>,
    balance_rate: Option<f64>,
    balance_coefficient: Option<f64>,
}

impl ModelSection {
    /// The model, and the folder of its base. Relative paths start at `folder`.
    pub(crate) fn resolve(
        self,
        folder: &Path,
        sources: &dyn Sources,
    ) -> Result<(Model, Option<PathBuf>), String> {
        let (path, loads_weights) = match (&self.from, &self.like) {
            (Some(_), Some(_)) => {
                let problem = "model.from and model.like exclude each other: remove one";
                return Err(problem.to_owned());
            }
            (Some(path), None) => (folder.join(path), true),
            (None, Some(path)) => (folder.join(path), false),
            (None, None) => return Ok((self.plain()?, None)),
        };
        if let Some(key) = self.key_of_shape() {
            return Err(format!("model.{key} is decided by the base: remove the key"));
        }
        let (mut shape, base) = sources.base(&path).map_err(|error| format!("model: {error}"))?;
        self.balance_base(&mut shape)?;
        let context = self.context.ok_or_else(|| missing("context"))?;
        let longest = shape.context;
        if context > longest {
            return Err(format!(
                "model.context = {context} is longer than the {longest} positions of the base: \
                 lower it"
            ));
        }
        let (base, boundary) = (Some(Base { loads_weights, ..base }), self.boundary);
        let slices = self.slices.unwrap_or(1);
        Ok((Model { context, slices, boundary, base, ..shape }, Some(path)))
    }

    /// Takes what a run decides of its base's experts.
    fn balance_base(&self, model: &mut Model) -> Result<(), String> {
        let Some(experts) = &mut model.block.experts else {
            return self.key_of_balance().map_or(Ok(()), |key| {
                Err(format!("model.{key} is for experts, and the base has none: remove the key"))
            });
        };
        experts.balance = self.balance.unwrap_or(experts.balance);
        experts.balance_rate = self.balance_rate.unwrap_or(experts.balance_rate);
        experts.balance_coefficient =
            self.balance_coefficient.unwrap_or(experts.balance_coefficient);
        Ok(())
    }

    /// A key that is for the experts of a base.
    fn key_of_balance(&self) -> Option<&'static str> {
        let keys = [
            ("balance", self.balance.is_some()),
            ("balance_rate", self.balance_rate.is_some()),
            ("balance_coefficient", self.balance_coefficient.is_some()),
        ];
        keys.into_iter().find(|(_, is_there)| *is_there).map(|(key, _)| key)
    }

    /// A key that a base decides.
    fn key_of_shape(&self) -> Option<&'static str> {
        let whole = [
            ("vocabulary", self.vocabulary),
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("key_value_heads", self.key_value_heads),
            ("intermediate", self.intermediate),
        ];
        let real = [
            ("rope_theta", self.rope_theta),
            ("norm_epsilon", self.norm_epsilon),
            ("initializer_range", self.initializer_range),
        ];
        let whole = whole.into_iter().filter(|(_, value)| value.is_some()).map(|(key, _)| key);
        let real = real.into_iter().filter(|(_, value)| value.is_some()).map(|(key, _)| key);
        let experts = self.experts.as_ref().map(|_| "experts");
        whole.chain(real).chain(experts).next()
    }

    /// A model with Llama's block, perhaps with experts.
    fn plain(self) -> Result<Model, String> {
        if let Some(key) = self.key_of_balance() {
            return Err(format!(
                "model.{key} is for a base: without one it is model.experts.{key}"
            ));
        }
        Ok(Model {
            vocabulary: self.vocabulary.ok_or_else(|| missing("vocabulary"))?,
            hidden: self.hidden.ok_or_else(|| missing("hidden"))?,
            layers: self.layers.ok_or_else(|| missing("layers"))?,
            heads: self.heads.ok_or_else(|| missing("heads"))?,
            key_value_heads: self.key_value_heads.ok_or_else(|| missing("key_value_heads"))?,
            intermediate: self.intermediate.ok_or_else(|| missing("intermediate"))?,
            slices: self.slices.unwrap_or(1),
            context: self.context.ok_or_else(|| missing("context"))?,
            rope_theta: self.rope_theta.ok_or_else(|| missing("rope_theta"))?,
            norm_epsilon: self.norm_epsilon.ok_or_else(|| missing("norm_epsilon"))?,
            initializer_range: self
                .initializer_range
                .ok_or_else(|| missing("initializer_range"))?,
            boundary: self.boundary,
            block: Block { experts: self.experts, ..Block::default() },
            base: None,
        })
    }
}

fn missing(key: &str) -> String {
    format!("missing key `{key}`")
}

/// The section as a commented text, which parses to the same model.
pub(crate) fn to_toml(model: &Model, base: Option<&Path>) -> String {
    let boundary = boundary_line(model.boundary);
    match base {
        Some(path) => {
            let key = if model.loads_weights() { "from" } else { "like" };
            let path = toml::Value::from(path.to_string_lossy().as_ref()).to_string();
            format!(
                include_str!("base_template.toml"),
                key = key,
                path = path,
                context = model.context,
                slices = model.slices,
                boundary = boundary,
                balance = balance_lines(model.block.experts.as_ref()),
            )
        }
        None => format!(
            include_str!("model_template.toml"),
            vocabulary = model.vocabulary,
            hidden = model.hidden,
            layers = model.layers,
            heads = model.heads,
            key_value_heads = model.key_value_heads,
            intermediate = model.intermediate,
            slices = model.slices,
            context = model.context,
            rope_theta = model.rope_theta,
            norm_epsilon = model.norm_epsilon,
            initializer_range = model.initializer_range,
            boundary = boundary,
            experts = experts_section(model.block.experts.as_ref()),
        ),
    }
}

/// The experts of a model without a base: a section, or a comment with an example if there are none.
fn experts_section(experts: Option<&Experts>) -> String {
    let Some(experts) = experts else { return include_str!("experts_template.toml").to_owned() };
    let keys = toml::Table::try_from(experts).expect("experts are a table");
    let lines = keys.iter().map(|(key, value)| format!("{key} = {value}\n"));
    format!("[model.experts]\n{}", lines.collect::<String>())
}

/// The keys that a run decides of its base's experts, or a comment with an example if there are none.
fn balance_lines(experts: Option<&Experts>) -> String {
    let Some(experts) = experts else { return "# balance = \"loss\"".to_owned() };
    let Experts { balance, balance_rate, balance_coefficient, .. } = experts;
    format!(
        "balance = {}\nbalance_rate = {balance_rate}\nbalance_coefficient = {balance_coefficient}",
        text_of(balance)
    )
}

/// The key in TOML, or a comment with an example if there is no boundary.
fn boundary_line(boundary: Option<Boundary>) -> String {
    let written = |kind, width| {
        let kind = match kind {
            BoundaryKind::Bottleneck => "bottleneck",
            BoundaryKind::Maxout => "maxout",
            BoundaryKind::Subspace => "subspace",
        };
        format!("boundary = {{ kind = \"{kind}\", width = {width} }}")
    };
    match boundary {
        Some(Boundary { kind, width }) => written(kind, width),
        None => format!("# {}", written(BoundaryKind::Bottleneck, 32)),
    }
}
