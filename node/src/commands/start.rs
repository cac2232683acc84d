//! `shoal start`: the first peer of a run.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use shoal_protocol::ids::Member;
use shoal_protocol::net::transport::Run;

use super::training::{self, Serving};
use crate::cli::StartOptions;
use crate::config::RunConfig;
use crate::dataset;
use crate::driver::home::{Files, Home};
use crate::driver::observer::Observer;
use crate::driver::{self, AnchorPart, Network, Office, Outcome, Setup};
use crate::events::RunEvent;
use crate::exit::{Exit, ExitWith};
use crate::network::Links;
use crate::progress;

/// Starts a run, keeps its ledger, hosts stages and waits for others.
///
/// # Errors
/// When the configuration, text, data directory or an address cannot be used, or the run fails.
pub fn run(options: StartOptions) -> anyhow::Result<()> {
    training::runtime()?.block_on(start(options))
}

async fn start(options: StartOptions) -> anyhow::Result<()> {
    let StartOptions { config, peer: options, address_file, wait_for, out } = options;
    let config = RunConfig::load(&config).exit_with(Exit::Usage)?;
    let home = Home::open(&options.data_dir).exit_with(Exit::Usage)?;
    let identity = home.identity()?;
    let me = Member { peer: identity.peer_id(), incarnation: home.next_incarnation()? };
    let dataset = dataset::prepare(&config, home.path())?;
    let manifest = Arc::new(dataset.manifest);
    let files = Files::default();
    files.offer(manifest.tokens.hash, dataset.token_file);
    let id = manifest.run_id();
    let run = Run { id, manifest: manifest.to_bytes() };
    let links = Links::open(&identity, me.incarnation, Some(run), &options, &files)?;
    let serving = Serving::start(options.metrics).await?;
    let mut observer = Observer::new(options.compute.events.as_ref(), "training")?;
    let address = links.join_address(me.peer).context("no address to be joined at")?.to_string();
    if let Some(path) = &address_file {
        publish(path, &address)?;
    }
    progress::say(&format!("others join with: shoal join {address}"));
    observer.note(&RunEvent::Listening { address });
    let Links { transport, events, search } = links;
    search.discovery.join(id).await;
    let out = out.unwrap_or_else(|| home.path().join("runs").join(id.to_string()));
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
        office: Office {
            anchor: Some(AnchorPart::Founds),
            wait_for: wait_for.map_or(1, NonZeroUsize::get),
            archive: Some(out.clone()),
            keeper: None,
        },
    };
    let outcome = driver::run(setup, &mut observer).await;
    search.close().await;
    serving.close().await;
    match outcome? {
        Outcome::Finished => {}
        Outcome::Drained => {
            progress::say("the run stands still until this peer is started again");
            return Ok(());
        }
        Outcome::Complete => {
            progress::say(&format!("the run is complete: its checkpoint is in {}", out.display()));
            return Ok(());
        }
        Outcome::Expelled | Outcome::Orphaned => {
            bail!("this peer was expelled from the run that it keeps: start it again")
        }
    }
    training::write_report(&observer, &out)
}

/// Writes the address where a script waits for it: whole at once.
pub(super) fn publish(path: &Path, address: &str) -> anyhow::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let write = || -> std::io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
        writeln!(file, "{address}")?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("the address cannot be written to {}", path.display()))
}
