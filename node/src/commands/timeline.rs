//! The course of a simulated run, as JSON and as a picture.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::prelude::*;
use serde::Serialize;
use shoal_scheduler::sim::{Part, Sort, Timeline};

const SIZE: (u32, u32) = (900, 1150);
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x44);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xeb);
const LINE: RGBColor = RGBColor(0x1f, 0x77, 0xb4);

/// The course of a run. Each list has a value for each interval.
#[derive(Debug, Serialize)]
pub(super) struct Series {
    /// Seconds of an interval, in simulated time.
    seconds: f64,
    /// Living peers, on average.
    peers: Vec<f64>,
    /// Microbatches per second.
    throughput: Vec<f64>,
    /// Share of the time in which engines ran passes.
    utilisation: Vec<f64>,
    /// Microbatches that peers had accepted, and offers that waited for memory, on average.
    #[serde(rename = "taken")]
    accepted: Vec<f64>,
    waiting: Vec<f64>,
    commits: Vec<u64>,
    deaths: Vec<u64>,
    /// Peers that were assigned stages.
    placed: Vec<u64>,
    /// Moves of peers to slow stages, and rewinds. A rewind also assigns other peers to lost stages.
    moved: Vec<u64>,
    rewinds: Vec<u64>,
    /// Bytes between peers, by kind.
    #[serde(rename = "words")]
    messages: Vec<u64>,
    activations: Vec<u64>,
    rounds: Vec<u64>,
    files: Vec<u64>,
}

impl Series {
    pub(super) fn of(timeline: &Timeline) -> Self {
        let seconds = timeline.width.as_secs_f64();
        let each = |value: &dyn Fn(&Part) -> f64| timeline.parts.iter().map(value).collect();
        let count = |value: &dyn Fn(&Part) -> u64| timeline.parts.iter().map(value).collect();
        let bytes = |sorts: &[Sort]| {
            let of = |part: &Part| {
                sorts.iter().filter_map(|sort| part.bytes.get(sort)).map(|bytes| bytes.0).sum()
            };
            timeline.parts.iter().map(of).collect()
        };
        let share = |busy: f64, all: f64| if all > 0.0 { busy / all } else { 0.0 };
        Self {
            seconds,
            peers: each(&|part| part.alive.as_secs_f64() / seconds),
            throughput: each(&|part| part.microbatches as f64 / seconds),
            utilisation: each(&|part| share(part.busy.as_secs_f64(), part.alive.as_secs_f64())),
            accepted: each(&|part| part.taken.as_secs_f64() / seconds),
            waiting: each(&|part| part.waiting.as_secs_f64() / seconds),
            commits: count(&|part| part.commits),
            deaths: count(&|part| part.died),
            placed: count(&|part| part.admitted),
            moved: count(&|part| part.moved),
            rewinds: count(&|part| part.rewinds),
            messages: bytes(&[Sort::Told, Sort::Reported, Sort::Said]),
            activations: bytes(&[Sort::Tensor]),
            rounds: bytes(&[Sort::Piece]),
            files: bytes(&[Sort::File]),
        }
    }

    /// Writes the JSON, and a picture beside it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let json = serde_json::to_string_pretty(self)?;
        std::fs::write(path, json).with_context(|| path.display().to_string())?;
        let picture = path.with_extension("svg");
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("cannot draw the run: {error}"))?;
        std::fs::write(&picture, svg).with_context(|| picture.display().to_string())
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let floats = |counts: &[u64]| counts.iter().map(|count| *count as f64).collect();
        let all = |index: usize| {
            [&self.messages, &self.activations, &self.rounds, &self.files]
                .iter()
                .map(|series| series[index] as f64 / self.seconds / 1e6)
                .sum()
        };
        let sent: Vec<f64> = (0..self.peers.len()).map(all).collect();
        let [placed, moved, rewinds]: [Vec<f64>; 3] =
            [&self.placed, &self.moved, &self.rewinds].map(|counts| floats(counts));
        let panels = [
            ("peers", &self.peers),
            ("microbatches/s", &self.throughput),
            ("engines busy", &self.utilisation),
            ("accepted", &self.accepted),
            ("waiting", &self.waiting),
            ("placed", &placed),
            ("moved", &moved),
            ("rewinds", &rewinds),
            ("MB/s sent", &sent),
        ];
        for (area, (name, values)) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
            self.draw_panel(area, name, values)?;
        }
        root.present()?;
        Ok(())
    }

    fn draw_panel(
        &self,
        area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        name: &str,
        values: &[f64],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let end = (values.len().max(1) as f64 * self.seconds) / 60.0;
        let most = values.iter().copied().fold(0.0, f64::max).max(1e-9) * 1.1;
        let mut chart = ChartBuilder::on(area)
            .margin(6)
            .margin_right(20)
            .x_label_area_size(24)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..end, 0.0..most)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .x_labels(12)
            .y_labels(3)
            .label_style((FONT, 12).into_font().color(&INK))
            .x_desc("minutes")
            .y_desc(name)
            .draw()?;
        let point =
            |(index, value): (usize, &f64)| ((index as f64 + 0.5) * self.seconds / 60.0, *value);
        let points = values.iter().enumerate().map(point);
        chart.draw_series(LineSeries::new(points, LINE.stroke_width(2)))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_lab::scenario::Described;
    use shoal_scheduler::sim;

    use super::*;

    #[test]
    fn a_run_is_written_with_its_numbers_and_its_picture() {
        let described = Described { steps: 2, crash_every: 0.0, ..Described::default() };
        let mut timeline = Timeline::default();
        let scenario = described.scenario(1);
        sim::run_watched(&scenario, &mut timeline).expect("every oracle holds");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run.json");
        Series::of(&timeline).write(&path).expect("written");
        let json = std::fs::read_to_string(&path).expect("read");
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let throughput = json["throughput"].as_array().expect("a list");
        let ended: f64 = throughput.iter().filter_map(serde_json::Value::as_f64).sum();
        let seconds = json["seconds"].as_f64().expect("a number");
        assert!((ended * seconds - 64.0).abs() < 1e-6, "{ended}");
        let svg = std::fs::read_to_string(path.with_extension("svg")).expect("read");
        assert_eq!(
            svg.matches("<polyline fill=\"none\" opacity=\"1\" stroke=\"#1F77B4\"").count(),
            9
        );
    }
}
