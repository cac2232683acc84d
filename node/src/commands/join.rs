//! `shoal join`: one more peer for a run that somebody started.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use shoal_protocol::ids::{Incarnation, Member};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::transport::{Run, Transport, Welcome};

use super::training::{self, Serving, publish};
use crate::address::{self, JoinAddress};
use crate::cli::{JoinOptions, PeerOptions};
use crate::driver::home::{Files, Home};
use crate::driver::observer::Observer;
use crate::driver::{self, AnchorPart, Network, Office, Outcome, Setup};
use crate::exit::{Exit, ExitWith};
use crate::network::{self, Links};
use crate::progress;

/// How long a peer waits for the one that keeps the run to come back.
const PATIENCE: Duration = Duration::from_secs(600);

/// From one attempt to reach it to the next, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

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
    let home = Home::open(&options.data_dir).exit_with(Exit::Usage)?;
    let mut observer = Observer::new(options.compute.events.as_ref(), "training")?;
    let serving = Serving::start(options.http, observer.board(), &home).await?;
    let (mut lives, mut patience) = (0, Duration::ZERO);
    let place = Place { addresses, address_file, options, home };
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
    home: Home,
}

/// One life in the run, from its start to its end.
async fn live(
    place: &Place,
    serving: &Serving,
    observer: &mut Observer,
    patience: Duration,
) -> anyhow::Result<Outcome> {
    let Place { addresses, address_file, options, home } = place;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let files = Files::default();
    let links = Links::open(&identity, me.incarnation, None, options, &files)?;
    let own = links.join_address(me.peer);
    let Links { transport, events, search } = links;
    let (through, life, run) = reach(&transport, addresses, patience).await?;
    let keeper = Member { peer: through.peer, incarnation: life };
    let manifest = Arc::new(read_manifest(&run).exit_with(Exit::NotAdmitted)?);
    let id = run.id;
    transport.set_run(run);
    serving.announce();
    // From here on others can join through this peer.
    if let (Some(path), Some(own)) = (address_file, own) {
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
        room: options.room,
        slow_down: options.slow_down,
        data_dir: home.path().to_owned(),
        files,
        leaving: options.leaving.clone(),
        network: Some(Network { transport, events, addresses, packing: options.packing }),
        office: Office {
            anchor: options.anchor.then_some(AnchorPart::Joins),
            wait_for: 0,
            rebalance: options.rebalance,
            archive: options.archive.clone(),
            keeper: Some(keeper),
        },
    };
    let outcome = driver::run(setup, observer).await;
    search.close().await;
    outcome
}

/// A peer that takes part in a run, its life and the run.
type Reached = (PeerAddress, Incarnation, Run);

/// Connects to the first peer that answers, again and again until the patience is used up. Files are
/// read anew each time: a peer may have moved.
async fn reach(
    transport: &Transport,
    addresses: &[JoinAddress],
    patience: Duration,
) -> anyhow::Result<Reached> {
    let begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let mut failure = None;
        for address in addresses {
            let Some(address) = address.read()? else { continue };
            match reach_at(transport, &address).await {
                Ok(reached) => return Ok(reached),
                Err(error) => failure = Some(error),
            }
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

/// Connects to the peer at an address.
async fn reach_at(transport: &Transport, address: &str) -> anyhow::Result<Reached> {
    let (through, resolved) = network::resolve(address).await?;
    let welcome = transport
        .connect(through.peer, &resolved)
        .await
        .with_context(|| format!("cannot join at {through}"))
        .exit_with(Exit::NotAdmitted)?;
    let Welcome { incarnation, run, .. } = welcome;
    let run = run
        .with_context(|| format!("the peer at {through} takes part in no run"))
        .exit_with(Exit::NotAdmitted)?;
    Ok((through, incarnation, run))
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
