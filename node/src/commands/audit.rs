//! `shoal audit`: checks the evidence on which peers are out of a run, from the log in an anchor's data directory.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use serde::Serialize;
use shoal_protocol::ids::{PeerId, RunId};
use shoal_protocol::message::{Basis, Conviction, Sealer};
use shoal_protocol::net::Identity;

use super::unfinished_run::last_run;
use crate::anchor::kept_history;
use crate::cli::AuditArgs;
use crate::exit::{Exit, ExitWith};
use crate::step_count::StepCount;
use crate::terminal::outln;

/// A conviction and what became of its check.
#[derive(Debug, Serialize)]
struct Checked {
    /// The peer.
    peer: PeerId,
    /// The step of its work, as the log lines count it.
    step: u64,
    /// The stage of its work.
    stage: u16,
    /// The version that the run went back to, or further.
    back: u64,
    /// What it did.
    charge: &'static str,
    /// What that rests on.
    basis: Option<String>,
    /// Why the evidence shows nothing.
    error: Option<String>,
}

/// Checks the evidence of all convictions in the log of the last run of a data directory.
///
/// # Errors
/// If there is no log, or some evidence shows nothing.
pub(super) fn run(args: &AuditArgs) -> anyhow::Result<()> {
    let (run, convictions) = convictions_in(&args.data_dir).exit_with(Exit::Usage)?;
    let sealer = Sealer::new(run, Arc::new(Identity::ephemeral()));
    let checked: Vec<Checked> = convictions.iter().map(|one| check(one, &sealer)).collect();
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&checked)?);
    } else {
        describe(run, &checked);
    }
    let wrong = checked.iter().filter(|one| one.error.is_some()).count();
    if wrong > 0 {
        bail!("the evidence against {wrong} of {} peers shows nothing", checked.len());
    }
    Ok(())
}

/// The run that the peer of a data directory took part in last, and the convictions in its log.
fn convictions_in(data_dir: &Path) -> anyhow::Result<(RunId, Vec<Conviction>)> {
    let place = data_dir.display();
    let identity = Identity::load_or_create(&data_dir.join("identity"))
        .with_context(|| format!("{place} is not the data directory of a peer"))?;
    let (folder, manifest) =
        last_run(data_dir).with_context(|| format!("no run has begun in {place}"))?;
    let history = kept_history(&folder.join("log"), identity.peer_id(), manifest.first_version());
    let history = history.with_context(|| {
        format!(
            "no log of run {:.8} in {place}: its anchors have it, that is the first peer and those with --anchor",
            manifest.run_id().to_string()
        )
    })?;
    Ok((manifest.run_id(), history.stays.convictions().cloned().collect()))
}

fn check(conviction: &Conviction, sealer: &Sealer) -> Checked {
    let Conviction { peer, step, stage, back, evidence } = conviction;
    let result = conviction.check(sealer);
    Checked {
        peer: *peer,
        step: StepCount::through(step.0).number(),
        stage: stage.0,
        back: back.0,
        charge: evidence.charge(),
        basis: result.as_ref().ok().copied().map(words),
        error: result.err().map(|error| error.to_string()),
    }
}

fn words(basis: Basis) -> String {
    match basis {
        Basis::OwnSignatures => "proved by two signatures of the peer itself".to_owned(),
        Basis::Findings { agree, voices } => format!(
            "{agree} of {voices} voices came to the same; the signature of each replica is valid"
        ),
        Basis::Coordinator => {
            "rests on the word of the coordinator, since no signatures decide it".to_owned()
        }
    }
}

fn describe(run: RunId, checked: &[Checked]) {
    let run = run.to_string();
    if checked.is_empty() {
        outln!("no peer was convicted in run {run:.8}");
    }
    for Checked { peer, step, stage, back, charge, basis, error } in checked {
        outln!("{peer} {charge}, in step {step} at stage {stage}");
        match (basis, error) {
            (_, Some(error)) => outln!("  the evidence shows nothing: {error}"),
            (basis, None) => outln!("  {}", basis.as_deref().unwrap_or_default()),
        }
        outln!("  the run went back to step {back} or earlier");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_log_says_who_has_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = convictions_in(folder.path()).expect_err("no run");
        assert!(error.to_string().starts_with("no run has begun in "), "{error}");
    }
}
