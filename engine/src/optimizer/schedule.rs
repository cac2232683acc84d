//! The learning rate of each step, and clipping.

use shoal_protocol::ids::Step;
use shoal_protocol::manifest::{Manifest, Optimizer, Schedule};

/// Learning rate of a step: linear warm-up from `learning_rate / warmup_steps`, then the schedule, which
/// ends at the run's last step.
#[must_use]
pub fn learning_rate(manifest: &Manifest, step: Step) -> f64 {
    let Optimizer { learning_rate, warmup_steps, schedule, .. } = &manifest.optimizer;
    if step.0 < *warmup_steps {
        return learning_rate * (step.0 + 1) as f64 / *warmup_steps as f64;
    }
    let last = manifest.training.steps.saturating_sub(1);
    // Of the way from one step to the last one.
    let progress = |from: u64| match last.saturating_sub(from) {
        0 => 0.0,
        length => (step.0.saturating_sub(from) as f64 / length as f64).min(1.0),
    };
    let between = |lowest: f64, share: f64| lowest + (learning_rate - lowest) * share;
    match *schedule {
        Schedule::Constant => *learning_rate,
        Schedule::Cosine { final_learning_rate } => {
            let angle = std::f64::consts::PI * progress(*warmup_steps);
            between(final_learning_rate, 0.5 * (1.0 + libm::cos(angle)))
        }
        Schedule::Linear { final_learning_rate } => {
            between(final_learning_rate, 1.0 - progress(*warmup_steps))
        }
        Schedule::Wsd { final_learning_rate, decay_steps } => {
            let from = last.saturating_sub(decay_steps).max(*warmup_steps);
            between(final_learning_rate, 1.0 - progress(from))
        }
    }
}

/// Factor on the gradient that limits its global norm to `gradient_clip`: `min(1, clip / (norm +
/// 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`.
#[must_use]
pub fn clip_scale(optimizer: &Optimizer, global_norm: f64) -> f64 {
    if optimizer.gradient_clip == 0.0 {
        return 1.0;
    }
    (optimizer.gradient_clip / (global_norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::manifest;

    #[test]
    fn the_rate_warms_up_and_falls_to_its_end() {
        let manifest = manifest();
        let rates: Vec<f64> = (0..7).map(|step| learning_rate(&manifest, Step(step))).collect();
        assert_eq!(rates[..3], [1.5e-3, 3e-3, 3e-3]);
        assert!((rates[3] - 2.325e-3).abs() < 1e-12);
        assert!((rates[5] - 3e-4).abs() < 1e-12 && rates[6] == rates[5]);
    }

    #[test]
    fn only_a_norm_above_the_clip_is_scaled() {
        let mut optimizer = manifest().optimizer;
        assert_eq!(clip_scale(&optimizer, 0.5), 1.0);
        assert!((clip_scale(&optimizer, 4.0) - 0.25).abs() < 1e-6);
        optimizer.gradient_clip = 0.0;
        assert_eq!(clip_scale(&optimizer, 4.0), 1.0);
    }
}
