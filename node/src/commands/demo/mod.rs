//! `shoal demo`: several local processes train a small model, one process trains the same model
//! alone, and the demo shows both results and writes them to a folder.

mod entropy;
mod folder;
mod process;
mod summary;
mod supervisor;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use folder::Folder;
use process::Process;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use shoal_engine::{data, tokenizer};
use shoal_formats::config::{Outer, RunConfig};
use shoal_protocol::manifest::{AdmissionMode, Codecs, Data, Manifest};
use summary::Summary;
use supervisor::{Replacement, Supervisor};

use crate::cli::{DemoArgs, LogFormat};
use crate::config_sources::OnDisk;
use crate::dataset;
use crate::events::RunEvent;
use crate::exit::{Exit, ExitWith};
use crate::plot::LossCurve;
use crate::progress::{self, Progress};
use crate::report::Report;
use crate::tensorboard::TensorBoard;
use crate::terminal::out;

/// Commits from one checkpoint to the next. A stage that loses its last replica goes back to the newest.
const CHECKPOINT_EVERY: u64 = 50;

/// The same where the demo itself kills peers.
const KILLED_CHECKPOINT_EVERY: u64 = 5;

/// Trains, compares and shows.
///
/// # Errors
/// When the arguments do not make a run, a process fails, or swarm and reference differ.
pub(super) fn run(args: &DemoArgs, log_format: LogFormat) -> anyhow::Result<()> {
    check(args)?;
    let config = configure(args)?;
    let folder = Folder::prepare(&args.out)?;
    let (manifest, tokens) = lay_out(config, &folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;

    let mut report = runtime.block_on(train_swarm(args, &manifest, &folder, log_format))?;
    report.write(&folder.join("report.json")).context("report.json cannot be written")?;
    let mut reference = None;
    if !args.no_reference {
        let config = reference_config(&folder, &manifest, &report)?;
        runtime.block_on(train_reference(args, &config, &folder, log_format))?;
        let alone = read_report(&folder.join("reference"))?;
        report.reference_hash = alone.checkpoint_hash;
        report.write(&folder.join("report.json")).context("report.json cannot be written")?;
        reference = Some(alone);
    }

    let unigram_entropy = entropy::unigram_entropy(&tokens);
    let title = format!("{} peers, {} stages", report.peers, report.stages);
    let curve = LossCurve::of(&report.steps, &title);
    LossCurve { unigram_entropy: Some(unigram_entropy), ..curve }
        .write(&folder.join("loss.svg"))?;
    let sample = summary::sample(&folder.join("checkpoint"), &manifest, &tokens)?;
    let summary = Summary {
        folder: folder.path(),
        report: &report,
        reference: reference.as_ref(),
        unigram_entropy,
        sample,
    };
    out!("{summary}");
    compare(&report, reference.as_ref())
}

/// Whether swarm and reference ended with the same bits, and had them at every checkpoint.
fn compare(swarm: &Report, reference: Option<&Report>) -> anyhow::Result<()> {
    let hash = swarm.checkpoint_hash.context("the swarm left no checkpoint")?;
    let Some(alone) = reference else { return Ok(()) };
    if alone.checkpoint_hash != Some(hash) {
        return Err(anyhow!("the swarm's checkpoint differs from that of one process alone"));
    }
    match swarm.checkpoints_unlike(alone).first() {
        None => Ok(()),
        Some(version) => Err(anyhow!(
            "the swarm's checkpoint of version {version} differs from that of one process alone"
        )),
    }
}

fn check(args: &DemoArgs) -> anyhow::Result<()> {
    if !(1..=args.peers.get()).contains(&args.anchors) {
        let text = "--anchors must be from 1 to the number of peers";
        return Err(anyhow!(text)).exit_with(Exit::Usage);
    }
    match args.slow_peer.iter().find(|slow| slow.index >= args.peers.get()) {
        None => Ok(()),
        Some(slow) => {
            Err(anyhow!("there is no peer {} to slow down: peers count from 0", slow.index))
                .exit_with(Exit::Usage)
        }
    }
}

/// The default run with what was asked for in its place.
fn configure(args: &DemoArgs) -> anyhow::Result<RunConfig> {
    let mut config = RunConfig::default();
    let training = &mut config.training;
    training.stages = args.stages.unwrap_or(if args.workers.is_some() { 1 } else { 2 });
    training.steps = args.steps.unwrap_or(training.steps);
    training.seed = args.seed.unwrap_or(training.seed);
    config.optimizer.warmup_steps = config.optimizer.warmup_steps.min(training.steps);
    // Its peers are processes of this machine.
    config.admission.mode = AdmissionMode::Open;
    config.checkpoint.interval = 0;
    config.checkpoint.every =
        if args.kill_every.is_some() { KILLED_CHECKPOINT_EVERY } else { CHECKPOINT_EVERY };
    if let Some(dtype) = args.dtype {
        training.dtype = dtype.into();
    }
    training.staleness = args.staleness;
    if let Some(workers) = args.workers {
        config.outer = Some(Outer { overlap: args.overlap, ..Outer::new(workers, args.every) });
    }
    config.codec = Codecs::all(args.codec.unwrap_or(training.dtype.into()));
    if let Some(path) = &args.data {
        let path = path
            .canonicalize()
            .with_context(|| format!("no text at {}", path.display()))
            .exit_with(Exit::Usage)?;
        config.data.path = Some(path);
    }
    Ok(config)
}

/// Writes the run down, so that it can be repeated, and checks it. Gives the run and its tokens.
fn lay_out(mut config: RunConfig, folder: &Folder) -> anyhow::Result<(Manifest, Vec<u32>)> {
    if config.data.path.is_none() {
        // The built-in text changes with the program; the folder's run must not.
        fs::write(folder.join("text.txt"), dataset::built_in_text())?;
        config.data.path = Some("text.txt".into());
    }
    let path = folder.join("run.toml");
    fs::write(&path, config.to_toml())?;
    let config = RunConfig::load(&path, &OnDisk).exit_with(Exit::Usage)?;
    let text = dataset::text_of(&config)?;
    let scratch = tempfile::tempdir()?;
    let tokenizer = config.data.tokenizer;
    let tokens = data::write_tokens(&text, tokenizer, &scratch.path().join("tokens"))?;
    let manifest = config.resolve(Data::Text(tokens)).exit_with(Exit::Usage)?;
    Ok((manifest, tokenizer::encode(tokenizer, &text)))
}

/// Trains with a swarm; returns what its anchors told of it.
async fn train_swarm(
    args: &DemoArgs,
    manifest: &Manifest,
    folder: &Folder,
    log_format: LogFormat,
) -> anyhow::Result<Report> {
    let start = |index: usize| {
        let name = format!("peer-{index}");
        let log = folder.join("logs").join(format!("{name}.log"));
        let arguments = peer_arguments(index, args, manifest, folder);
        Process::start(&name, &arguments, &log, log_format, index < args.anchors)
    };
    let processes = (0..args.peers.get()).map(start).collect::<anyhow::Result<Vec<Process>>>()?;
    progress::say(&introduction(folder, &processes));
    let seed = manifest.training.seed;
    let replacement = Replacement {
        kill_every: args.kill_every,
        rng: ChaCha8Rng::seed_from_u64(seed),
        anchors: args.anchors,
        start: Box::new(start),
    };
    let (mut progress, mut report, mut finished) = (Progress::new("swarm"), Report::new(), false);
    let mut tensorboard = args.tensorboard.as_deref().map(TensorBoard::open).transpose()?;
    let note = |event: &RunEvent| {
        let changes = match event {
            RunEvent::Committed(step) => !report.knows(step.step),
            // Each process tells of its own part; one of them is enough.
            RunEvent::Started { .. } => report.run_hash.is_none(),
            RunEvent::Joined { .. } | RunEvent::Serving { .. } => args.anchors == 1,
            RunEvent::Finished { .. } => !std::mem::replace(&mut finished, true),
            _ => true,
        };
        report.note(event);
        if let Some(tensorboard) = &mut tensorboard
            && (changes || matches!(event, RunEvent::Serving { .. }))
        {
            tensorboard.note(event);
        }
        if changes {
            progress.note(event);
        }
    };
    Supervisor::new(processes, Some(replacement)).run(note).await?;
    Ok(report)
}

/// Names the demo's folder and what can be tried with it: watching the run, and killing a peer.
fn introduction(folder: &Folder, processes: &[Process]) -> String {
    let path = folder.path().display();
    let watch = format!("watch it with `shoal top --data-dir {path}/peers/0`");
    let last = processes.last().and_then(|process| Some((processes.len() - 1, process.id()?)));
    match last {
        None => format!("the demo's folder is {path}: {watch}"),
        Some((index, id)) => format!(
            "the demo's folder is {path}: {watch}; kill a peer if you like, for instance peer \
             {index} with `kill -9 {id}`, and another takes its place"
        ),
    }
}

/// The command line of a peer. The first peer starts the run; the others join it.
fn peer_arguments(
    index: usize,
    args: &DemoArgs,
    manifest: &Manifest,
    folder: &Folder,
) -> Vec<OsString> {
    let address_of = |anchor: usize| folder.join(format!("peers/address-{anchor}"));
    let data_dir = folder.join("peers").join(index.to_string());
    let slow = args.slow_peer.iter().find(|slow| slow.index == index);
    let too_few = args.peers.get() < usize::from(manifest.training.stages);
    let stage = if index == 0 && too_few { "all" } else { "auto" };

    let mut arguments = Arguments::default();
    if index == 0 {
        arguments = arguments
            .with("start", folder.join("run.toml"))
            .with("--wait-for", args.peers.to_string())
            .with("--out", folder.path());
    } else {
        arguments = arguments.with_flag("join");
        // Whichever anchor is there lets others in.
        for anchor in (0..args.anchors).filter(|anchor| *anchor != index) {
            let mut file = OsString::from("@");
            file.push(address_of(anchor));
            arguments = arguments.with_flag(file);
        }
    }
    if index < args.anchors {
        arguments = arguments
            .with_flag("--anchor")
            .with("--events", "-")
            .with("--address-file", address_of(index));
    }
    if let Some(price) = args.price {
        arguments = arguments.with("--price", price.to_string());
    }
    if let Some(memory) = args.memory {
        arguments = arguments.with("--memory", memory.0.to_string());
    }
    if let Some(memory) = args.device_memory {
        arguments = arguments.with("--device-memory", memory.0.to_string());
    }
    // Peers look for an anchor that was killed at the port that it had.
    let port = if index < args.anchors { published_port(&address_of(index)) } else { None };
    let arguments = arguments
        .with("--listen", format!("127.0.0.1:{}", port.unwrap_or(0)))
        .with("--data-dir", data_dir)
        .with("--name", format!("peer-{index}"))
        .with("--stage", stage)
        .with("--threads", "1")
        .with("--device", args.device.to_string())
        .with("--slow-down", slow.map_or(0, |slow| slow.milliseconds).to_string())
        .with_flag("--no-mdns");
    arguments.0
}

/// The TCP port in the address that an anchor has published, as in `/ip4/127.0.0.1/tcp/41325/p2p/...`.
fn published_port(address_file: &Path) -> Option<u16> {
    let address = fs::read_to_string(address_file).ok()?;
    address.split('/').skip_while(|part| *part != "tcp").nth(1)?.parse().ok()
}

/// The configuration of the run alone. A coordinator makes up for a checkpoint that the one before
/// it did not come to, at the next version: then the run alone saves every version.
fn reference_config(
    folder: &Folder,
    manifest: &Manifest,
    swarm: &Report,
) -> anyhow::Result<PathBuf> {
    let path = folder.join("run.toml");
    let planned = |version: &u64| {
        let every = manifest.checkpoint.every;
        *version == manifest.training.steps || (every > 0 && version.is_multiple_of(every))
    };
    if swarm.checkpoints.keys().all(planned) {
        return Ok(path);
    }
    let mut config = RunConfig::load(&path, &OnDisk).exit_with(Exit::Usage)?;
    config.checkpoint.every = 1;
    let path = folder.join("reference.toml");
    fs::write(&path, config.to_toml())?;
    Ok(path)
}

async fn train_reference(
    args: &DemoArgs,
    config: &Path,
    folder: &Folder,
    log_format: LogFormat,
) -> anyhow::Result<()> {
    let arguments = Arguments::default()
        .with("local", config)
        .with("--out", folder.join("reference"))
        .with("--events", "-")
        .with("--device", args.device.to_string())
        .with("--threads", "1");
    let log = folder.join("logs/reference.log");
    let process = Process::start("reference", &arguments.0, &log, log_format, true)?;
    let mut progress = Progress::new("reference");
    Supervisor::new(vec![process], None).run(|event| progress.note(event)).await
}

fn read_report(folder: &Path) -> anyhow::Result<Report> {
    let path = folder.join("report.json");
    Report::read(&path).with_context(|| format!("no report in {}", path.display()))
}

/// A command line in the making.
#[derive(Debug, Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn with(mut self, flag: &str, value: impl Into<OsString>) -> Self {
        self.0.extend([flag.into(), value.into()]);
        self
    }

    fn with_flag(mut self, flag: impl Into<OsString>) -> Self {
        self.0.push(flag.into());
        self
    }
}
