//! The files of one run's admission.

use std::fs::{self, File};
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

use crate::whole_file;

/// The most bytes of one of the files that are read.
const LARGEST: u64 = 1 << 20;

/// The file in a data directory that names the run its peer last took part in.
const CURRENT: &str = "run";

/// One run's folder.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    path: PathBuf,
}

/// The run and its rules, for commands that have no manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptRules {
    /// The run.
    pub(crate) run: RunId,
    /// Whom it lets in, and whose key says so.
    pub(crate) admission: Admission,
}

/// A ticket that was made here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Issued {
    /// Which.
    pub(crate) id: TicketId,
    /// Until when it can be used.
    pub(crate) expires: UnixTime,
    /// How often.
    pub(crate) uses: u16,
    /// As it is passed on.
    pub(crate) text: String,
}

impl Store {
    /// The folder of a run in a data directory.
    pub(crate) fn of(data_dir: &Path, run: RunId) -> Self {
        Self::in_run(&data_dir.join("runs").join(run.to_string()))
    }

    /// The same in the folder that the run has.
    pub(super) fn in_run(path: &Path) -> Self {
        Self { path: path.join("admission") }
    }

    /// The folder of the run that the peer of a data directory last took part in.
    ///
    /// # Errors
    /// When it took part in none.
    pub(crate) fn current(data_dir: &Path) -> anyhow::Result<Self> {
        let path = data_dir.join(CURRENT);
        let text = read_capped(&path)?.with_context(|| {
            format!(
                "no peer ever took part in a run with --data-dir {}: name that of a peer of the run, \
                 or start the run first",
                data_dir.display()
            )
        })?;
        let run = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok());
        let run =
            run.with_context(|| format!("{} is damaged: start the peer again", path.display()));
        Ok(Self::of(data_dir, run?))
    }

    /// Where the claims of the run's tickets are written down.
    pub(crate) fn claims(&self) -> PathBuf {
        self.path.join("claims")
    }

    /// Where peers of the run were found.
    pub(crate) fn peers(&self) -> PathBuf {
        self.path.join("peers")
    }

    /// Notes the run's rules, and that this is the run now.
    pub(super) fn remember(&self, rules: &Rules) -> anyhow::Result<()> {
        let failed = || format!("{} cannot be made", self.path.display());
        fs::create_dir_all(&self.path).with_context(failed)?;
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
    /// When they cannot be read.
    pub(crate) fn rules(&self) -> anyhow::Result<KeptRules> {
        let path = self.path.join("rules.json");
        read_json(&path)?.with_context(|| format!("{} is not there", path.display()))
    }

    /// What this peer was let in by, if it was given anything.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn certificate(&self) -> anyhow::Result<Option<Signed>> {
        read_signed(&self.path.join("certificate"))
    }

    /// Keeps what this peer was let in by.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(super) fn store_certificate(&self, certificate: &Signed) -> anyhow::Result<()> {
        write_whole(&self.path.join("certificate"), &wire::encode(certificate)?)
    }

    /// The newest roster that was written here.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn access_list(&self) -> anyhow::Result<Option<Signed>> {
        read_signed(&self.path.join("access-list"))
    }

    /// Writes a roster; a running peer notices.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(crate) fn store_access_list(&self, access_list: &Signed) -> anyhow::Result<()> {
        write_whole(&self.path.join("access-list"), &wire::encode(access_list)?)
    }

    /// The tickets that were made here, the oldest first.
    ///
    /// # Errors
    /// When the list cannot be read.
    pub(crate) fn tickets(&self) -> anyhow::Result<Vec<Issued>> {
        Ok(read_json(&self.path.join("tickets.json"))?.unwrap_or_default())
    }

    /// Writes the list of tickets.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(crate) fn keep_tickets(&self, tickets: &[Issued]) -> anyhow::Result<()> {
        write_whole(&self.path.join("tickets.json"), &serde_json::to_vec_pretty(tickets)?)
    }

    /// Where the peer was last reached by others, one address a line.
    pub(crate) fn addresses(&self) -> anyhow::Result<Vec<String>> {
        let text = read_capped(&self.path.join("addresses"))?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
    }

    /// Notes where others reach this peer.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(crate) fn keep_addresses(&self, addresses: &[PeerAddress]) -> anyhow::Result<()> {
        let lines: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        write_whole(&self.path.join("addresses"), lines.join("\n").as_bytes())
    }

    /// For as long as it is held, no other command changes the list of tickets or the roster.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn lock(&self) -> anyhow::Result<File> {
        let path = self.path.join("lock");
        let lock = File::create(&path).with_context(|| path.display().to_string())?;
        lock.lock().with_context(|| path.display().to_string())?;
        Ok(lock)
    }
}

/// A file that is there whole or not at all, for its owner alone.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    whole_file::write(path, bytes).with_context(|| format!("{} cannot be written", path.display()))
}

/// A file's bytes; none where there is no file.
pub(super) fn read_capped(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes)) {
        Ok(_) if bytes.len() as u64 > LARGEST => bail!("{} is too large", path.display()),
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{} cannot be read", path.display())),
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
