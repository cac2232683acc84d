//! Draws the loss curve as SVG.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::report::StepNumbers;

const SIZE: (u32, u32) = (900, 520);
const FONT: &str = "sans-serif";

const INK: RGBColor = RGBColor(0x33, 0x3a, 0x44);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xeb);
const TRAINING: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const HELD_OUT: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
const ENTROPY: RGBColor = RGBColor(0x7a, 0x7a, 0x7a);

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The contents of the picture.
#[derive(Debug, Clone)]
pub struct LossCurve<'a> {
    /// The training loss by step.
    pub training: Vec<(f64, f64)>,
    /// The loss on the held-out text, at the steps that evaluated it.
    pub held_out: Vec<(f64, f64)>,
    /// Entropy of the tokens' frequencies in nats, if it is known: the loss of a model that knows
    /// how frequent each token is, and nothing else.
    pub unigram_entropy: Option<f64>,
    /// The picture's title.
    pub title: &'a str,
}

impl<'a> LossCurve<'a> {
    /// The curve of these steps.
    #[must_use]
    pub fn of(steps: &[StepNumbers], title: &'a str) -> Self {
        let at = |step: &StepNumbers| step.step as f64;
        let training = steps.iter().map(|step| (at(step), step.loss)).collect();
        let held_out = steps.iter().filter_map(|step| Some((at(step), step.held_out_loss?)));
        Self { training, held_out: held_out.collect(), unigram_entropy: None, title }
    }

    /// Writes the picture as SVG.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("cannot draw the loss curve: {error}"))?;
        std::fs::write(path, svg).with_context(|| path.display().to_string())
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (steps, losses) = self.ranges();
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, (FONT, 20).into_font().color(&INK))
            .margin(16)
            .margin_right(28)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(steps.clone(), losses)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .x_labels(10)
            .y_labels(8)
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_label_formatter(&|loss| format!("{loss:.1}"))
            .label_style((FONT, 14).into_font().color(&INK))
            .x_desc("step")
            .y_desc("loss, nats per token")
            .axis_desc_style((FONT, 15).into_font().color(&INK))
            .draw()?;
        if let Some(entropy) = self.unigram_entropy {
            draw_entropy(&mut chart, entropy, steps)?;
        }
        self.draw_training(&mut chart)?;
        self.draw_held_out(&mut chart)?;
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(14)
            .legend_area_size(34)
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .label_font((FONT, 14).into_font().color(&INK))
            .draw()?;
        root.present()?;
        Ok(())
    }

    fn draw_training(&self, chart: &mut Chart<'_>) -> Result<(), Box<dyn std::error::Error>> {
        let points = self.training.iter().copied();
        let style = TRAINING.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points, style))?
            .label("training")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 26, y)], style));
        Ok(())
    }

    fn draw_held_out(&self, chart: &mut Chart<'_>) -> Result<(), Box<dyn std::error::Error>> {
        if self.held_out.is_empty() {
            return Ok(());
        }
        let dot = |at| Circle::new(at, 4, HELD_OUT.filled());
        chart
            .draw_series(self.held_out.iter().copied().map(dot))?
            .label("held-out text")
            .legend(|(x, y)| Circle::new((x + 13, y), 4, HELD_OUT.filled()));
        Ok(())
    }

    /// Ranges of both axes, which contain every point with some margin above.
    fn ranges(&self) -> (Range<f64>, Range<f64>) {
        let last = self.training.last().map_or(1.0, |(step, _)| *step).max(1.0);
        let points = self.training.iter().chain(&self.held_out).map(|(_, loss)| *loss);
        let losses = points.chain(self.unigram_entropy).filter(|loss| loss.is_finite());
        let (low, high) = losses.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| {
            (low.min(loss), high.max(loss))
        });
        if low > high {
            return (0.0..last, 0.0..1.0);
        }
        ((0.0)..last, (low - 0.3).floor().max(0.0)..(high * 1.05 + 0.1))
    }
}

fn draw_entropy(
    chart: &mut Chart<'_>,
    entropy: f64,
    steps: Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let ends = [(steps.start, entropy), (steps.end, entropy)];
    let style = ENTROPY.stroke_width(2);
    chart
        .draw_series(DashedLineSeries::new(ends, 7, 5, style))?
        .label(format!("token frequencies alone: {:.2}", entropy))
        .legend(move |(x, y)| {
            let dash = |from: i32| PathElement::new([(x + from, y), (x + from + 7, y)], style);
            EmptyElement::at((0, 0)) + dash(0) + dash(11)
        });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(steps: u64) -> Vec<StepNumbers> {
        (0..steps)
            .map(|step| StepNumbers {
                step,
                loss: 1.6 + 4.0 * (-(step as f64) / 20.0).exp() + 0.05 * (step as f64 * 1.7).sin(),
                learning_rate: 1e-3,
                gradient_norm: 1.0,
                tokens: 1,
                targets: 1,
                padded: 0,
                preferences: None,
                seconds: 1.0,
                cost: None,
                held_out_loss: step
                    .is_multiple_of(25)
                    .then(|| 1.7 + 3.9 * (-(step as f64) / 20.0).exp()),
            })
            .collect()
    }

    fn draw(steps: &[StepNumbers]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("loss.svg");
        let curve = LossCurve { unigram_entropy: Some(3.3), ..LossCurve::of(steps, "a run") };
        curve.write(&path).expect("written");
        std::fs::read_to_string(path).expect("read")
    }

    #[test]
    fn the_picture_has_curve_points_line_and_labels() {
        let svg = draw(&curve(150));
        for part in ["<svg", "<polyline", "<circle", "training", "held-out text", "3.30", "a run"] {
            assert!(svg.contains(part), "no {part}");
        }
        // Six evaluations, and the one in the legend.
        assert_eq!(svg.matches("<circle").count(), 7);
    }

    #[test]
    fn a_run_of_few_steps_has_a_picture() {
        for steps in [0, 1, 2] {
            assert!(draw(&curve(steps)).trim_end().ends_with("</svg>"));
        }
    }
}
