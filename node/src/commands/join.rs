//! `shoal join`: one more peer for a run that somebody started.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::admission::{Gate, UnixTime};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{Run, Transport, TransportEvent, Welcome};
use tokio::sync::mpsc;

use super::contact::{JoinLine, Seeker};
use super::training::{self, Serving, publish};
use crate::address::{self, JoinAddress};
use crate::admission;
use crate::cli::{JoinOptions, PeerOptions};
use crate::data_dir::{DataDir, Files};
use crate::driver::observer::Observer as _;
use crate::driver::resume::refuse_model_of_another;
use crate::driver::{self, AnchorStart, Network, Outcome, RoleSetup, Setup};
use crate::exit::{Exit, ExitWith};
use crate::network::{Links, Search};
use crate::observers::Observers;
use crate::progress;

/// How long a peer waits for the one that keeps the run to come back.
const PATIENCE: Duration = Duration::from_secs(600);

/// From one attempt to reach it to the next, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Peers met before that are tried at a time.
const COMPANIONS: usize = 8;

/// How often a peer that the others expelled comes back.
pub(super) const LIVES: u32 = 1000;

/// Joins a run through the peer at an address, learns what the run is, and hosts stages.
///
/// # Errors
/// When nobody answers there, the peer is another one or does not admit this one, or the run fails.
pub fn run(options: JoinOptions) -> anyhow::Result<()> {
    training::runtime()?.block_on(join(options))
}

async fn join(options: JoinOptions) -> anyhow::Result<()> {
    let JoinOptions { addresses, address_file, peer: options } = options;
    let home = DataDir::open(&options.data_dir).exit_with(Exit::Usage)?;
    let mut observer = Observers::new(options.compute.events.as_ref(), "training")?;
    let serving =
        Serving::start(options.http, observer.board(), &home, options.compute.device).await?;
    let (mut lives, mut patience) = (0, Duration::ZERO);
    let place = Place { addresses, address_file, options, home, gate: Gate::default() };
    let outcome = loop {
        match live(&place, &serving, &mut observer, patience).await {
            Ok(Outcome::Expelled) if lives < LIVES => {
                lives += 1;
                progress::say("the run went on without this peer: it joins again");
            }
            Ok(Outcome::Expelled) => {
                let text =
                    format!("the run expelled this peer {lives} times: its links may be bad");
                break Err(anyhow!(text));
            }
            Ok(Outcome::Orphaned) => progress::say(&format!(
                "nobody keeps the run now: waits for it, at most {} minutes",
                PATIENCE.as_secs() / 60
            )),
            Ok(Outcome::Finished | Outcome::Drained | Outcome::Complete) => break Ok(()),
            Err(error) => break Err(error),
        }
        patience = PATIENCE;
    };
    serving.close().await;
    outcome
}

/// Where and as what a peer joins.
struct Place {
    addresses: Vec<JoinAddress>,
    address_file: Option<PathBuf>,
    options: PeerOptions,
    home: DataDir,
    gate: Gate,
}

/// One life in the run, from its start to its end.
async fn live(
    place: &Place,
    serving: &Serving,
    observer: &mut Observers,
    patience: Duration,
) -> anyhow::Result<Outcome> {
    let Place { options, home, gate, .. } = place;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let files = Files::default();
    let links = Links::open(&identity, me.incarnation, None, &options.links, &files, gate)?;
    let Links { transport, events, search } = links;
    let newcomer = Newcomer { identity, me, files, patience };
    let outcome = take_part(place, serving, observer, newcomer, (transport, events), &search).await;
    search.close().await;
    outcome
}

/// Who joins, with what, and how long it asks to be let in.
struct Newcomer {
    identity: Identity,
    me: Member,
    files: Files,
    patience: Duration,
}

/// Joins over links that are open.
async fn take_part(
    place: &Place,
    serving: &Serving,
    observer: &mut Observers,
    newcomer: Newcomer,
    (transport, events): (Transport, mpsc::Receiver<TransportEvent>),
    search: &Search,
) -> anyhow::Result<Outcome> {
    let Place { address_file, options, home, gate, .. } = place;
    let Newcomer { identity, me, files, patience } = newcomer;
    let (through, welcome, run) = reach(place, &transport, patience).await?;
    let own = search.join_addresses(&transport);
    let coordinator = Member { peer: through.peer, incarnation: welcome.incarnation };
    let manifest = Arc::new(read_manifest(&run).exit_with(Exit::NotAdmitted)?);
    if let Some(archive) = &options.archive {
        refuse_model_of_another(archive, &manifest).exit_with(Exit::Usage)?;
    }
    let id = run.id;
    transport.set_run(run);
    let folder = admission::enter(gate, home, &identity, &manifest)?;
    // Until now nobody could be asked for what it takes to be in this run.
    gate.admit(through.peer, &welcome.pass, UnixTime::now())
        .with_context(|| {
            format!("the peer at {through} does not prove that it takes part in its run")
        })
        .exit_with(Exit::NotAdmitted)?;
    search.keep(gate, &folder);
    serving.announce();
    // From here on others can join through this peer.
    folder.keep_addresses(&own)?;
    if let (Some(own), Some(path)) = (own.first(), address_file) {
        publish(path, &own.to_string())?;
    }
    search.discovery.bootstrap(through).await;
    search.discovery.join(id).await;
    let addresses = transport.local_addresses();
    let setup = Setup {
        metrics: serving.metrics.clone(),
        watched: options.http.is_chosen(),
        manifest,
        me,
        choice: options.stage,
        device: options.compute.device,
        threads: options.compute.threads.get(),
        limits: options.limits,
        slow_down: options.slow_down,
        data_dir: home.path().to_owned(),
        files,
        leaving: options.leaving.clone(),
        network: Some(Network {
            transport,
            events,
            addresses,
            port_map: search.port_map.clone(),
            packing: options.packing,
        }),
        role: RoleSetup {
            anchor: options.anchor.then_some(AnchorStart::Joins),
            wait_for: 0,
            rebalance: options.rebalance,
            archive: options.archive.clone(),
            coordinator: Some(coordinator),
        },
    };
    driver::run(setup, observer).await
}

/// A peer that takes part in a run, how it greeted, and the run.
type Reached = (PeerAddress, Welcome, Run);

/// Connects to the first peer that answers, again and again until the patience is used up: those whose
/// addresses were given, then those that were met before in the same run. Files are read anew each time: a
/// peer may have moved.
async fn reach(
    place: &Place,
    transport: &Transport,
    patience: Duration,
) -> anyhow::Result<Reached> {
    let Place { addresses, home, .. } = place;
    let begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let (mut failure, mut tried) = (None, Vec::new());
        for address in addresses {
            let Some(text) = address.read()? else { continue };
            let join_line: JoinLine = text.parse().exit_with(Exit::Usage)?;
            tried.extend(join_line.addresses());
            match reach_by(home, transport, &join_line).await {
                Ok(reached) => return Ok(reached),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if failure.is_some()
            && let Some(reached) = reach_companions(home, transport, &tried).await
        {
            return Ok(reached);
        }
        let waited = begun.elapsed();
        match failure {
            Some(error) if waited + pause > patience => return Err(error),
            Some(_) => {}
            None if waited > patience.max(address::PATIENCE) => {
                return Err(addresses[0].missing(waited)).exit_with(Exit::NotAdmitted);
            }
            None => pause = address::LOOK_EVERY,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects by an address or a ticket to a peer that takes part in a run.
async fn reach_by(home: &DataDir, transport: &Transport, by: &JoinLine) -> anyhow::Result<Reached> {
    let seeker = Seeker { transport, data_dir: Some(home.path()) };
    let (through, mut welcome) = seeker.reach(by).await?;
    let run = welcome
        .run
        .take()
        .with_context(|| format!("the peer at {through} takes part in no run"))
        .exit_with(Exit::NotAdmitted)?;
    Ok((through, welcome, run))
}

/// Connects to a peer that was met in the run of those that do not answer.
async fn reach_companions(
    home: &DataDir,
    transport: &Transport,
    tried: &[PeerAddress],
) -> Option<Reached> {
    let peers: Vec<PeerId> = tried.iter().map(|address| address.peer).collect();
    let met = admission::companions(home.path(), &peers);
    for address in met.into_iter().filter(|address| !tried.contains(address)).take(COMPANIONS) {
        let by = JoinLine::Address(address);
        match reach_by(home, transport, &by).await {
            Ok(reached) => {
                tracing::info!(at = %reached.0, "reached through a peer that was met before");
                return Some(reached);
            }
            Err(error) => tracing::debug!(%error, "a peer that was met before is not there"),
        }
    }
    None
}

/// What a peer said the run is, which must be what the run's name says.
pub(super) fn read_manifest(run: &Run) -> anyhow::Result<Manifest> {
    let manifest = Manifest::from_bytes(&run.manifest)?;
    anyhow::ensure!(
        manifest.run_id() == run.id,
        "the peer named run {} and sent the manifest of {}",
        run.id,
        manifest.run_id()
    );
    Ok(manifest)
}
