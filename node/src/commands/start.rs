//! `shoal start`: starts a run as its first peer.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use shoal_formats::config::RunConfig;
use shoal_protocol::ids::Member;
use shoal_protocol::manifest::{AdmissionMode, Manifest};
use shoal_protocol::message::Founding;
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{Run, Transport, TransportEvent};
use tokio::sync::mpsc;

use super::founding::{self, Beginning};
use super::join::LIVES;
use super::training::{self, Serving, publish};
use super::unfinished_run::{self, UnfinishedRun};
use crate::admission::{self, JoinLine, Store};
use crate::bucket::ArchivePlace;
use crate::cli::{PeerArgs, StartArgs};
use crate::config_sources::OnDisk;
use crate::data_dir::{DataDir, Files};
use crate::dataset;
use crate::driver::observer::Observer as _;
use crate::driver::resume::refuse_another_run;
use crate::driver::{self, AnchorStart, Archive, Network, Outcome, RoleSetup, Setup};
use crate::events::RunEvent;
use crate::exit::{Exit, ExitWith};
use crate::network::{Links, Search};
use crate::observers::Observers;
use crate::progress;
use crate::signals::Signals;
use crate::writable;

/// Starts a run as its coordinator, hosts stages and waits for other peers.
///
/// # Errors
/// If the configuration, text, data directory or an address is invalid, or the run fails.
pub fn run(options: StartArgs) -> anyhow::Result<()> {
    is_complete_after(options).map(drop)
}

/// As [`run`]; returns whether the run is complete, or else was left in order.
///
/// # Errors
/// As [`run`].
pub(super) fn is_complete_after(options: StartArgs) -> anyhow::Result<bool> {
    let outcome = training::runtime()?.block_on(start(options))?;
    Ok(matches!(outcome, Outcome::Finished | Outcome::Complete))
}

async fn start(options: StartArgs) -> anyhow::Result<Outcome> {
    let mut signals = Signals::listen()?;
    let mut config = RunConfig::load(&options.config, &OnDisk).exit_with(Exit::Usage)?;
    if options.open {
        config.admission.mode = AdmissionMode::Open;
    }
    let home = DataDir::open(&options.peer.data_dir).exit_with(Exit::Usage)?;
    let dataset = dataset::prepare_to_train(&config, home.path())?;
    let files = Files::default();
    dataset.offer(&files);
    let mut manifest = dataset.manifest;
    // The peer that starts a run with restricted admission is its issuer, unless the configuration
    // names another one, or this peer took part in the run of another. The id of an open run does
    // not depend on its first peer: any peer can restart it.
    if manifest.admission.mode != AdmissionMode::Open && manifest.admission.key.is_none() {
        let known = admission::known_issuer(home.path(), &manifest);
        manifest.admission.key = Some(known.unwrap_or(home.identity()?.peer_id()));
    }
    warn_of_no_checkpoints(&manifest);
    let manifest = Arc::new(manifest);
    let archive = open_archive(&options, &home, &manifest).await?;
    let me = home.identity()?.peer_id();
    UnfinishedRun::refuse(home.path(), me, &manifest).exit_with(Exit::Usage)?;
    unfinished_run::remember(home.path(), &manifest)?;
    let mut observer = Observers::new(
        options.peer.compute.events.as_ref(),
        options.peer.compute.tensorboard.as_deref(),
        "training",
    )?;
    let serving = Serving::start(
        (options.peer.http, &options.peer.http_hosts),
        observer.status_watch(),
        &home,
        &options.peer.compute.devices()?.each,
    )
    .await?;
    let begun = founding::beginning(&home, &manifest, &archive, me).await;
    let begun = match begun {
        Ok(begun) => begun,
        Err(error) => {
            serving.close().await;
            return Err(error);
        }
    };
    let founding = match begun {
        Beginning::Log => None,
        Beginning::History(founding, archive) => {
            let version = founding.version.0;
            let event = archive.map(|archive| RunEvent::Continued { version, archive });
            event.iter().for_each(|event| observer.note(event));
            Some(founding)
        }
        Beginning::Complete => {
            serving.close().await;
            say_complete(&archive);
            return Ok(Outcome::Complete);
        }
    };
    let gate = Gate::default();
    let context = StartContext { options, home, manifest, files, archive, founding, gate };
    let mut rejoins = 0;
    let outcome = loop {
        match live(&context, (&serving, &mut signals), &mut observer).await {
            // Another peer is the coordinator by then, and expelled this incarnation.
            Ok(Outcome::Expelled | Outcome::Orphaned) if rejoins < LIVES => {
                rejoins += 1;
                progress::say("the run expelled this peer: rejoining");
            }
            outcome => break outcome,
        }
    };
    serving.close().await;
    conclude(outcome?, &context, &observer)
}

fn warn_of_no_checkpoints(Manifest { checkpoint, .. }: &Manifest) {
    if checkpoint.every == 0 && checkpoint.interval == 0 {
        progress::say(
            "no checkpoints before the end: where all hosts of a stage are lost, the run begins again ([checkpoint] \
             interval = 300 in run.toml makes one every five minutes)",
        );
    }
}

/// Reports how the run ended for this peer.
fn conclude(
    outcome: Outcome,
    context: &StartContext,
    observer: &Observers,
) -> anyhow::Result<Outcome> {
    match outcome {
        Outcome::Finished => training::write_report(observer, context.archive.folder())?,
        Outcome::Drained => {
            progress::say(
                "left the run: without another anchor it is paused until it is started again",
            );
        }
        Outcome::Complete => say_complete(&context.archive),
        Outcome::Expelled | Outcome::Orphaned => {
            bail!("the run expelled this peer {LIVES} times: check its network connection")
        }
    }
    Ok(outcome)
}

fn say_complete(archive: &Archive) {
    let folder = archive.folder().display();
    progress::say(&format!("the run is complete: its checkpoint is in {folder}"));
}

/// The archive of the first peer: a folder, with a copy in a bucket if one is given.
async fn open_archive(
    options: &StartArgs,
    home: &DataDir,
    manifest: &Manifest,
) -> anyhow::Result<Archive> {
    let StartArgs { out, peer: PeerArgs { archive, .. }, .. } = options;
    let folder = match (out, archive) {
        (Some(_), Some(ArchivePlace::Folder(_))) => {
            let problem = anyhow!("the first peer archives in one folder: give --out or --archive");
            return Err(problem).exit_with(Exit::Usage);
        }
        (Some(folder), _) | (None, Some(ArchivePlace::Folder(folder))) => folder.clone(),
        (None, _) => home.path().join("runs").join(manifest.run_id().to_string()),
    };
    refuse_another_run(&folder, manifest).exit_with(Exit::Usage)?;
    writable::check(&folder, manifest).exit_with(Exit::Usage)?;
    let bucket = super::bucket::open_archive(archive.as_ref()).await?;
    if let Some(bucket) = &bucket {
        bucket.refuse_another_run(manifest).await.exit_with(Exit::Usage)?;
    }
    Ok(Archive::in_folder(folder).and_bucket(bucket))
}

/// State shared by all incarnations of the peer.
struct StartContext {
    options: StartArgs,
    home: DataDir,
    manifest: Arc<Manifest>,
    files: Files,
    archive: Archive,
    founding: Option<Founding>,
    gate: Gate,
}

/// One incarnation in the run, from its start to its end.
async fn live(
    context: &StartContext,
    (serving, signals): (&Serving, &mut Signals),
    observer: &mut Observers,
) -> anyhow::Result<Outcome> {
    let StartContext { options, home, manifest, files, gate, .. } = context;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let id = manifest.run_id();
    let run = Run { id, manifest: manifest.to_bytes() };
    let folder = admission::enter(gate, home, &identity, manifest)?;
    let at = options.peer.links(options.listen_at());
    let links = Links::open(&identity, me.incarnation, Some(run), &at, files, gate)?;
    let Links { transport, events, search } = links;
    let founder = Founder { identity, me, folder };
    let outcome =
        take_part(context, (serving, signals), observer, founder, (transport, events), &search)
            .await;
    search.close().await;
    outcome
}

/// The peer that starts the run, and the folder of the run's admission.
struct Founder {
    identity: Identity,
    me: Member,
    folder: Store,
}

/// Publishes the address to join at, and takes part.
async fn take_part(
    context: &StartContext,
    (serving, signals): (&Serving, &mut Signals),
    observer: &mut Observers,
    Founder { identity, me, folder }: Founder,
    (transport, events): (Transport, mpsc::Receiver<TransportEvent>),
    search: &Search,
) -> anyhow::Result<Outcome> {
    let StartContext {
        options: StartArgs { peer: options, address_file, wait_for, invite_anchors, .. },
        ..
    } = context;
    let StartContext { home, manifest, files, archive, founding, gate, .. } = context;
    // Waits for the router, so that the printed address is the one that other peers can reach.
    let settled = async {
        search.port_map.clone().settled().await;
        Ok(())
    };
    signals.or_stop(settled).await?;
    let addresses = search.join_addresses(&transport);
    let address =
        addresses.first().context("there is no address at which others can join")?.to_string();
    folder.keep_addresses(&addresses)?;
    let join_line = admission::join_line(&folder, &identity, &addresses, *invite_anchors)?;
    if let Some(path) = address_file {
        publish(path, join_line.argument().unwrap_or(&address))?;
    }
    join_line.text().lines().for_each(progress::say);
    // A ticket names them all.
    if let JoinLine::Address(_) | JoinLine::Listed(_) = &join_line {
        let others = addresses.iter().skip(1);
        others.for_each(|other| progress::say(&format!("inside its networks: shoal join {other}")));
    }
    serving.announce();
    observer.note(&RunEvent::Listening { address });
    search.keep(gate, &folder);
    search.discovery.join(manifest.run_id()).await;
    let addresses = transport.local_addresses();
    let devices = options.compute.devices()?;
    let setup = Setup {
        metrics: serving.metrics.clone(),
        watched: options.http.is_chosen(),
        manifest: Arc::clone(manifest),
        me,
        choice: options.stage.choice,
        longest: options.stage.longest.get(),
        devices,
        price: options.compute.price,
        island: options.island.clone(),
        name: options.title(),
        limits: options.limits(),
        slow_down: options.slow_down,
        data_dir: home.path().to_owned(),
        files: files.clone(),
        mirrors: options.mirrors.clone(),
        leaving: options.leaving(),
        network: Some(Network {
            transport,
            events,
            addresses,
            port_map: search.port_map.clone(),
            seen: search.seen.clone(),
            packing: options.packing,
        }),
        role: RoleSetup {
            anchor: Some(AnchorStart::Founds),
            wait_for: wait_for.map_or(1, NonZeroUsize::get),
            rebalance: options.rebalance,
            extend_after: options.extend_after,
            archive: Some(archive.clone()),
            archive_patience: options.archive_patience,
            on_checkpoint: options.score_command(),
            founding: founding.clone(),
            coordinator: None,
        },
    };
    driver::run(setup, observer, signals).await
}
