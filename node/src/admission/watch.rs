//! Keeps the gate and the folder alike: what the commands write is learned, what others tell is written.

use std::time::Duration;

use shoal_protocol::net::admission::Gate;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Store;

/// How often it is looked whether a command has written a roster. Looking is the one way that works on every
/// file system.
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
            if changed { write_down(&gate, &folder) } else { look(&gate, &folder) }
        });
        if let Ok(Err(error)) = looked.await {
            tracing::warn!(%error, "the folder of the run's admission cannot be used");
        }
    }
}

/// Learns what a command has written.
fn look(gate: &Gate, folder: &Store) -> anyhow::Result<()> {
    if let Some(written) = folder.access_list()? {
        gate.learn(&written)?;
    }
    Ok(())
}

/// Writes what the gate knows better than the folder.
pub(super) fn write_down(gate: &Gate, folder: &Store) -> anyhow::Result<()> {
    // A command may have written one that is newer still.
    look(gate, folder)?;
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
