//! `shoal join`: joins a run that another peer started.

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

use super::contact::{Hope, JoinLine, Missed, Seeker};
use super::training::{self, Serving, publish};
use crate::address;
use crate::admission;
use crate::bucket::{ArchivePlace, Bucket};
use crate::cli::{JoinArgs, PeerArgs};
use crate::data_dir::{DataDir, Files};
use crate::driver::observer::Observer as _;
use crate::driver::resume::refuse_another_run;
use crate::driver::{self, AnchorStart, Archive, Network, Outcome, RoleSetup, Setup};
use crate::exit::{Exit, ExitWith};
use crate::network::{Links, Search};
use crate::observers::Observers;
use crate::progress;
use crate::signals::Signals;
use crate::writable;

/// How long a peer tries to reach its run.
#[derive(Debug, Clone, Copy)]
struct Patience {
    longest: Duration,
    /// Whether this process took part in the run before, so that the answer of any peer may change.
    again: bool,
}

impl Patience {
    /// For a coordinator to come back.
    const AGAIN: Self = Self { longest: Duration::from_secs(600), again: true };

    /// For a first peer to answer.
    fn first(longest: Duration) -> Self {
        Self { longest, again: false }
    }
}

/// The first and the longest pause between attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Known peers tried per attempt.
const KNOWN_PEERS: usize = 8;

/// How often an expelled peer rejoins.
pub(super) const LIVES: u32 = 1000;

/// Joins a run through the peer at an address, fetches its manifest, and hosts stages.
///
/// # Errors
/// If no peer answers, the peer at the address is another one or refuses this one, or the run fails.
pub fn run(args: JoinArgs) -> anyhow::Result<()> {
    training::runtime()?.block_on(join(args))
}

async fn join(args: JoinArgs) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let options = &args.peer;
    let home = DataDir::open(&options.data_dir).exit_with(Exit::Usage)?;
    let bucket = super::bucket::open_archive(options.archive.as_ref()).await?;
    let mut observer = Observers::new(
        options.compute.events.as_ref(),
        options.compute.tensorboard.as_deref(),
        "training",
    )?;
    let serving = Serving::start(
        (options.http, &options.http_hosts),
        observer.status_watch(),
        &home,
        &options.compute.devices()?.each,
    )
    .await?;
    let (mut rejoins, mut patience) = (0, Patience::first(args.wait));
    let context = JoinContext { args, bucket, home, gate: Gate::default() };
    let outcome = loop {
        match live(&context, (&serving, &mut signals), &mut observer, patience).await {
            Ok(Outcome::Expelled) if rejoins < LIVES => {
                rejoins += 1;
                progress::say("the run expelled this peer: rejoining");
            }
            Ok(Outcome::Expelled) => {
                let text = format!(
                    "the run expelled this peer {rejoins} times: check its network connection"
                );
                break Err(anyhow!(text));
            }
            Ok(Outcome::Orphaned) => progress::say(&format!(
                "the run has no coordinator: waiting for one, at most {} minutes",
                Patience::AGAIN.longest.as_secs() / 60
            )),
            Ok(Outcome::Finished | Outcome::Drained | Outcome::Complete) => break Ok(()),
            Err(error) => break Err(error),
        }
        patience = Patience::AGAIN;
    };
    serving.close().await;
    outcome
}

/// State shared by all attempts to join.
struct JoinContext {
    args: JoinArgs,
    /// The bucket of the archive, if it is in one.
    bucket: Option<Bucket>,
    home: DataDir,
    gate: Gate,
}

/// One incarnation in the run, from its start to its end.
async fn live(
    context: &JoinContext,
    (serving, signals): (&Serving, &mut Signals),
    observer: &mut Observers,
    patience: Patience,
) -> anyhow::Result<Outcome> {
    let JoinContext { args, home, gate, .. } = context;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let files = Files::default();
    let at = args.peer.links(args.listen_at());
    let links = Links::open(&identity, me.incarnation, None, &at, &files, gate)?;
    let Links { transport, events, search } = links;
    let newcomer = Newcomer { identity, me, files, patience };
    let outcome =
        take_part(context, (serving, signals), observer, newcomer, (transport, events), &search)
            .await;
    search.close().await;
    outcome
}

/// A peer that joins, and how long it retries.
struct Newcomer {
    identity: Identity,
    me: Member,
    files: Files,
    patience: Patience,
}

/// Joins over an open transport.
async fn take_part(
    context: &JoinContext,
    (serving, signals): (&Serving, &mut Signals),
    observer: &mut Observers,
    newcomer: Newcomer,
    (transport, events): (Transport, mpsc::Receiver<TransportEvent>),
    search: &Search,
) -> anyhow::Result<Outcome> {
    let JoinContext { args, home, gate, .. } = context;
    let options = &args.peer;
    let Newcomer { identity, me, files, patience } = newcomer;
    let (through, welcome, run) = signals.or_stop(reach(context, &transport, patience)).await?;
    let own = search.join_addresses(&transport);
    let coordinator = Member { peer: through.peer, incarnation: welcome.incarnation };
    let manifest = Arc::new(read_manifest(&run).exit_with(Exit::NotAdmitted)?);
    let archive = open_archive(context, &manifest).await?;
    let id = run.id;
    transport.set_run(run);
    let folder = admission::enter(gate, home, &identity, &manifest)?;
    // Only the manifest tells which certificates this run requires.
    gate.admit(through.peer, &welcome.pass, UnixTime::now())
        .with_context(|| format!("the peer at {through} has no valid certificate for its run"))
        .exit_with(Exit::NotAdmitted)?;
    refuse_anchor(options, gate, me.peer).exit_with(Exit::NotAdmitted)?;
    search.keep(gate, &folder);
    serving.announce();
    // From here on other peers can join through this one.
    folder.keep_addresses(&own)?;
    if let (Some(own), Some(path)) = (own.first(), &args.address_file) {
        publish(path, &own.to_string())?;
    }
    search.discovery.bootstrap(through).await;
    search.discovery.join(id).await;
    let addresses = transport.local_addresses();
    let devices = options.compute.devices()?;
    let setup = Setup {
        metrics: serving.metrics.clone(),
        watched: options.http.is_chosen(),
        manifest,
        me,
        choice: args.choice(),
        longest: options.stage.longest.get(),
        devices,
        price: options.compute.price,
        island: options.island.clone(),
        name: options.title(),
        limits: options.limits(),
        slow_down: options.slow_down,
        data_dir: home.path().to_owned(),
        files,
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
            anchor: options.anchor.then_some(AnchorStart::Joins),
            wait_for: 0,
            rebalance: options.rebalance,
            extend_after: options.extend_after,
            archive,
            archive_patience: options.archive_patience,
            on_checkpoint: options.score_command(),
            founding: None,
            coordinator: Some(coordinator),
        },
    };
    driver::run(setup, observer, signals).await
}

/// Refuses to be an anchor where the run's issuer does not let this peer be one.
fn refuse_anchor(options: &PeerArgs, gate: &Gate, me: PeerId) -> anyhow::Result<()> {
    anyhow::ensure!(
        !options.anchor || gate.may_be_anchor(me),
        "the ticket of this peer does not let it be an anchor: join without --anchor, or ask for a ticket of \
         `shoal invite new --anchor` (`shoal start --invite-anchors` prints one)"
    );
    Ok(())
}

/// The archive of this peer in a run, if it has one.
async fn open_archive(
    context: &JoinContext,
    manifest: &Manifest,
) -> anyhow::Result<Option<Archive>> {
    let JoinContext { args: JoinArgs { peer: options, .. }, bucket, home, .. } = context;
    if let Some(bucket) = bucket {
        bucket.refuse_another_run(manifest).await.exit_with(Exit::Usage)?;
        let folder = home.path().join("runs").join(manifest.run_id().to_string());
        return Ok(Some(Archive::in_bucket(folder, bucket.clone())));
    }
    let Some(ArchivePlace::Folder(folder)) = &options.archive else {
        let folder = home.path().join("runs").join(manifest.run_id().to_string());
        return Ok(options.on_checkpoint.is_some().then(|| Archive::in_passing(folder)));
    };
    refuse_another_run(folder, manifest).exit_with(Exit::Usage)?;
    writable::check(folder, manifest).exit_with(Exit::Usage)?;
    Ok(Some(Archive::in_folder(folder.clone())))
}

/// A peer that takes part in a run, its greeting, and the run.
type Reached = (PeerAddress, Welcome, Run);

/// Connects to the first peer that answers, and retries until the patience is used up, or a peer refuses a first
/// attempt. Tries the given addresses first, then known peers of the same run. Address files are read again for each
/// attempt, because a peer may have moved.
async fn reach(
    context: &JoinContext,
    transport: &Transport,
    patience: Patience,
) -> anyhow::Result<Reached> {
    let JoinContext { args: JoinArgs { addresses, .. }, home, .. } = context;
    let begun = Instant::now();
    let (mut pause, mut said) = (FIRST_PAUSE, patience.again);
    loop {
        let (mut failure, mut tried) = (None::<Missed>, Vec::new());
        for address in addresses {
            let Some(text) = address.read()? else { continue };
            let join_line: JoinLine = text.parse().exit_with(Exit::Usage)?;
            tried.extend(join_line.addresses());
            match reach_by(home, transport, &join_line).await {
                Ok(reached) => return Ok(reached),
                Err(missed) => failure = failure.or(Some(missed)),
            }
        }
        if failure.is_some()
            && let Some(reached) = reach_known_peer(home, transport, &tried).await
        {
            return Ok(reached);
        }
        let waited = begun.elapsed();
        match failure {
            Some(missed) if waited + pause > patience.longest => return Err(missed.error),
            Some(missed) if missed.hope == Hope::Never => return Err(missed.error),
            Some(missed) if !patience.again && missed.hope == Hope::Perhaps => {
                return Err(missed.error);
            }
            Some(missed) if !std::mem::replace(&mut said, true) => progress::say(&format!(
                "waiting for a first peer, at most {} s (--wait): {:#}",
                patience.longest.as_secs(),
                missed.error
            )),
            Some(_) => {}
            None if waited > patience.longest => {
                return Err(addresses[0].missing(waited)).exit_with(Exit::NotAdmitted);
            }
            None => pause = address::LOOK_EVERY,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects by an address or a ticket to a peer that takes part in a run.
async fn reach_by(home: &DataDir, transport: &Transport, by: &JoinLine) -> Result<Reached, Missed> {
    let seeker = Seeker { transport, data_dir: Some(home.path()) };
    let (through, mut welcome) = seeker.reach(by).await?;
    let run = welcome
        .run
        .take()
        .with_context(|| format!("the peer at {through} takes part in no run"))
        .exit_with(Exit::NotAdmitted)
        // It may be joining itself.
        .map_err(|error| Missed { error, hope: Hope::Soon })?;
    Ok((through, welcome, run))
}

/// Connects to a known peer of the run whose given peers do not answer.
async fn reach_known_peer(
    home: &DataDir,
    transport: &Transport,
    tried: &[PeerAddress],
) -> Option<Reached> {
    let peers: Vec<PeerId> = tried.iter().map(|address| address.peer).collect();
    let known = admission::companions(home.path(), &peers);
    for address in known.into_iter().filter(|address| !tried.contains(address)).take(KNOWN_PEERS) {
        let by = JoinLine::Address(address);
        match reach_by(home, transport, &by).await {
            Ok(reached) => {
                tracing::info!(at = %reached.0, "reached the run through a known peer");
                return Some(reached);
            }
            Err(Missed { error, .. }) => tracing::debug!(%error, "a known peer does not answer"),
        }
    }
    None
}

/// A peer's manifest, which must match the run's identifier.
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
