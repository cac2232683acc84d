//! Draws the screen at any size. The most important parts come first; parts without room are left
//! out.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Margin, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Chart, Clear, Dataset, GraphType, LineGauge, List, Paragraph, Row, Table,
};

use super::screen::Screen;
use crate::status::labels::{TITLES, age, rows_of, standing};
use crate::status::{NodeState, Point, Status, Tone};
use crate::step_count::StepCount;

/// The smallest width and height with curves.
const FOR_CURVES: (u16, u16) = (80, 24);

/// Summary lines on the smallest screen; a larger one uses up to a third of its height.
const LINES: usize = 4;

/// Widths of the member table's columns.
const WIDTHS: [u16; 8] = [5, 6, 12, 13, 26, 10, 11, 6];

/// The smallest width with a column for names.
const FOR_NAMES: u16 = 98;

const HELP: [&str; 6] = [
    "q, Esc      quit",
    "h, ?        show or hide this help",
    "Down, j     older events",
    "Up, k       newer events",
    "PgDn, PgUp  scroll by ten",
    "Home        newest event",
];

/// Draws everything.
pub(super) fn draw(frame: &mut Frame, screen: &Screen) {
    let area = frame.area();
    let mut lines = standing(&screen.status);
    lines.truncate(usize::from(area.height / 3).max(LINES));
    let head = u16::try_from(lines.len() + 1).unwrap_or(u16::MAX).min(area.height);
    let [top, middle, bottom] =
        Layout::vertical([Constraint::Length(head), Constraint::Fill(1), Constraint::Length(1)])
            .areas(area);
    draw_head(frame, top, screen, lines);
    draw_middle(frame, middle, screen);
    draw_foot(frame, bottom, screen);
    if screen.help {
        draw_help(frame, area);
    }
}

fn draw_head(frame: &mut Frame, area: Rect, screen: &Screen, lines: Vec<(&'static str, String)>) {
    let [bar, rest] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    draw_progress(frame, bar, &screen.status);
    let colour = state_colour(screen.status.node.state);
    let line = |(name, text): (&'static str, String)| {
        let text = Span::raw(text);
        let text = if name == "state" { text.fg(colour).bold() } else { text };
        Line::from(vec![Span::from(format!("{name:<11}")).dim(), text])
    };
    frame.render_widget(Paragraph::new(lines.into_iter().map(line).collect::<Vec<_>>()), rest);
}

fn draw_progress(frame: &mut Frame, area: Rect, status: &Status) {
    let Some(run) = &status.run else {
        return frame.render_widget(Line::from("Shoal: no run yet").bold(), area);
    };
    let ratio = (run.version as f64 / run.steps.max(1) as f64).clamp(0.0, 1.0);
    let gauge = LineGauge::default()
        .label(format!("Shoal, {}", StepCount::of_version(run.version).of(run.steps)))
        .filled_style(Style::new().fg(Color::Cyan))
        .ratio(ratio);
    frame.render_widget(gauge, area);
}

/// Members, curves and events, as far as they fit.
fn draw_middle(frame: &mut Frame, area: Rect, screen: &Screen) {
    let rows = rows_of(&screen.status);
    // The rows, the titles and the border.
    let wanted = u16::try_from(rows.len()).unwrap_or(u16::MAX).saturating_add(3);
    let curves = frame.area().width >= FOR_CURVES.0 && frame.area().height >= FOR_CURVES.1;
    let most = if curves { area.height / 2 } else { area.height / 3 * 2 };
    let [members, rest] =
        Layout::vertical([Constraint::Length(wanted.min(most)), Constraint::Fill(1)]).areas(area);
    draw_members(frame, members, rows);
    if curves {
        let halves = [Constraint::Fill(1), Constraint::Fill(1)];
        let [left, right] = Layout::horizontal(halves).areas(rest);
        let [loss, rate] = Layout::vertical(halves).areas(left);
        let of = &screen.status.curves;
        draw_curve(
            frame,
            loss,
            " loss ",
            &[(&of.loss, Color::Cyan), (&of.held_out_loss, Color::Yellow)],
        );
        draw_curve(frame, rate, " tokens/s ", &[(&of.tokens_per_second, Color::Green)]);
        draw_events(frame, right, screen);
    } else {
        draw_events(frame, rest, screen);
    }
}

fn draw_members(frame: &mut Frame, area: Rect, mut rows: Vec<[String; 8]>) {
    let mut widths = WIDTHS.map(Constraint::Length);
    if area.width < FOR_NAMES {
        // A name takes the place of the identifier.
        (widths[1], widths[2]) = (Constraint::Min(7), Constraint::Length(0));
        widths[3] = Constraint::Min(11);
        for row in rows.iter_mut().filter(|row| !row[2].is_empty()) {
            row[1] = std::mem::take(&mut row[2]);
        }
    }
    if area.height < 4 {
        return;
    }
    let fit = usize::from(area.height - 3);
    if rows.len() > fit {
        let left_out = rows.len() - (fit - 1);
        rows.truncate(fit - 1);
        let mut more: [String; 8] = Default::default();
        more[1] = format!("+{left_out}");
        rows.push(more);
    }
    let styled = rows.into_iter().map(|row| {
        let style = match row[3].chars().next() {
            Some('●' | '○') => Style::new(),
            None if row[1] == "none" => Style::new().fg(Color::Red),
            _ => Style::new().fg(Color::Yellow),
        };
        Row::new(row).style(style)
    });
    let table = Table::new(styled, widths)
        .header(Row::new(TITLES).add_modifier(Modifier::DIM))
        .block(Block::bordered().title(" members "));
    frame.render_widget(table, area);
}

fn draw_curve(frame: &mut Frame, area: Rect, title: &'static str, curves: &[(&Vec<Point>, Color)]) {
    let points = || curves.iter().flat_map(|(points, _)| points.iter());
    let bounds = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // A constant curve needs an axis of some height.
        (values.len() > 1).then_some([low, if high > low { high } else { low + 1.0 }])
    };
    let x = bounds(points().map(|point| point.0 as f64).collect());
    let y = bounds(points().map(|point| point.1).collect());
    let block = Block::bordered().title(title);
    let (Some(x), Some(y)) = (x, y) else {
        return frame.render_widget(Paragraph::new("nothing yet").dim().block(block), area);
    };
    let data: Vec<(Vec<(f64, f64)>, Color)> = curves
        .iter()
        .map(|(points, colour)| {
            (points.iter().map(|point| (point.0 as f64, point.1)).collect(), *colour)
        })
        .collect();
    let datasets = data.iter().map(|(points, colour)| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(*colour))
            .data(points)
    });
    let digits = if y[1] < 100.0 { 2 } else { 0 };
    let labels = |bounds: [f64; 2], digits: usize| bounds.map(|value| format!("{value:.digits$}"));
    let chart = Chart::new(datasets.collect())
        .x_axis(Axis::default().bounds(x).labels(labels(x, 0)).dim())
        .y_axis(Axis::default().bounds(y).labels(labels(y, digits)).dim())
        .block(block);
    frame.render_widget(chart, area);
}

fn draw_events(frame: &mut Frame, area: Rect, screen: &Screen) {
    let status = &screen.status;
    let items = status.events.iter().rev().skip(screen.back).map(|event| {
        let style = match event.tone {
            Tone::Plain => Style::new(),
            Tone::Good => Style::new().fg(Color::Green),
            Tone::Bad => Style::new().fg(Color::Red),
        };
        let when = Span::from(format!("{:>9} ", age(status.at_ms, event.at_ms))).dim();
        Line::from(vec![when, Span::styled(event.text.clone(), style)])
    });
    let list = List::new(items).block(Block::bordered().title(" events "));
    frame.render_widget(list, area);
}

fn draw_foot(frame: &mut Frame, area: Rect, screen: &Screen) {
    let line = match &screen.failure {
        None => Line::from("q quit, h help").dim(),
        Some(failure) => Line::from(format!("no answer: {failure}")).fg(Color::Red),
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame, area: Rect) {
    let width = area.width.min(34);
    let height = area.height.min(u16::try_from(HELP.len()).unwrap_or(u16::MAX) + 2);
    let margin = Margin::new((area.width - width) / 2, (area.height - height) / 2);
    let inner = area.inner(margin);
    let place = Rect { width, height, ..inner }.intersection(area);
    frame.render_widget(Clear, place);
    let text: Vec<Line> = HELP.iter().map(|line| Line::from(*line)).collect();
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title(" keys ")), place);
}

fn state_colour(state: NodeState) -> Color {
    match state {
        NodeState::Serving | NodeState::Watching => Color::Green,
        NodeState::Joining | NodeState::CatchingUp | NodeState::Draining => Color::Yellow,
        NodeState::Paused => Color::Red,
        NodeState::Over => Color::Gray,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::status::example;

    fn terminal(screen: &Screen, width: u16, height: u16) -> Terminal<TestBackend> {
        let backend = TestBackend::new(width, height);
        let mut terminal = Terminal::new(backend).expect("no terminal is needed");
        terminal.draw(|frame| draw(frame, screen)).expect("drawn");
        terminal
    }

    fn drawn(screen: &Screen, width: u16, height: u16) -> String {
        terminal(screen, width, height).backend().to_string()
    }

    #[test]
    fn a_large_screen_has_everything() {
        let text = drawn(&Screen::of(example::status()), 120, 40);
        for part in [
            "Shoal, step 40 of 200",
            "paused: stage 2 has no replica",
            "any one peer: no, stage 2 has no replica",
            "1.5000 so far, 0.3500 an hour",
            " members ",
            "gpu-2",
            "● serving",
            "◐ catching up",
            "○ watching",
            "none",
            "12.5 ms",
            "23.8 MiB/s",
            " loss ",
            " tokens/s ",
            "the run goes back to step 40",
            "q quit, h help",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn a_small_screen_has_the_summary() {
        let text = drawn(&Screen::of(example::status()), 60, 16);
        assert!(text.contains("paused: stage 2 has no replica"), "{text}");
        assert!(text.contains("the run goes back") && text.contains("● serving"), "{text}");
        assert!(text.contains(" gpu-1 "), "{text}");
        assert!(!text.contains("┌ loss"), "{text}");
    }

    #[test]
    fn members_without_room_are_counted() {
        let mut status = example::status();
        let one = status.members[1].clone();
        status.members.extend(std::iter::repeat_n(one, 50));
        let text = drawn(&Screen::of(status), 100, 40);
        assert!(text.contains("+4"), "{text}");
    }

    #[test]
    fn a_failure_is_shown_and_help_overlays_the_screen() {
        let mut screen = Screen::of(example::status());
        screen.answer(Err("timed out".into()));
        screen.help = true;
        let text = drawn(&screen, 80, 24);
        assert!(text.contains("no answer: timed out"), "{text}");
        assert!(text.contains("PgDn, PgUp  scroll by ten"), "{text}");
    }

    proptest! {
        #[test]
        fn any_size_can_be_drawn(width in 0u16..200, height in 0u16..80, help: bool) {
            let mut screen = Screen::of(example::status());
            screen.help = help;
            terminal(&screen, width, height);
            screen.status.run = None;
            screen.status.members.clear();
            screen.status.curves.loss.truncate(1);
            terminal(&screen, width, height);
        }
    }
}
