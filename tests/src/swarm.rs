//! A swarm of `shoal start` and `shoal join`, each a process on loopback.

use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::Value;
use tempfile::TempDir;

use crate::process::{Outcome, Process};
use crate::program::shoal;
use crate::run::Trained;

/// The variable that names the moment at which a process dies (`node/src/fault_point.rs`).
pub const DIE_AT: &str = "SHOAL_DIE_AT";

/// A wait in each pass, which makes steps longer.
pub const SLOW: &[&str] = &["--slow-down", "15"];

/// The peers of a run. The first one is the coordinator.
#[derive(Debug)]
pub struct Swarm {
    /// In the order of their start.
    pub peers: Vec<Process>,
    /// The address that joins the run.
    pub address: String,
    homes: PathBuf,
    /// The folder, where drop removes it.
    scratch: Option<Arc<TempDir>>,
}

impl Swarm {
    /// Starts a run with one peer. `flags` are further flags of `shoal start`.
    ///
    /// # Panics
    /// When the peer does not listen.
    #[must_use]
    pub fn start(config: &Path, flags: &[&str]) -> Self {
        let scratch = tempfile::tempdir().expect("room for a folder");
        let swarm = Self::start_in(scratch.path(), config, flags);
        Self { scratch: Some(Arc::new(scratch)), ..swarm }
    }

    /// The same with the peers' data directories, old or new, in a folder that remains.
    ///
    /// # Panics
    /// When the peer does not listen.
    #[must_use]
    pub fn start_in(homes: &Path, config: &Path, flags: &[&str]) -> Self {
        let command = start_command(config, &homes.join("peer-0"), &homes.join("out"));
        Self::started_by(command, homes, flags)
    }

    /// The same with a first peer that dies at a moment, as in [`Self::join_to_die`].
    ///
    /// # Panics
    /// When the peer does not listen.
    #[must_use]
    pub fn start_to_die(homes: &Path, config: &Path, moment: &str, flags: &[&str]) -> Self {
        let mut command = start_command(config, &homes.join("peer-0"), &homes.join("out"));
        command.env(DIE_AT, moment);
        Self::started_by(command, homes, flags)
    }

    /// The same with a first peer started by a command that [`start_command`] made.
    ///
    /// # Panics
    /// When the peer does not listen.
    #[must_use]
    pub fn started_by(mut command: Command, homes: &Path, flags: &[&str]) -> Self {
        if !flags.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        command.arg("--no-mdns").args(flags);
        let mut first = Process::start("peer-0", command);
        let address = first.event("listening")["address"].as_str().expect("text").to_owned();
        Self { peers: vec![first], address, homes: homes.to_owned(), scratch: None }
    }

    /// A slow swarm of a number of peers with automatic stages, at a given step.
    ///
    /// # Panics
    /// When the step is not committed.
    #[must_use]
    pub fn slow_at(config: &Path, peers: usize, step: u64) -> Self {
        let members = peers.to_string();
        let mut swarm = Self::start(config, &[&["--wait-for", &members], SLOW].concat());
        for _ in 1..peers {
            swarm.join(SLOW);
        }
        swarm.reach(step);
        swarm
    }

    /// Waits until a step is committed.
    ///
    /// # Panics
    /// When it is not.
    pub fn reach(&mut self, step: u64) {
        while self.peers[0].event("committed")["step"] != step {}
    }

    /// Adds a peer. `flags` are further flags of `shoal join`.
    pub fn join(&mut self, flags: &[&str]) {
        let (address, index) = (self.address.clone(), self.peers.len());
        let peer = self.newcomer(&address, index, &[&["--listen", "127.0.0.1:0"], flags].concat());
        self.peers.push(peer);
    }

    /// Adds a peer that dies at a moment that `node/src/fault_point.rs` names: `NAME:N` is its Nth
    /// occurrence.
    pub fn join_to_die(&mut self, moment: &str, flags: &[&str]) {
        let index = self.peers.len();
        let mut command = join_command(&self.address, &self.data_dir(index));
        command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(flags).env(DIE_AT, moment);
        self.peers.push(Process::start(&format!("peer-{index}"), command));
    }

    /// Adds a peer that computes wrongly, as `node/src/wrong_work.rs` says: `WHAT:N` in every Nth microbatch.
    pub fn join_to_err(&mut self, error: &str, flags: &[&str]) {
        let index = self.peers.len();
        let mut command = join_command(&self.address, &self.data_dir(index));
        command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(flags);
        command.env("SHOAL_COMPUTES_WRONG", error);
        self.peers.push(Process::start(&format!("peer-{index}"), command));
    }

    /// Starts a process that joins at an address with the data directory of peer number `index`, without
    /// adding it to the swarm.
    #[must_use]
    pub fn newcomer(&self, address: &str, index: usize, flags: &[&str]) -> Process {
        let mut command = join_command(address, &self.data_dir(index));
        command.arg("--no-mdns").args(flags);
        Process::start(&format!("peer-{index}"), command)
    }

    /// The id of peer number `index`, which has been started before.
    ///
    /// # Panics
    /// When the peer has none.
    #[must_use]
    pub fn peer_id(&self, index: usize) -> String {
        let directory = self.data_dir(index);
        let command = shoal(["id".as_ref(), "--data-dir".as_ref(), directory.as_os_str()]);
        Process::start("id", command).end().success().trim().to_owned()
    }

    /// The data directory of peer number `index`, from 0.
    #[must_use]
    pub fn data_dir(&self, index: usize) -> PathBuf {
        self.homes.join(format!("peer-{index}"))
    }

    /// Runs a command that queries peer number `index`.
    #[must_use]
    pub fn ask(&self, index: usize, words: &[&str]) -> Outcome {
        let mut command = shoal(words);
        command.arg("--data-dir").arg(self.data_dir(index));
        Process::start("ask", command).end()
    }

    /// The status that peer number `index` shows.
    ///
    /// # Panics
    /// When it shows none.
    #[must_use]
    pub fn status(&self, index: usize) -> Value {
        let text = self.ask(index, &["status", "--json"]).success();
        serde_json::from_str(&text).expect("JSON")
    }

    /// Waits until every peer has ended successfully, and reads the results.
    ///
    /// # Panics
    /// When a peer fails.
    #[must_use]
    pub fn finish(self) -> Trained {
        for peer in self.peers {
            let _ = peer.end().success();
        }
        let trained = Trained::read(&self.homes.join("out"));
        Trained { _scratch: self.scratch, ..trained }
    }
}

/// `shoal start` with one thread and events on stdout, without `--listen`.
#[must_use]
pub fn start_command(config: &Path, data_dir: &Path, out: &Path) -> Command {
    let mut command = peer_command("start", config.as_os_str(), data_dir);
    command.arg("--out").arg(out);
    command
}

/// `shoal join` with one thread and events on stdout.
#[must_use]
pub fn join_command(address: &str, data_dir: &Path) -> Command {
    peer_command("join", address.as_ref(), data_dir)
}

fn peer_command(command: &str, what: &OsStr, data_dir: &Path) -> Command {
    let mut command = shoal([command.as_ref(), what, "--data-dir".as_ref(), data_dir.as_os_str()]);
    command.args(["--threads", "1", "--device", "cpu", "--events", "-"]);
    command
}

/// An address that no other test uses, for a process that does not report its port. The host is unique to
/// this test process: all of 127.0.0.0/8 is loopback.
#[must_use]
pub fn own_address() -> SocketAddr {
    // Below the range of ephemeral ports.
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    // Process ids have at most 22 bits.
    (Ipv4Addr::new(127, 64 | high, middle, low), port).into()
}
