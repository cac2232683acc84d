//! Sums that are set aside while others' work is computed again.

use shoal_protocol::ids::{Attempt, ContentHash, Era, Stage, Step, Term, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Challenge, RoundId, SumsPrint};

use crate::common::islander::Islander;
use crate::common::{manifest, samples, text};

/// The prints of a step's sums, by stage and weight group.
fn prints(island: &mut Islander) -> Vec<SumsPrint> {
    let manifest = island.manifest.clone();
    let of = |stage: Stage| manifest.groups_of(stage).map(move |weights| (stage, weights));
    let all: Vec<(Stage, WeightGroup)> = manifest.stages().flat_map(of).collect();
    let print = |(stage, weights)| {
        let (era, term, step) = (Era(0), Term(1), Step(0));
        let round = RoundId { era, term, step, weights, attempt: Attempt(0) };
        let challenge = Challenge::of(round, ContentHash([7; 32]));
        island.island.print_sums(stage, weights, step, &challenge).expect("hosted")
    };
    all.into_iter().map(print).collect()
}

/// One island counts some microbatches, and then computes those of another again.
fn audit(devices: usize, change: impl FnOnce(&mut Manifest)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    manifest.training.stages = 2;
    manifest.training.microbatches = 7;
    change(&mut manifest);
    let mut make = || samples(&mut manifest, folder.path(), &text());
    let [one, two] = [make(), make()];
    let mut auditor = Islander::new(&manifest, one, devices);
    let mut other = Islander::new(&manifest, two, devices);
    let _ = auditor.count(0, 0..3);
    let _ = other.count(0, 3..7);
    let (own, stated) = (prints(&mut auditor), prints(&mut other));
    assert_ne!(own, stated);
    for stage in manifest.stages() {
        auditor.island.set_sums_aside(stage, Step(0)).expect("room");
    }
    assert!(prints(&mut auditor).iter().all(|print| *print == SumsPrint(0)), "nothing is added");
    let _ = auditor.count(0, 3..7);
    assert_eq!(prints(&mut auditor), stated, "{devices} devices");
    for stage in manifest.stages() {
        auditor.island.put_sums_back(stage, Step(0)).expect("hosted");
    }
    assert_eq!(prints(&mut auditor), own, "{devices} devices");
}

#[test]
fn audited_work_has_the_print_that_was_stated_and_own_sums_stay() {
    for devices in [1, 2, 4] {
        audit(devices, |_| {});
    }
}

#[test]
fn audited_slices_have_the_print_that_was_stated() {
    for devices in [1, 2, 4] {
        audit(devices, |manifest| manifest.model.slices = 2);
    }
}

#[test]
fn audited_work_of_a_tied_model_has_the_prints_that_were_stated() {
    audit(2, |manifest| manifest.model.block.tied = true);
}
