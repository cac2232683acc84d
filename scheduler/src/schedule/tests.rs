//! The textbook formulas, and their limits.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Backward passes take twice as long as forward passes.
fn pipeline(stages: usize, microbatches: usize, delay: f64) -> Pipeline {
    let delay = Duration::from_secs_f64(delay);
    let (forward, backward, transfer) = (SECOND, SECOND * 2, Duration::ZERO);
    Pipeline { stages, microbatches, forward, backward, delay, transfer }
}

#[test]
fn tables_are_those_of_the_literature() {
    let text = |schedule: Schedule, behind| -> String {
        let word = |pass: &Pass| match pass {
            Pass::Forward(microbatch) => format!("F{microbatch}"),
            Pass::Backward(microbatch) => format!("B{microbatch}"),
        };
        schedule.table(behind, 4).iter().map(word).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(text(Schedule::GPipe, 1), "F0 F1 F2 F3 B0 B1 B2 B3");
    assert_eq!(text(Schedule::OneForwardOneBackward, 0), "F0 B0 F1 B1 F2 B2 F3 B3");
    assert_eq!(text(Schedule::OneForwardOneBackward, 1), "F0 F1 B0 F2 B1 F3 B2 B3");
    assert_eq!(text(Schedule::Eager, 1), "F0 F1 F2 B0 F3 B1 B2 B3");
}

#[test]
fn with_latency_1f1b_loses_to_gpipe_and_windows_to_no_schedule() {
    // Four stages, 16 microbatches, forward 1 and backward 2: the one-way latency, then GPipe, 1F1B
    // and eager 1F1B.
    for (delay, parts) in [
        (0.0, [0.842, 0.842, 0.842]),
        (0.5, [0.800, 0.676, 0.800]),
        (1.0, [0.762, 0.565, 0.762]),
        (4.0, [0.593, 0.284, 0.432]),
    ] {
        let pipeline = pipeline(4, 16, delay);
        for (schedule, part) in Schedule::ALL.into_iter().zip(parts) {
            let utilisation = run_table(&pipeline, schedule).utilisation();
            assert!((utilisation - part).abs() < 0.001, "{schedule:?} at {delay}: {utilisation}");
        }
        let (outcome, windows) = settle(&pipeline);
        assert_eq!(outcome.time, pipeline.least(), "{windows:?} at {delay}: {outcome:?}");
    }
}

#[test]
fn with_many_microbatches_no_table_is_ahead_of_windows_over_any_link() {
    for (delay, halves) in (0..4).flat_map(|delay| (0..8).map(move |halves| (delay * 3, halves))) {
        let transfer = SECOND * halves / 2;
        let pipeline = Pipeline { transfer, ..pipeline(4, 64, f64::from(delay)) };
        let (outcome, windows) = settle(&pipeline);
        for schedule in Schedule::ALL {
            let table = run_table(&pipeline, schedule);
            assert!(outcome.time <= table.time, "{schedule:?} {pipeline:?} {windows:?}");
        }
    }
}

proptest! {
    #[test]
    fn bubbles_and_peaks_are_the_textbooks(stages in 1usize..9, microbatches in 1usize..40) {
        let pipeline = pipeline(stages, microbatches, 0.0);
        let bubble = (stages - 1) as f64 / (microbatches + stages - 1) as f64;
        for schedule in Schedule::ALL {
            let outcome = run_table(&pipeline, schedule);
            prop_assert!((1.0 - outcome.utilisation() - bubble).abs() < 1e-9, "{outcome:?}");
            for (stage, peak) in outcome.peak.iter().enumerate() {
                let most = match schedule {
                    Schedule::GPipe => microbatches,
                    Schedule::OneForwardOneBackward => stages - stage,
                    Schedule::Eager => 2 * (stages - stage) - 1,
                };
                prop_assert_eq!(*peak, most.min(microbatches));
            }
        }
    }

    #[test]
    fn a_step_ends_with_every_pass_and_is_no_shorter_than_the_bound(
        stages in 1usize..6, microbatches in 1usize..24, delay in 0u64..6, transfer in 0u64..5,
    ) {
        let transfer = SECOND * transfer as u32;
        let pipeline = Pipeline { transfer, ..pipeline(stages, microbatches, delay as f64) };
        let (outcome, windows) = settle(&pipeline);
        let tables = Schedule::ALL.map(|schedule| run_table(&pipeline, schedule));
        for outcome in tables.iter().chain([&outcome]) {
            prop_assert_eq!(outcome.busy, SECOND * 3 * (stages * microbatches) as u32);
            prop_assert!(outcome.time >= pipeline.least(), "{outcome:?}");
        }
        for (peak, window) in outcome.peak.iter().zip(windows.sizes()) {
            prop_assert!(peak <= window);
        }
    }
}
