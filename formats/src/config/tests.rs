//! Configurations as people write them.

use shoal_protocol::ids::{ContentHash, PeerId};
use shoal_protocol::manifest::{
    AdmissionMode, Balance, Base, Boundary, BoundaryKind, DistanceCodec, ExpertGroups, Experts,
    GradientRounding, InnerMoments, Lora, LoraTarget, Pairs, Prepared, Quantisation, Rotary,
    RotaryScaling, Router, Sgd,
};

use super::loss_section::LossName;
use super::*;

fn load(text: &str) -> Result<RunConfig, ConfigError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).expect("written");
    RunConfig::load(&path, &NoSources)
}

fn refusal(text: &str) -> String {
    load(text).expect_err("refused").to_string()
}

/// The default run from a base, with these keys beside the base's.
fn with_base(keys: &str) -> String {
    let text = RunConfig::default().to_toml();
    let (_, rest) = text.split_once("[training]").expect("a section");
    format!("[model]\nfrom = \"base\"\n{keys}\n[training]{rest}")
}

/// Has this model for every base.
struct BaseOf(Model);

impl BaseOf {
    /// One whose dynamic rotary embedding stretches 16 positions to 40.
    fn dynamic() -> Self {
        let mut model = RunConfig::default().model;
        model.context = 40;
        let scaling = RotaryScaling::Dynamic { factor: 2.5, original_positions: 16 };
        model.block.rotary = vec![Rotary { theta: 1e4, dimensions: model.head_size(), scaling }];
        Self(model)
    }

    /// One with experts, whose `config.json` asks for no balance.
    fn of_experts() -> Self {
        let mut model = RunConfig::default().model;
        model.block.experts = Some(Experts { biased: true, ..Experts::new(8, 2, 32) });
        Self(model)
    }
}

impl Sources for BaseOf {
    fn base(&self, _: &Path) -> Result<(Model, Base), String> {
        let index = ContentHash([1; 32]);
        Ok((self.0.clone(), Base { index, bytes: 9, loads_weights: true }))
    }

    fn checkpoint(&self, folder: &Path) -> Result<StartSource, String> {
        NoSources.checkpoint(folder)
    }

    fn prepared(&self, folder: &Path) -> Result<PreparedFolder, String> {
        NoSources.prepared(folder)
    }
}

#[test]
fn a_written_configuration_parses_to_itself() {
    let default = RunConfig::default();
    assert_eq!(load(&default.to_toml()).expect("valid"), default);

    let mut other = default;
    other.training.dtype = Dtype::Bf16;
    other.training.recompute = true;
    other.codec.activations = "int8:1024".parse().expect("a codec");
    other.codec.gradient_rounding = GradientRounding::Stochastic;
    other.optimizer.learning_rate = 1e-5;
    other.optimizer.schedule = Schedule::Wsd { final_learning_rate: 0.0, decay_steps: 50 };
    other.optimizer.rule = Rule::Sgd(Sgd { momentum: 0.5, nesterov: true });
    other.data.path = Some("/a \"quoted\" \\ folder/text.txt".into());
    other.model.boundary = Some(Boundary { kind: BoundaryKind::Maxout, width: 16 });
    other.admission.mode = AdmissionMode::Invite;
    other.admission.key = Some(PeerId([7; 32]));
    assert_eq!(load(&other.to_toml()).expect("valid"), other);

    (other.training.stages, other.model.boundary) = (1, None);
    let codec = DistanceCodec::Int4;
    let moments = InnerMoments::Mean;
    other.outer = Some(Outer { rate: 0.5, codec, moments, ..Outer::new(3, 30) });
    assert_eq!(load(&other.to_toml()).expect("valid"), other);
    other.outer = Some(Outer { overlap: 5, ..Outer::new(3, 30) });
    assert_eq!(load(&other.to_toml()).expect("valid"), other);
}

#[test]
fn experts_are_written_whole() {
    let mut config = RunConfig::default();
    let experts = Experts {
        router: Router::Sigmoid,
        wide_router: true,
        biased: true,
        scale: 2.5,
        groups: Some(ExpertGroups { count: 4, chosen: 2 }),
        shared_intermediate: Some(24),
        shared_gated: false,
        dense_layers: vec![0, 2],
        ..Experts::new(8, 2, 32)
    };
    for experts in [experts, Experts::new(4, 1, 16)] {
        config.model.block.experts = Some(experts);
        assert_eq!(load(&config.to_toml()).expect("valid"), config);
    }
}

#[test]
fn a_run_decides_what_balances_the_experts_of_its_base() {
    let base = BaseOf::of_experts();
    let parse = |text: &str| {
        RunConfig::parse(text, Path::new("run.toml"), &base).map_err(|error| error.to_string())
    };
    let read = |keys: &str| parse(&with_base(&format!("context = 8\n{keys}")));
    let balance = |keys: &str| {
        let experts = read(keys).expect("valid").model.block.experts.expect("experts");
        (experts.balance, experts.balance_rate, experts.balance_coefficient)
    };
    let (rate, coefficient) = (Experts::BALANCE_RATE, Experts::BALANCE_COEFFICIENT);
    assert_eq!(balance(""), (Balance::None, rate, coefficient));
    assert_eq!(
        balance("balance = \"bias\"\nbalance_rate = 0.5"),
        (Balance::Bias, 0.5, coefficient)
    );
    let config = read("balance = \"bias\"").expect("valid");
    assert_eq!(parse(&config.to_toml()).expect("valid"), config);
    let error = read("balance = \"loss\"").expect_err("it has biases");
    assert!(error.contains("model.experts.balance = loss is out of range"), "{error}");
    let plain = RunConfig::default().to_toml().replace("[model]", "[model]\nbalance_rate = 1.0");
    assert!(refusal(&plain).contains("without one it is model.experts.balance_rate"));
}

#[test]
fn a_relative_path_starts_at_the_files_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.toml");
    let mut config = RunConfig::default();
    config.data.path = Some("text.txt".into());
    std::fs::write(&path, config.to_toml()).expect("written");
    let loaded = RunConfig::load(&path, &NoSources).expect("valid");
    assert_eq!(loaded.data.path, Some(folder.path().join("text.txt")));
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    let text = RunConfig::default().to_toml().replace("\nhidden =", "\nhiden =");
    let line = 1 + text.lines().position(|line| line.starts_with("hiden")).expect("there");
    let error = refusal(&text);
    let expected = format!("run.toml:{line}: unknown key `hiden`: did you mean `hidden`?");
    assert!(error.contains(&expected), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

#[test]
fn a_key_of_another_optimizer_is_named() {
    let text = RunConfig::default().to_toml().replace("kind = \"adamw\"", "kind = \"sgd\"");
    let line = 1 + text.lines().position(|line| line == "[optimizer]").expect("there");
    let error = refusal(&text);
    let expected = "unknown key `beta1`: kind = \"sgd\" does not have it";
    assert!(error.contains(&format!("run.toml:{line}: {expected}")), "{error}");
}

#[test]
fn a_missing_key_is_named() {
    let error = refusal(&RunConfig::default().to_toml().replace("\nlayers =", "\n# layers ="));
    assert!(error.contains("missing key `layers`"), "{error}");
}

#[test]
fn values_out_of_range_are_refused_before_the_text_is_read() {
    let mut config = RunConfig::default();
    config.training.stages = 5;
    let error = refusal(&config.to_toml());
    assert!(error.contains("training.stages = 5 is more than model.layers = 4"), "{error}");
    config.training.stages = 2;
    config.optimizer.rule = Rule::Adamw(Adam { beta1: 1.0, ..Adam::DEFAULT });
    assert!(refusal(&config.to_toml()).contains("optimizer.beta1 = 1 is out of range"));
}

#[test]
fn a_value_out_of_range_is_named_with_its_line() {
    let mut config = RunConfig::default();
    config.evaluation.held_out = 2.0;
    let text = config.to_toml();
    let line = 1 + text.lines().position(|line| line.starts_with("held_out")).expect("there");
    let error = refusal(&text);
    assert!(error.contains(&format!("run.toml:{line}: evaluation.held_out = 2 is")), "{error}");
}

#[test]
fn a_warm_up_longer_than_the_run_is_refused() {
    let mut config = RunConfig::default();
    config.training.steps = config.optimizer.warmup_steps;
    load(&config.to_toml()).expect("it ends with the warm-up");
    config.training.steps -= 1;
    let text = config.to_toml();
    let line = 1 + text.lines().position(|line| line.starts_with("warmup_steps")).expect("there");
    let error = refusal(&text);
    let expected =
        "optimizer.warmup_steps = 20 is out of range: it must be at most training.steps = 19";
    assert!(error.contains(&format!("run.toml:{line}: {expected}")), "{error}");
    // The steps of epochs follow from the data.
    config.epochs = TrainingEpochs::Of(3.0);
    load(&config.to_toml()).expect("unknown yet");
}

#[test]
fn an_invalid_boundary_is_refused_with_its_range() {
    let with = |boundary: &str| {
        let text = RunConfig::default().to_toml();
        let found = text.lines().find(|line| line.starts_with("# boundary")).expect("there");
        text.replace(found, &format!("boundary = {boundary}"))
    };
    for kind in ["bottleneck", "subspace"] {
        let read = load(&with(&format!("{{ kind = \"{kind}\", width = 33 }}"))).expect("valid");
        assert_eq!(load(&read.to_toml()).expect("valid"), read, "{kind}");
    }
    for (boundary, words) in [
        ("{ kind = \"maxout\", width = 33 }", "must be a divisor of hidden = 128 for maxout"),
        ("{ kind = \"bottleneck\", width = 128 }", "must be from 2 to 127"),
        ("{ kind = \"sieve\", width = 32 }", "unknown variant `sieve`"),
        ("{ kind = \"maxout\" }", "missing key `width`"),
    ] {
        let error = refusal(&with(boundary));
        assert!(error.contains(words), "{error}");
    }
    let uncut = with("{ kind = \"maxout\", width = 32 }").replace("\nstages = 2", "\nstages = 1");
    assert!(refusal(&uncut).contains("take model.boundary out, or ask for more stages"));
}

#[test]
fn a_base_is_packed_in_four_bits_or_refused() {
    let targets = LoraTarget::ALL.to_vec();
    for base in [None, Some(Quantisation::Nf4)] {
        let lora = Lora { rank: 16, alpha: 32.0, targets: targets.clone(), base };
        let written: toml::Table = lora_section::to_toml(Some(&lora)).parse().expect("TOML");
        assert_eq!(written["lora"].clone().try_into(), Ok(lora));
    }
    let text = RunConfig::default().to_toml();
    let without = lora_section::to_toml(None);
    assert!(text.contains(&without), "{text}");
    for (value, words) in
        [("\"int8\"", "unknown variant `int8`"), ("\"nf5\"", "did you mean `nf4`"), ("4", "string")]
    {
        let section = format!("[lora]\nrank = 16\nalpha = 32.0\nbase = {value}");
        let error = refusal(&text.replace(&without, &section));
        assert!(error.contains(words) && error.contains("run.toml:"), "{value}: {error}");
    }
}

#[test]
fn workers_meet_at_the_end_of_the_run() {
    let mut config = RunConfig::default();
    (config.training.stages, config.outer) = (1, Some(Outer::new(4, 30)));
    let resolved = |config: &RunConfig| config.with_enough_tokens().expect("valid");
    let manifest = resolved(&config);
    assert_eq!((manifest.training.steps, manifest.training.microbatches), (10, 4));
    assert_eq!(manifest.evaluation.every, 2, "the first sync after 50 steps");
    let inner = manifest.inner.expect("workers");
    assert_eq!((inner.steps, inner.microbatches), (30, 8));
    assert_eq!(inner.optimizer, config.optimizer);
    config.outer = Some(Outer::new(4, 7));
    let error = refusal(&config.to_toml());
    let expected = "training.steps = 300 is out of range: it must be a multiple of outer.every = 7";
    assert!(error.contains(expected), "{error}");
    config.outer = Some(Outer::new(0, 30));
    let error = refusal(&config.to_toml());
    assert!(error.contains("outer.workers = 0 is out of range"), "{error}");
}

#[test]
fn one_worker_that_meets_itself_after_every_step_changes_nothing() {
    let plain = RunConfig::default();
    let alone = RunConfig { outer: Some(Outer::new(1, 1)), ..plain.clone() };
    let run_id = |config: &RunConfig| config.with_enough_tokens().expect("valid").run_id();
    assert_eq!(run_id(&alone), run_id(&plain));
}

#[test]
fn a_base_and_prepared_data_exclude_other_keys() {
    let plain = RunConfig::default().to_toml();
    let error = refusal(&plain.replace("\nvocabulary =", "\nfrom = \"base\"\nvocabulary ="));
    assert!(error.contains("model.vocabulary is decided by the base"), "{error}");
    let error = refusal(&plain.replace("[model]", "[model]\nfrom = \"one\"\nlike = \"two\""));
    assert!(error.contains("model.from and model.like exclude each other"), "{error}");
    let start = plain.find("[model]").expect("a section");
    let end = plain.find("[training]").expect("a section");
    let section = "[model]\nfrom = \"none\"\ncontext = 8\n";
    let error = refusal(&format!("{}{section}{}", &plain[..start], &plain[end..]));
    assert!(error.contains("none is not read"), "{error}");
    let error = refusal(&plain.replace("[data]", "[data]\nprepared = \"data\""));
    assert!(error.contains("data.prepared excludes data.path and data.tokenizer"), "{error}");
    let error = refusal(&plain.replace("tokenizer = \"bytes\"", "prepared = \"data\""));
    assert!(error.contains("data is not read"), "{error}");
}

#[test]
fn losses_of_pairs_have_factors_and_need_pairs() {
    let pairs = |loss: Loss| {
        let mut config = RunConfig::default();
        config.training.loss = loss;
        let data = Prepared {
            index: ContentHash([0; 32]),
            bytes: 100,
            rows: 20,
            held_out_rows: 4,
            context: 128,
            vocabulary: 256,
            pairs: Some(Pairs::default()),
        };
        config.data.prepared = Some(("data".into(), data));
        config
    };
    for name in [LossName::Orpo, LossName::Simpo] {
        let config = pairs(name.usual());
        config.check().expect("valid");
        // Without its data, which the test does not read.
        let text = config.to_toml().replace("prepared = \"data\"", "tokenizer = \"bytes\"");
        let error = load(&text).expect_err("a text is no pairs").to_string();
        assert!(error.contains("run.toml:") && error.contains("the data holds none"), "{error}");
    }
    let plain = RunConfig::default().to_toml();
    let with = |line: &str| load(&plain.replace("\nstaleness", &format!("\n{line}\nstaleness")));
    let error = with("beta = 0.1").expect_err("no loss of pairs").to_string();
    assert!(error.contains("training.beta is of losses of pairs"), "{error}");
    let error = pairs(LossName::Dpo.usual()).check().expect_err("no reference").to_string();
    assert!(error.contains("shoal data reference"), "{error}");
    let mut config = pairs(Loss::CrossEntropy);
    let error = config.check().expect_err("pairs").to_string();
    assert!(error.contains("set training.loss"), "{error}");
    config.training.loss = LossName::Simpo.usual();
    assert!(config.to_toml().contains("gamma = 1.0"), "{}", config.to_toml());
}

#[test]
fn epochs_become_steps_with_the_data() {
    let with = |length: &str| RunConfig::default().to_toml().replace("\nsteps = 300 ", length);
    let config = load(&with("\nepochs = 2.5 ")).expect("valid");
    assert_eq!(config.epochs, TrainingEpochs::Of(2.5));
    let both = load(&with("\nsteps = 300\nepochs = 1 ")).expect("valid");
    assert_eq!((both.training.steps, both.epochs), (300, TrainingEpochs::Overruled(1.0)));
    assert_eq!(load(&config.to_toml()).expect("valid"), config);
    let steps = |config: &RunConfig, rows: u64| {
        let prepared = Prepared {
            index: ContentHash([0; 32]),
            bytes: 100,
            rows,
            held_out_rows: 4,
            context: 128,
            vocabulary: 256,
            pairs: None,
        };
        config.resolve(Data::Prepared(prepared)).expect("valid").training.steps
    };
    // A step has 8 microbatches of 2 samples.
    assert_eq!(steps(&config, 160), 25);
    assert_eq!(steps(&config, 161), 26);
    assert_eq!(steps(&config, 12), 2);
    // Of a text, the part that is not held out counts.
    let (hash, width, tokenizer) = (ContentHash([0; 32]), TokenWidth::U8, Tokenizer::Bytes);
    let text = Data::Text(Tokens { hash, count: 16 * 1280, width, tokenizer });
    assert_eq!(config.resolve(text).expect("valid").training.steps, 23);
    let mut workers = config;
    (workers.training.stages, workers.outer) = (1, Some(Outer::new(4, 10)));
    assert_eq!(steps(&workers, 1600), 7, "syncs of four workers, each of ten steps");
    for (length, words) in [
        ("\nepochs = 0 ", "training.epochs = 0 is out of range"),
        ("\nepochs = nan ", "training.epochs = NaN is out of range"),
        ("\nepochs = 1e7 ", "training.epochs = 10000000 is out of range"),
        ("\n", "missing key `steps`, or `epochs` in its place"),
    ] {
        let error = refusal(&with(length));
        assert!(error.contains(words), "{length}: {error}");
    }
}

#[test]
fn other_files_are_refused() {
    assert!(refusal("model = ").contains("run.toml:1: "));
    assert!(refusal(&"# long\n".repeat(20_000)).contains("not a run configuration"));
    assert!(matches!(
        RunConfig::load(Path::new("/no/such/file"), &NoSources),
        Err(ConfigError::Unreadable { .. })
    ));
}

#[test]
fn a_short_text_is_refused() {
    let config = RunConfig::default();
    let tokens = Tokens {
        hash: ContentHash([0; 32]),
        count: 100,
        width: TokenWidth::U8,
        tokenizer: Tokenizer::Bytes,
    };
    assert!(matches!(config.resolve(Data::Text(tokens)), Err(ManifestError::TextTooShort { .. })));
}

#[test]
fn a_context_is_within_the_positions_of_the_bases_rotary_embedding() {
    let base = BaseOf::dynamic();
    let with = |context: u32| {
        let text = with_base(&format!("context = {context}"));
        RunConfig::parse(&text, Path::new("run.toml"), &base).map_err(|error| error.to_string())
    };
    let config = with(40).expect("the longest");
    assert_eq!(config.model.rotaries(), base.0.rotaries());
    let error = with(41).expect_err("longer");
    let expected = "model.context = 41 is longer than the 40 positions of the base: lower it";
    assert!(error.contains(expected) && error.contains("run.toml"), "{error}");
}
