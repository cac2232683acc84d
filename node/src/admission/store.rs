//! The files of a run's admission.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shoal_protocol::ids::RunId;
use shoal_protocol::manifest::Admission;
use shoal_protocol::net::admission::{Rules, Signed, TicketId, UnixTime};
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::wire;

use crate::data_dir::{self, open_lock};
use crate::whole_file;

/// The most bytes of a file.
const LARGEST: u64 = 1 << 20;

/// The file in a data directory that names the run that its peer last took part in.
const CURRENT: &str = "run";

/// The admission folder of one run.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    path: PathBuf,
}

/// The run and its admission rules, for commands that have no manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptRules {
    /// The run.
    pub(crate) run: RunId,
    /// The admission mode, and the issuer's key.
    pub(crate) admission: Admission,
}

/// A ticket that was issued here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Issued {
    /// Its number.
    pub(crate) id: TicketId,
    /// The end of its validity.
    pub(crate) expires: UnixTime,
    /// How many peers can redeem it.
    pub(crate) uses: u16,
    /// The ticket's text.
    pub(crate) text: String,
}

impl Store {
    /// The folder of a run in a data directory.
    pub(crate) fn of(data_dir: &Path, run: RunId) -> Self {
        Self::in_run(&data_dir.join("runs").join(run.to_string()))
    }

    /// The folder inside a run's own folder.
    pub(super) fn in_run(path: &Path) -> Self {
        Self { path: path.join("admission") }
    }

    /// The folder of the run that the peer of a data directory last took part in.
    ///
    /// # Errors
    /// If it took part in none.
    pub(crate) fn current(data_dir: &Path) -> anyhow::Result<Self> {
        let path = data_dir.join(CURRENT);
        let text = read_capped(&path)?.with_context(|| {
            format!(
                "no peer with --data-dir {} has taken part in a run: choose the data \
                 directory of a peer of the run, or start the run first",
                data_dir.display()
            )
        })?;
        let run = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok());
        let run =
            run.with_context(|| format!("{} is damaged: start the peer again", path.display()));
        Ok(Self::of(data_dir, run?))
    }

    /// Path of the redemption log.
    pub(crate) fn redemptions(&self) -> PathBuf {
        self.path.join("claims")
    }

    /// Path of the list of known peers.
    pub(crate) fn peers(&self) -> PathBuf {
        self.path.join("peers")
    }

    /// Stores the run's rules, and makes it the current run.
    pub(super) fn remember(&self, rules: &Rules) -> anyhow::Result<()> {
        let failed = || format!("cannot create {}", self.path.display());
        data_dir::make(&self.path).with_context(failed)?;
        let Rules { run, admission } = rules.clone();
        let kept = serde_json::to_vec_pretty(&KeptRules { run, admission })?;
        write_whole(&self.path.join("rules.json"), &kept)?;
        let data_dir =
            self.path.ancestors().nth(3).context("a run's folder is in a data directory")?;
        write_whole(&data_dir.join(CURRENT), run.to_string().as_bytes())
    }

    /// The run's rules.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) fn rules(&self) -> anyhow::Result<KeptRules> {
        let path = self.path.join("rules.json");
        read_json(&path)?.with_context(|| format!("{} is missing", path.display()))
    }

    /// The certificate that admits this peer, if it has one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn certificate(&self) -> anyhow::Result<Option<Signed>> {
        read_signed(&self.path.join("certificate"))
    }

    /// Stores the certificate that admits this peer.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn store_certificate(&self, certificate: &Signed) -> anyhow::Result<()> {
        write_whole(&self.path.join("certificate"), &wire::encode(certificate)?)
    }

    /// The stored access list, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn access_list(&self) -> anyhow::Result<Option<Signed>> {
        read_signed(&self.path.join("access-list"))
    }

    /// Stores an access list. A running peer notices it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn store_access_list(&self, access_list: &Signed) -> anyhow::Result<()> {
        write_whole(&self.path.join("access-list"), &wire::encode(access_list)?)
    }

    /// The tickets that were issued here, the oldest first.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) fn tickets(&self) -> anyhow::Result<Vec<Issued>> {
        Ok(read_json(&self.path.join("tickets.json"))?.unwrap_or_default())
    }

    /// Stores the list of tickets.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn keep_tickets(&self, tickets: &[Issued]) -> anyhow::Result<()> {
        write_whole(&self.path.join("tickets.json"), &serde_json::to_vec_pretty(tickets)?)
    }

    /// The addresses at which others last reached this peer, one per line.
    pub(crate) fn addresses(&self) -> anyhow::Result<Vec<String>> {
        let text = read_capped(&self.path.join("addresses"))?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
    }

    /// Stores the addresses at which others reach this peer.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn keep_addresses(&self, addresses: &[PeerAddress]) -> anyhow::Result<()> {
        let lines: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        write_whole(&self.path.join("addresses"), lines.join("\n").as_bytes())
    }

    /// Locks the list of tickets and the access list against other commands.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn lock(&self) -> anyhow::Result<File> {
        let path = self.path.join("lock");
        let lock = open_lock(&path).with_context(|| path.display().to_string())?;
        lock.lock().with_context(|| path.display().to_string())?;
        Ok(lock)
    }
}

/// Writes a file atomically, readable by its owner only.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    whole_file::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a file; none if it is missing.
pub(super) fn read_capped(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes)) {
        Ok(_) if bytes.len() as u64 > LARGEST => bail!("{} is too large", path.display()),
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    let damaged = || format!("{} is damaged", path.display());
    read_capped(path)?.map(|bytes| serde_json::from_slice(&bytes).with_context(damaged)).transpose()
}

fn read_signed(path: &Path) -> anyhow::Result<Option<Signed>> {
    let damaged = || format!("{} is damaged: remove it", path.display());
    read_capped(path)?.map(|bytes| wire::decode(&bytes).with_context(damaged)).transpose()
}
