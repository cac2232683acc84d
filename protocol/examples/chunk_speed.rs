//! Measures the transfer of a file from several holders.
//!
//!     chunk_speed serve ADDRESS FILE [lie]
//!     chunk_speed fetch HASH LENGTH TO PEER@ADDRESS...
//!
//! The server prints peer, hash and length as JSON, and ends when its input does. With `lie`, it
//! sends the correct hashes of the pieces, and then zeros. The client prints its result as JSON.

mod common;

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use shoal_protocol::ids::{ContentHash, PeerId};
use shoal_protocol::net::transport::{Congestion, FileSource, NoFiles, OpenFile};

use common::{bind, take_until_input_ends};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", address, file] => runtime.block_on(serve(address.parse()?, file, false)),
        ["serve", address, file, "lie"] => runtime.block_on(serve(address.parse()?, file, true)),
        ["fetch", hash, length, to, ref holders @ ..] => {
            runtime.block_on(fetch(hash.parse()?, length.parse()?, Path::new(to), holders))
        }
        _ => Err("unknown arguments: see the beginning of the source".into()),
    }
}

/// One file under its hash.
struct One {
    path: PathBuf,
    hash: ContentHash,
    length: u64,
    /// Whether to send wrong bytes after the first request, which is for the hashes of the pieces.
    corrupt: bool,
    asked: AtomicBool,
}

impl FileSource for One {
    fn open(&self, hash: &ContentHash) -> Option<OpenFile> {
        let begun = self.asked.swap(true, Ordering::Relaxed);
        let path = if self.corrupt && begun { Path::new("/dev/zero") } else { &self.path };
        let file = File::open(path).ok().filter(|_| *hash == self.hash)?;
        Some(OpenFile { file, length: self.length })
    }
}

async fn serve(address: SocketAddr, file: &str, corrupt: bool) -> Result<()> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(file)?)?;
    let (hash, length) = (ContentHash::from(hasher.finalize()), std::fs::metadata(file)?.len());
    let one = One { path: file.into(), hash, length, corrupt, asked: AtomicBool::new(false) };
    let (transport, events) = bind(address, Congestion::default(), Arc::new(one))?;
    let at = transport.local_addresses()[0];
    println!(
        "{{\"peer\": \"{}@{at}\", \"hash\": \"{hash}\", \"length\": {length}}}",
        transport.peer_id()
    );
    take_until_input_ends(&transport, events).await;
    Ok(())
}

async fn fetch(hash: ContentHash, length: u64, to: &Path, holders: &[&str]) -> Result<()> {
    let anywhere = ([0, 0, 0, 0], 0).into();
    let (transport, _events) = bind(anywhere, Congestion::default(), Arc::new(NoFiles))?;
    let mut peers: Vec<PeerId> = Vec::new();
    for holder in holders {
        let (peer, address) = holder.split_once('@').ok_or("a holder is PEER@ADDRESS")?;
        peers.push(peer.parse()?);
        transport.connect(peer.parse()?, &[address.parse()?]).await?;
    }
    let start = Instant::now();
    transport.fetch_file(&peers, hash, length, to).await?;
    println!(
        "{{\"seconds\": {:.4}, \"received\": {}, \"wrong_files\": {}}}",
        start.elapsed().as_secs_f64(),
        transport.traffic().file.received.0,
        transport.traffic().wrong_files,
    );
    transport.close().await;
    Ok(())
}
