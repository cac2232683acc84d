//! `shoal join`: one more peer for a run that somebody started.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::transport::{ConnectError, Run, Transport, Welcome};

use super::training::{self, Serving};
use crate::cli::{JoinOptions, PeerOptions};
use crate::driver::home::{Files, Home};
use crate::driver::observer::Observer;
use crate::driver::{self, Network, Office, Outcome, Setup};
use crate::exit::{Exit, ExitWith};
use crate::network::{self, Links};
use crate::progress;

/// How long a peer waits for the one that keeps the run to come back.
const PATIENCE: Duration = Duration::from_secs(600);

/// From one attempt to reach it to the next, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How often a peer that the others expelled comes back.
const LIVES: u32 = 1000;

/// Joins a run through the peer at an address, learns what the run is, and hosts stages.
///
/// # Errors
/// When nobody answers there, the peer is another one or does not admit this one, or the run fails.
pub fn run(options: JoinOptions) -> anyhow::Result<()> {
    training::runtime()?.block_on(join(options))
}

async fn join(options: JoinOptions) -> anyhow::Result<()> {
    let JoinOptions { address, peer: options } = options;
    let home = Home::open(&options.data_dir).exit_with(Exit::Usage)?;
    let serving = Serving::start(options.metrics).await?;
    let mut observer = Observer::new(options.compute.events.as_ref(), "training")?;
    let (mut lives, mut patience) = (0, Duration::ZERO);
    let outcome = loop {
        match live(&address, &options, &home, &serving, &mut observer, patience).await {
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
                "the peer that keeps the run is gone: waits for it, at most {} minutes",
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

/// One life in the run, from its start to its end.
async fn live(
    address: &str,
    options: &PeerOptions,
    home: &Home,
    serving: &Serving,
    observer: &mut Observer,
    patience: Duration,
) -> anyhow::Result<Outcome> {
    let (through, resolved) = network::resolve(address).await?;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let files = Files::default();
    let links = Links::open(&identity, me.incarnation, None, options, &files)?;
    let Links { transport, events, search } = links;
    let welcome = reach(&transport, through.peer, &resolved, patience)
        .await
        .with_context(|| format!("cannot join at {through}"))
        .exit_with(Exit::NotAdmitted)?;
    let coordinator = Member { peer: through.peer, incarnation: welcome.incarnation };
    let run = welcome
        .run
        .with_context(|| format!("the peer at {through} takes part in no run"))
        .exit_with(Exit::NotAdmitted)?;
    let manifest = Arc::new(read_manifest(&run).exit_with(Exit::NotAdmitted)?);
    let id = run.id;
    transport.set_run(run);
    search.discovery.bootstrap(through).await;
    search.discovery.join(id).await;
    let addresses = transport.local_addresses();
    let setup = Setup {
        metrics: serving.metrics.clone(),
        manifest,
        me,
        choice: options.stage,
        device: options.compute.device,
        threads: options.compute.threads.get(),
        slow_down: options.slow_down,
        data_dir: home.path().to_owned(),
        files,
        leaving: options.leaving.clone(),
        network: Some(Network { transport, events, addresses }),
        office: Office::Member { coordinator },
    };
    let outcome = driver::run(setup, observer).await;
    search.close().await;
    outcome
}

/// Connects to a peer, again and again until the patience is used up.
async fn reach(
    transport: &Transport,
    peer: PeerId,
    addresses: &[SocketAddr],
    patience: Duration,
) -> Result<Welcome, ConnectError> {
    let begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match transport.connect(peer, addresses).await {
            Err(_) if begun.elapsed() + pause <= patience => {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            reached => return reached,
        }
    }
}

/// What a peer said the run is, which must be what the run's name says.
fn read_manifest(run: &Run) -> anyhow::Result<Manifest> {
    let manifest = Manifest::from_bytes(&run.manifest)?;
    anyhow::ensure!(
        manifest.run_id() == run.id,
        "the peer named run {} and sent the manifest of {}",
        run.id,
        manifest.run_id()
    );
    Ok(manifest)
}
