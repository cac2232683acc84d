//! `shoal checkpoint fetch`: fetches the newest checkpoint of a running swarm.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use shoal_protocol::ids::{Era, Member, PeerId, Term};
use shoal_protocol::message::{Envelope, Message, SavedCheckpoint};
use shoal_protocol::net::transport::{Transport, TransportEvent, Welcome};
use shoal_protocol::units::Bytes;
use shoal_protocol::wire;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::client::{self, Client, LIFE};
use super::join::read_manifest;
use super::training;
use crate::address::JoinAddress;
use crate::data_dir::Files;
use crate::driver::{FileHolders, RunFiles, Scattered, collect};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Timeout of a request.
const ANSWER: Duration = Duration::from_secs(15);

/// The most redirections to another peer.
const HOPS: usize = 8;

/// Finds the newest checkpoint, fetches its parts and assembles them.
///
/// # Errors
/// If no peer answers, there is no checkpoint yet, or a part of it cannot be fetched.
pub(super) fn run(address: &JoinAddress, out: &Path) -> anyhow::Result<()> {
    training::runtime()?.block_on(fetch(address, out))
}

async fn fetch(address: &JoinAddress, out: &Path) -> anyhow::Result<()> {
    let files = Files::default();
    let Client { transport, mut events } = Client::open(&files)?;
    let (through, welcome) = client::reach(&transport, address).await?;
    let Welcome { incarnation, run, .. } = welcome;
    let run = run.with_context(|| format!("the peer at {through} takes part in no run"))?;
    let manifest = Arc::new(read_manifest(&run).exit_with(Exit::NotAdmitted)?);
    transport.set_run(run);
    let first = Member { peer: through.peer, incarnation };
    let SavedCheckpoint { version, stages, holders } = ask(&transport, &mut events, first).await?;
    for (peer, addresses) in &holders {
        transport.remember(*peer, addresses);
    }
    let destination = out.to_owned();
    let scattered = Scattered { version, stages, destination };
    let scratch = tempfile::tempdir()?;
    let (_, holders) =
        watch::channel(FileHolders::any(holders.into_iter().map(|(peer, _)| peer).collect()));
    let run_files = RunFiles {
        manifest,
        data_dir: scratch.path().to_owned(),
        files,
        mirrors: Arc::new([]),
        cache: Bytes(0),
        transport: Some(transport.clone()),
        holders,
    };
    let collected = collect(scattered, run_files).await?;
    outln!("version {version} of the weights: {} ({})", out.display(), collected.hash);
    transport.close().await;
    Ok(())
}

/// Asks a peer for the newest checkpoint, and follows redirections to the coordinator.
async fn ask(
    transport: &Transport,
    events: &mut mpsc::Receiver<TransportEvent>,
    first: Member,
) -> anyhow::Result<SavedCheckpoint> {
    let mut asked = first;
    for _ in 0..HOPS {
        send(transport, asked)?;
        match timeout(ANSWER, answer(events, asked.peer)).await {
            Err(_) => bail!("{} does not answer", asked.peer),
            Ok(Message::Checkpoint { newest: Some(newest) }) => return Ok(newest),
            Ok(Message::CoordinatorMoved { coordinator, addresses, .. })
                if coordinator != asked =>
            {
                transport.remember(coordinator.peer, &addresses);
                asked = coordinator;
            }
            Ok(_) => bail!("the run has no complete checkpoint yet"),
        }
    }
    bail!("the run has no coordinator at the moment: try again in a minute")
}

fn send(transport: &Transport, to: Member) -> anyhow::Result<()> {
    let (era, term, message) = (Era(0), Term(0), Message::CheckpointRequest);
    let envelope = Envelope { from: LIFE, to: to.incarnation, era, term, message };
    transport.send_control(to.peer, wire::encode(&envelope)?)?;
    Ok(())
}

/// The next answer of a peer to the request, or an empty one if the transport is closed.
async fn answer(events: &mut mpsc::Receiver<TransportEvent>, asked: PeerId) -> Message {
    while let Some(event) = events.recv().await {
        let TransportEvent::Control { member, bytes } = event else { continue };
        let Ok(envelope) = wire::decode::<Envelope>(&bytes) else { continue };
        let answers = matches!(
            envelope.message,
            Message::Checkpoint { .. } | Message::CoordinatorMoved { .. }
        );
        if member.peer == asked && answers {
            return envelope.message;
        }
    }
    Message::Checkpoint { newest: None }
}
