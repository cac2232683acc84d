//! Synchronizes the gate and the folder: reads the commands' changes, and stores data that other
//! peers sent.

use std::time::Duration;

use shoal_protocol::net::admission::Gate;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Store;

/// Interval at which the folder is checked for a new access list. Polling is the only method that
/// works on every file system.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs until it is stopped.
pub(crate) async fn keep(gate: Gate, folder: Store, stop: CancellationToken) {
    let mut changes = gate.changes();
    loop {
        let changed = tokio::select! {
            () = stop.cancelled() => return,
            changed = timeout(LOOK_EVERY, changes.changed()) => changed.is_ok(),
        };
        let (gate, folder) = (gate.clone(), folder.clone());
        let looked = tokio::task::spawn_blocking(move || {
            if changed { store_changes(&gate, &folder) } else { read_changes(&gate, &folder) }
        });
        if let Ok(Err(error)) = looked.await {
            tracing::warn!(%error, "cannot synchronize the folder of the run's admission");
        }
    }
}

/// Reads a new access list from the folder.
fn read_changes(gate: &Gate, folder: &Store) -> anyhow::Result<()> {
    if let Some(written) = folder.access_list()? {
        gate.learn(&written)?;
    }
    Ok(())
}

/// Stores the gate's documents that the folder lacks.
pub(super) fn store_changes(gate: &Gate, folder: &Store) -> anyhow::Result<()> {
    // A command may have written a newer list.
    read_changes(gate, folder)?;
    let (_, access_list) = gate.access_list();
    if let Some(access_list) = access_list
        && folder.access_list()?.as_ref() != Some(&access_list)
    {
        folder.store_access_list(&access_list)?;
    }
    if let Some(certificate) = gate.pass().certificate
        && folder.certificate()?.as_ref() != Some(&certificate)
    {
        folder.store_certificate(&certificate)?;
    }
    Ok(())
}
