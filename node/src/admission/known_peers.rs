//! Known peers of a run, as a fallback when the given addresses do not answer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use shoal_protocol::ids::PeerId;
use shoal_protocol::net::discovery::{Host, PeerAddress};

use super::Store;
use super::store::{read_capped, write_whole};

/// The most known peers. A new one replaces the oldest.
const PEERS: usize = 64;

/// Addresses per peer.
const ADDRESSES: usize = 2;

/// The known peers, and the file that stores them.
#[derive(Debug)]
pub(crate) struct KnownPeers {
    path: PathBuf,
    /// Peers with their order of contact and their addresses.
    met: BTreeMap<PeerId, (u64, Vec<PeerAddress>)>,
    count: u64,
}

impl KnownPeers {
    /// Reads the peers of a file, which may be missing.
    pub(crate) fn open(path: PathBuf) -> Self {
        let mut known = Self { path, met: BTreeMap::new(), count: 0 };
        // The file begins with the newest.
        for address in read(&known.path).into_iter().rev() {
            known.insert(address.peer, vec![address]);
        }
        known
    }

    /// Records the addresses of a peer.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn meet(&mut self, peer: PeerId, at: &[SocketAddr]) -> anyhow::Result<()> {
        let places: Vec<PeerAddress> =
            at.iter().take(ADDRESSES).map(|&address| PeerAddress::new(address, peer)).collect();
        if places.is_empty() || self.met.get(&peer).is_some_and(|(_, known)| *known == places) {
            return Ok(());
        }
        self.met.remove(&peer);
        self.insert(peer, places);
        let mut last_first: Vec<_> = self.met.values().collect();
        last_first.sort_by_key(|(order, _)| std::cmp::Reverse(*order));
        let lines = last_first.iter().flat_map(|(_, places)| places).map(ToString::to_string);
        write_whole(&self.path, lines.collect::<Vec<_>>().join("\n").as_bytes())
    }

    fn insert(&mut self, peer: PeerId, places: Vec<PeerAddress>) {
        self.count += 1;
        let count = self.count;
        self.met.entry(peer).or_insert((count, Vec::new())).1.extend(places);
        if self.met.len() > PEERS {
            let first = self.met.iter().min_by_key(|(_, (order, _))| *order);
            if let Some(first) = first.map(|(peer, _)| *peer) {
                self.met.remove(&first);
            }
        }
    }
}

/// Known peers of those runs in a data directory that the given peers took part in.
pub(crate) fn companions(data_dir: &Path, of: &[PeerId]) -> Vec<PeerAddress> {
    let Ok(runs) = std::fs::read_dir(data_dir.join("runs")) else { return Vec::new() };
    let mut all = Vec::new();
    for run in runs.flatten() {
        let found = read(&Store::in_run(&run.path()).peers());
        if found.iter().any(|address| of.contains(&address.peer)) {
            all.extend(found);
        }
    }
    all
}

/// Known peers of the run that the peer of a data directory last took part in.
pub(crate) fn met(data_dir: &Path) -> Vec<PeerAddress> {
    Store::current(data_dir).map_or_else(|_| Vec::new(), |folder| read(&folder.peers()))
}

/// The addresses in a file. Invalid lines are skipped.
fn read(path: &Path) -> Vec<PeerAddress> {
    let text = read_capped(path).ok().flatten().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let addresses = text.lines().filter_map(|line| line.parse::<PeerAddress>().ok());
    addresses
        .filter(|address| matches!(address.host, Host::Ip(_)))
        .take(PEERS * ADDRESSES)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn at(port: u16) -> [SocketAddr; 1] {
        [SocketAddr::from(([192, 0, 2, 1], port))]
    }

    #[test]
    fn the_newest_peers_are_kept_and_come_first() {
        let data_dir = tempfile::tempdir().expect("a folder");
        let folder = data_dir.path().join("runs/r/admission");
        std::fs::create_dir_all(&folder).expect("room for a folder");
        let path = folder.join("peers");
        let mut known = KnownPeers::open(path.clone());
        for number in 0..=PEERS as u8 {
            known.meet(peer(number), &at(1)).expect("written");
        }
        known.meet(peer(5), &at(2)).expect("written");
        let again = read(&path);
        assert_eq!(again.len(), PEERS);
        assert_eq!(again[0], PeerAddress::new(at(2)[0], peer(5)));
        assert!(again.iter().all(|address| address.peer != peer(0)), "the oldest is dropped");

        assert_eq!(companions(data_dir.path(), &[peer(7)]), again);
        assert!(companions(data_dir.path(), &[peer(200)]).is_empty());
        let reopened = KnownPeers::open(path);
        assert_eq!(reopened.met.len(), PEERS);
    }

    #[test]
    fn a_damaged_file_has_no_peers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("peers");
        std::fs::write(&path, b"/ip4/\xff\n\ngarbage").expect("written");
        assert!(read(&path).is_empty());
    }
}
