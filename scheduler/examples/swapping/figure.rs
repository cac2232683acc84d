//! The figure of docs/benchmarks/swarms.md: how many times faster ATOM is, over the speed of the network.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::Row;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 380.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 330.0;
const PANEL: f64 = 310.0;
const COLOURS: [&str; 4] = ["#1b9e77", "#d95f02", "#7570b3", "#e7298a"];
/// The axes: powers of ten of bits per second, and of the speed-up.
const NETWORK: (f64, f64) = (7.0, 10.0);
const FASTER: (f64, f64) = (-1.5, 3.0);
/// "Up to 20x" (ATOM, arXiv 2403.10504).
const PAPER: f64 = 20.0;

/// The figure as SVG: passes alone on the left, whole steps on the right.
pub(crate) fn draw(rows: &[Row]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    panel(&mut svg, 50.0, "passes alone", rows, |row| row.passes);
    panel(&mut svg, 50.0 + PANEL + 50.0, "whole steps, with the all-reduce", rows, |row| row.step);
    for (index, shape) in shapes(rows).into_iter().enumerate() {
        let (at, colour) = (TOP + 10.0 + 18.0 * index as f64, COLOURS[index % COLOURS.len()]);
        line(&mut svg, (745.0, at), (765.0, at), colour, "stroke-width=\"3\"");
        text(&mut svg, 770.0, at + 4.0, "start", shape);
    }
    text(&mut svg, 745.0, TOP + 100.0, "start", "host link");
    for (at, words, style) in [(118.0, "12 GB/s", ""), (136.0, "50 GB/s", DASHED)] {
        line(&mut svg, (745.0, TOP + at - 4.0), (765.0, TOP + at - 4.0), "black", style);
        text(&mut svg, 770.0, TOP + at, "start", words);
    }
    svg.push_str("</svg>\n");
    svg
}

const DASHED: &str = "stroke-dasharray=\"5 4\"";

/// The shapes in the order of the rows.
fn shapes(rows: &[Row]) -> Vec<&'static str> {
    let mut seen = BTreeSet::new();
    rows.iter().map(|row| row.shape).filter(|shape| seen.insert(*shape)).collect()
}

fn panel(svg: &mut String, left: f64, title: &str, rows: &[Row], value: impl Fn(&Row) -> f64) {
    let share = |(low, high): (f64, f64), value: f64| (value.log10() - low) / (high - low);
    let x = |network: f64| left + PANEL * share(NETWORK, network);
    let y = |faster: f64| BOTTOM - (BOTTOM - TOP) * share(FASTER, faster).clamp(0.0, 1.0);
    text(svg, left + PANEL / 2.0, TOP - 15.0, "middle", &format!("times faster: {title}"));
    for (faster, words) in [(0.1, "0.1"), (1.0, "1"), (10.0, "10"), (100.0, "100")] {
        let colour = if faster == 1.0 { "#888888" } else { "#dddddd" };
        line(svg, (left, y(faster)), (left + PANEL, y(faster)), colour, "");
        text(svg, left - 6.0, y(faster) + 4.0, "end", words);
    }
    for (network, words) in
        [(1e7, "10 Mb/s"), (1e8, "100 Mb/s"), (1e9, "1 Gb/s"), (1e10, "10 Gb/s")]
    {
        text(svg, x(network), BOTTOM + 18.0, "middle", words);
    }
    line(svg, (left, y(PAPER)), (left + PANEL, y(PAPER)), "#444444", "stroke-dasharray=\"2 3\"");
    text(svg, left + PANEL, y(PAPER) - 5.0, "end", "ATOM's paper: up to 20");
    for (index, shape) in shapes(rows).into_iter().enumerate() {
        for (host_link, style) in [(12e9, ""), (50e9, DASHED)] {
            let of = rows.iter().filter(|row| row.shape == shape && row.host_link == host_link);
            let points = of.map(|row| format!("{:.1},{:.1}", x(row.network), y(value(row))));
            let points = points.collect::<Vec<_>>().join(" ");
            let colour = COLOURS[index % COLOURS.len()];
            let _ = writeln!(
                svg,
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" {style}/>"
            );
        }
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str, style: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" {style}/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let _ =
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}
