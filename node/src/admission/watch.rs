//! Keeps the gate and the folder alike: what the commands write is learned, what others tell is written.

use std::time::Duration;

use shoal_protocol::net::admission::Gate;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Folder;

/// How often it is looked whether a command has written a roster. Looking is the one way that works on every
/// file system.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs until it is stopped.
pub(crate) async fn keep(gate: Gate, folder: Folder, stop: CancellationToken) {
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
fn look(gate: &Gate, folder: &Folder) -> anyhow::Result<()> {
    if let Some(written) = folder.roster()? {
        gate.learn(&written)?;
    }
    Ok(())
}

/// Writes what the gate knows better than the folder.
pub(super) fn write_down(gate: &Gate, folder: &Folder) -> anyhow::Result<()> {
    // A command may have written one that is newer still.
    look(gate, folder)?;
    let (_, roster) = gate.roster();
    if let Some(roster) = roster
        && folder.roster()?.as_ref() != Some(&roster)
    {
        folder.keep_roster(&roster)?;
    }
    if let Some(permit) = gate.pass().permit
        && folder.permit()?.as_ref() != Some(&permit)
    {
        folder.keep_permit(&permit)?;
    }
    Ok(())
}
