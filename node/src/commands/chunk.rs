//! `shoal chunk`: lists, verifies and fetches the content-addressed files that peers exchange.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use futures::future::join_all;
use shoal_protocol::ids::{ContentHash, PeerId};
use shoal_protocol::units::Bytes;

use super::client::{self, Client};
use super::training;
use crate::address::JoinAddress;
use crate::cli::{ChunkCommand, ChunkGetArgs};
use crate::data_dir::Files;
use crate::driver::chunks::{self, Chunk, Content, State};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Runs the subcommand.
///
/// # Errors
/// If there is no data directory, a file in it is damaged, or a file cannot be fetched.
pub(super) fn run(command: ChunkCommand) -> anyhow::Result<()> {
    match command {
        ChunkCommand::Ls(args) => list(&args.data_dir, args.json),
        ChunkCommand::Verify(args) => verify(&args.data_dir),
        ChunkCommand::Get(args) => training::runtime()?.block_on(get(&args)),
    }
}

fn held(data_dir: &Path) -> anyhow::Result<Vec<Chunk>> {
    if !data_dir.is_dir() {
        let text =
            format!("there is no data directory {}: set it with --data-dir", data_dir.display());
        return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
    }
    Ok(chunks::list(data_dir))
}

fn list(data_dir: &Path, json: bool) -> anyhow::Result<()> {
    let all = held(data_dir)?;
    if json {
        outln!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        all.iter().for_each(|chunk| outln!("{}", line(chunk)));
    }
    Ok(())
}

fn line(chunk: &Chunk) -> String {
    let hash = chunk.hash.map_or_else(|| "-".to_owned(), |hash| hash.to_string());
    let state = match chunk.state {
        State::Whole => "whole",
        State::Partial => "partial",
        State::Missing => "missing",
    };
    let content = match &chunk.content {
        Content::Text => "a text's tokens".to_owned(),
        Content::Checkpoint { run, version, stage } => {
            let stage = stage.map_or_else(|| "all stages".to_owned(), |one| format!("stage {one}"));
            let run = run.map_or_else(String::new, |run| format!(", run {run}"));
            format!("version {version}, {stage}{run}")
        }
    };
    format!("{hash:64} {:>12} {state:7} {content}: {}", chunk.bytes, chunk.path.display())
}

/// The result of checking a file.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    /// The hash differs, or the file is missing or unreadable; with the reason.
    Bad(String),
    /// No hash is known for it.
    Unknown,
    /// It is being fetched.
    Partial,
}

/// Checks one file.
fn judge(chunk: &Chunk) -> Verdict {
    match (chunk.state, chunk.hash) {
        (State::Partial, _) => Verdict::Partial,
        (State::Whole, None) => Verdict::Unknown,
        (State::Missing, _) => Verdict::Bad("it is missing".to_owned()),
        (State::Whole, Some(hash)) => match chunks::hash(&chunk.path) {
            Ok(found) if found == hash => Verdict::Right,
            Ok(found) => Verdict::Bad(format!("its bytes hash to {found} instead of {hash}")),
            Err(error) => Verdict::Bad(error.to_string()),
        },
    }
}

fn verify(data_dir: &Path) -> anyhow::Result<()> {
    let all = held(data_dir)?;
    let mut verdicts = Vec::with_capacity(all.len());
    for chunk in &all {
        let verdict = judge(chunk);
        if let Verdict::Bad(defect) = &verdict {
            outln!("bad: {}: {defect}", chunk.path.display());
        }
        verdicts.push(verdict);
    }
    let count = |of: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| of(verdict)).count();
    let bad = count(|verdict| matches!(verdict, Verdict::Bad(_)));
    outln!(
        "{} right, {bad} bad, {} without a known hash, {} partial",
        count(|verdict| *verdict == Verdict::Right),
        count(|verdict| *verdict == Verdict::Unknown),
        count(|verdict| *verdict == Verdict::Partial),
    );
    if bad > 0 {
        let text = format!(
            "{bad} of {} files are bad: remove them, and they are fetched again",
            all.len()
        );
        return Err(anyhow::anyhow!(text)).exit_with(Exit::Corrupt);
    }
    Ok(())
}

async fn get(args: &ChunkGetArgs) -> anyhow::Result<()> {
    let ChunkGetArgs { hash, from, out } = args;
    let out = out.clone().unwrap_or_else(|| PathBuf::from(hash.to_string()));
    if out.exists() {
        let text = format!("{} exists: choose another file with --out", out.display());
        return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
    }
    let client = Client::open(&Files::default())?;
    let fetched = fetch(&client, *hash, from, &out).await;
    client.transport.close().await;
    let length = fetched?;
    outln!("{hash}: {} ({})", out.display(), Bytes(length));
    Ok(())
}

/// Fetches the file from the peers that have it. Peers may report different lengths; a wrong length
/// fails, and the next one is tried.
async fn fetch(
    client: &Client,
    hash: ContentHash,
    from: &[JoinAddress],
    out: &Path,
) -> anyhow::Result<u64> {
    let mut failure = None;
    let mut holders: BTreeMap<u64, Vec<PeerId>> = BTreeMap::new();
    for asked in join_all(from.iter().map(|address| ask(client, hash, address))).await {
        match asked {
            Ok((peer, length)) => holders.entry(length).or_default().push(peer),
            Err(error) => {
                tracing::warn!(%error, "cannot fetch from a peer");
                failure = Some(error);
            }
        }
    }
    let mut holders: Vec<(u64, Vec<PeerId>)> = holders.into_iter().collect();
    holders.sort_by_key(|(_, peers)| std::cmp::Reverse(peers.len()));
    for (length, peers) in holders {
        match client.transport.fetch_file(&peers, hash, length, out).await {
            Ok(()) => return Ok(length),
            Err(error) => failure = Some(error.into()),
        }
    }
    match failure {
        Some(error) => Err(error),
        None => bail!("there is no peer to fetch from"),
    }
}

/// Asks a peer for the length of the file.
async fn ask(
    client: &Client,
    hash: ContentHash,
    address: &JoinAddress,
) -> anyhow::Result<(PeerId, u64)> {
    let (at, _) = client::reach(&client.transport, address).await?;
    let length = client.transport.file_length(at.peer, hash).await;
    let hint = || format!("{at} cannot send it (`shoal chunk ls` there lists its files)");
    Ok((at.peer, length.with_context(hint)?))
}
