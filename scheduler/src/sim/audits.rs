//! Audits: sound work stays sound whatever dies, and wrong work is found and taken back.

use super::corruption::{ComputeError, Corruption};
use super::tests::{all_hold, checked, on_all, reached, seeds};
use super::world::World;
use super::*;

/// Number of swarms with faults whose work is audited.
const AUDITED: u64 = 300;

/// Number of swarms for each kind of wrong work.
const WRONG: u64 = 40;

/// Audits neither delay nor stop a swarm that computes rightly, and convict nobody.
#[test]
fn audited_swarms_with_faults_satisfy_every_oracle() {
    let audited = |seed| {
        let report = run(&Scenario::audited(seed)).map_err(|violation| violation.to_string())?;
        match &report.convicted[..] {
            [] => Ok(report),
            convicted => Err(format!("{} honest peers are convicted", convicted.len())),
        }
    };
    let results = on_all(seeds(AUDITED), |seed| checked(seed, "audited_swarms", audited));
    let reports = all_hold(results);
    reached(&reports, "sound audits", |report| report.audits.sound);
    reached(&reports, "work that nobody could audit", |report| report.audits.not_made);
    reached(&reports, "completed runs", |report| u64::from(report.finished));
}

/// The checkpoint of a swarm one of whose members computes wrongly is that of a swarm in which it never did, once it is
/// found; if all steps are audited it is always found. Nobody else is convicted.
#[test]
fn wrong_work_is_found_and_taken_back() {
    for error in [
        ComputeError::Gradient,
        ComputeError::Nothing,
        ComputeError::Output,
        ComputeError::Returned,
    ] {
        let wrong = |seed| {
            let scenario = Scenario::replicated(seed);
            let peer = scenario.peers.len() - 1;
            let every = [1, 2, 7][(seed % 3) as usize];
            let corruption = Corruption::Miscompute { peer, error, every };
            let report = World::new(&scenario, corruption, true).run();
            let report = report.map_err(|violation| violation.to_string())?;
            if let Some(reason) = &report.stopped {
                return Err(format!("the run stopped: {reason}"));
            }
            let guilty = World::peer_id(peer);
            if report.convicted.iter().any(|convicted| *convicted != guilty) {
                return Err(format!("{:?} are convicted, and {guilty} errs", report.convicted));
            }
            let alone =
                run(&scenario.alone()).map_err(|violation| format!("alone: {violation}"))?;
            let is_sure = scenario.manifest.audit.share == 1.0 || !report.convicted.is_empty();
            if is_sure && alone.checkpoint != report.checkpoint {
                return Err(format!("the model is wrong; convicted: {:?}", report.convicted));
            }
            Ok(report)
        };
        let results = on_all(seeds(WRONG), |seed| checked(seed, "wrong_work_is_found", wrong));
        let reports = all_hold(results);
        println!("{error:?}");
        reached(&reports, "convictions", |report| report.convicted.len() as u64);
        reached(&reports, "rewinds", |report| report.recovery.rewinds);
        reached(&reports, "sound audits", |report| report.audits.sound);
        reached(&reports, "completed runs", |report| u64::from(report.finished));
    }
}
