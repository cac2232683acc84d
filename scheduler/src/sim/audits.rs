//! Audits: sound work stays sound whatever dies, and wrong work is found and taken back.

use std::time::Duration;

use shoal_protocol::ids::{PeerId, Stage, StageSpan, Step};
use shoal_protocol::manifest::{Audit, Manifest};
use shoal_protocol::message::StageChoice;

use super::corruption::{ComputeError, Corruption, HandoverLie};
use super::tests::{all_hold, checked, marked, on_all, reached, seeds};
use super::world::World;
use super::*;

/// Number of swarms with faults whose work is audited.
const AUDITED: u64 = 300;

/// Number of swarms for each kind of wrong work.
const WRONG: u64 = 40;

/// Replicas of each stage that no fault concerns.
const REPLICAS: usize = 4;

/// Number of swarms in which the time until wrong work is found is measured.
const MEASURED: u64 = 200;

/// Audits neither delay nor stop a swarm that computes rightly, and convict nobody.
#[test]
fn audited_swarms_with_faults_satisfy_every_oracle() {
    let audited = |seed| {
        let report = run(&Scenario::audited(seed)).map_err(|violation| violation.to_string())?;
        match &report.convictions[..] {
            [] => Ok(report),
            convictions => Err(format!("honest peers are convicted: {convictions:?}")),
        }
    };
    let results = on_all(seeds(AUDITED), |seed| checked(seed, "audited_swarms", audited));
    let reports = all_hold(results);
    marked(&reports, Mark::AuditedSound);
    marked(&reports, Mark::NotAudited);
    reached(&reports, "completed runs", |report| u64::from(report.finished));
}

/// Runs a swarm with wrong work. Nobody else than the guilty may be convicted, and on evidence that anyone can check. If
/// it is sure that all wrong work was found, the checkpoint is that of a swarm without it.
fn taken_back(
    scenario: &Scenario,
    corruption: Corruption,
    guilty: &[PeerId],
    is_sure: impl Fn(&Report) -> bool,
) -> Result<Report, String> {
    let report = World::new(scenario, corruption, true).run();
    let report = report.map_err(|violation| violation.to_string())?;
    if let Some(reason) = &report.stopped {
        return Err(format!("the run stopped: {reason}"));
    }
    let sealer = HashKeys(World::peer_id(0)).sealer(&scenario.manifest);
    for conviction in &report.convictions {
        if !guilty.contains(&conviction.peer) {
            return Err(format!("convicted: {conviction:?}; guilty: {guilty:?}"));
        }
        if let Err(error) = conviction.check(&sealer) {
            return Err(format!("{error}: {conviction:?}"));
        }
    }
    let alone = run(&scenario.alone()).map_err(|violation| format!("alone: {violation}"))?;
    if is_sure(&report) && alone.checkpoint != report.checkpoint {
        return Err(format!("the model is wrong; convicted: {:?}", report.convictions));
    }
    Ok(report)
}

/// The checkpoint of a swarm one of whose members computes wrongly is that of a swarm in which it never did, once it is
/// found; if all steps are audited it is always found. Nobody else is convicted.
#[test]
fn wrong_work_is_found_and_taken_back() {
    for error in [
        ComputeError::Gradient,
        ComputeError::Nothing,
        ComputeError::Bit(3),
        ComputeError::Stale,
        ComputeError::Labels,
        ComputeError::Output,
        ComputeError::Returned,
    ] {
        let wrong = |seed| {
            let scenario = Scenario::replicated(seed, REPLICAS);
            let peer = scenario.peers.len() - 1;
            let every = [1, 2, 7][(seed % 3) as usize];
            let corruption = Corruption::Miscompute { peer, error, every };
            taken_back(&scenario, corruption, &[World::peer_id(peer)], |report| {
                scenario.manifest.audit.share == 1.0 || !report.convictions.is_empty()
            })
        };
        let results = on_all(seeds(WRONG), |seed| checked(seed, "wrong_work_is_found", wrong));
        let reports = all_hold(results);
        println!("{error:?}");
        reached(&reports, "convictions", |report| report.convictions.len() as u64);
        marked(&reports, Mark::Rewound);
        marked(&reports, Mark::AuditedSound);
        reached(&reports, "completed runs", |report| u64::from(report.finished));
    }
}

/// Who hands over something else than it states is found in any step, audited or not.
#[test]
fn wrong_handovers_are_found_and_taken_back() {
    for lie in [HandoverLie::Sends, HandoverLie::States, HandoverLie::Omits, HandoverLie::Recalls] {
        let wrong = |seed| {
            let mut scenario = Scenario::replicated(seed, REPLICAS);
            let stages = u64::from(scenario.manifest.training.stages);
            let newest = scenario.peers.len() - 1;
            // One of each stage, in turn.
            let peer = newest - REPLICAS * (seed / 3 % stages) as usize;
            // A coordinator that finds itself guilty stops the run.
            scenario.anchors = scenario.anchors.min(peer);
            let every = [1, 2, 7][(seed % 3) as usize];
            let corruption = Corruption::HandOver { peer, lie, every };
            taken_back(&scenario, corruption, &[World::peer_id(peer)], |_| true)
        };
        let results = on_all(seeds(WRONG), |seed| checked(seed, "wrong_handovers", wrong));
        let reports = all_hold(results);
        println!("{lie:?}");
        reached(&reports, "convictions", |report| report.convictions.len() as u64);
        marked(&reports, Mark::Rewound);
        reached(&reports, "completed runs", |report| u64::from(report.finished));
    }
}

/// Two replicas that get the same wrong vouch for each other, and the others are more: the first whom one of those
/// audits is found. Each is taken back, and no honest one is convicted.
#[test]
fn colluding_replicas_in_the_minority_are_found() {
    let wrong = |seed| {
        let scenario = Scenario::replicated(seed, REPLICAS + 2);
        let newest = scenario.peers.len() - 1;
        let peers = [newest, newest - 1];
        let corruption = Corruption::Collude { peers, every: [1, 2, 7][(seed % 3) as usize] };
        let guilty = peers.map(World::peer_id);
        taken_back(&scenario, corruption, &guilty, |report| report.convictions.len() == 2)
    };
    let results = on_all(seeds(WRONG), |seed| checked(seed, "colluding_replicas", wrong));
    let reports = all_hold(results);
    reached(&reports, "convictions", |report| report.convictions.len() as u64);
    reached(&reports, "both", |report| u64::from(report.convictions.len() == 2));
}

/// A swarm without faults, of two stages with three replicas each.
fn two_stages_of_three(seed: u64, share: f64, steps: u64) -> Scenario {
    let manifest = Scenario::small_manifest(2, 12, steps);
    let mut manifest = Manifest { audit: Audit { share, probation: 0 }, ..manifest };
    manifest.training.seed = seed;
    let compute = ComputeScenario::passes(Duration::from_millis(2), Duration::from_millis(4), 100);
    let peer = |stage| {
        PeerScenario::plain(StageChoice::Span(StageSpan::one(Stage(stage))), 2, compute.clone())
    };
    let peers = [0, 0, 0, 1, 1, 1].map(peer).to_vec();
    let network = NetworkScenario::even(Duration::from_millis(1), Duration::ZERO, None);
    Scenario { seed, ..Scenario::plain(manifest, peers, network) }
}

/// Who errs in every step is found within n steps with a probability of 1 - (1 - share)^n.
#[test]
fn wrong_work_is_found_as_soon_as_the_share_of_audits_says() {
    const SHARE: f64 = 0.1;
    const STEPS: u64 = 60;
    let found = |seed| {
        let scenario = two_stages_of_three(seed, SHARE, STEPS);
        let peer = scenario.peers.len() - 1;
        let corruption = Corruption::Miscompute { peer, error: ComputeError::Gradient, every: 1 };
        taken_back(&scenario, corruption, &[World::peer_id(peer)], |report| {
            !report.convictions.is_empty()
        })
    };
    let results = on_all(seeds(MEASURED), |seed| checked(seed, "as_soon_as_the_share", found));
    let reports = all_hold(results);
    let at = |report: &Report| report.convictions.first().map(|conviction| conviction.step);
    for steps in [5, 10, 20, 40] {
        let found = reports.iter().filter(|report| at(report).is_some_and(|at| at < Step(steps)));
        let share = found.count() as f64 / reports.len() as f64;
        let expected = 1.0 - (1.0 - SHARE).powi(steps as i32);
        println!("within {steps} steps: {share:.3}, expected {expected:.3}");
        // Four standard deviations of the mean of so many draws.
        let deviation = (expected * (1.0 - expected) / reports.len() as f64).sqrt();
        let chosen = std::env::var_os("SHOAL_SIM_SEED").is_some();
        assert!(chosen || (share - expected).abs() < 4.0 * deviation, "{steps} steps");
    }
}
