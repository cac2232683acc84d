//! Texts of a status, shared by every view.

use shoal_formats::own_port::OwnPort;
use shoal_formats::scores;
use shoal_formats::words::with_prefix;
use shoal_protocol::ids::Stage;
use shoal_protocol::units::Bytes;

use super::{CostStatus, MemberStatus, Status};
use crate::event_text::{currency, duration, open_step};
use crate::step_count::StepCount;

/// Seconds of a step from which on its microbatches are shown.
const LONG_STEP: f64 = 10.0;

/// The members of each stage in order, then the members without a stage, if there are any.
fn by_stage(status: &Status) -> Vec<(Option<Stage>, Vec<&MemberStatus>)> {
    let stages = status.run.as_ref().map_or(0, |run| run.stages);
    let hosts = |stage| {
        let members = status.members.iter();
        members.filter(|member| member.stages.contains(stage)).collect()
    };
    let mut found: Vec<(Option<Stage>, Vec<&MemberStatus>)> =
        (0..stages).map(Stage).map(|stage| (Some(stage), hosts(stage))).collect();
    let watch: Vec<&MemberStatus> =
        status.members.iter().filter(|member| member.stages.is_empty()).collect();
    if !watch.is_empty() {
        found.push((None, watch));
    }
    found
}

/// Column titles of the member table.
pub(crate) const TITLES: [&str; 8] =
    ["STAGE", "PEER", "NAME", "STATE", "ROLE", "ROUND TRIP", "RATE", "LOST"];

/// Rows of the member table: one per replica of each stage, and one per stage without a replica.
pub(crate) fn rows_of(status: &Status) -> Vec<[String; 8]> {
    let mut rows = Vec::new();
    for (stage, members) in by_stage(status) {
        let stage = stage.map_or_else(|| "-".to_owned(), |stage| stage.to_string());
        if members.is_empty() {
            let mut row: [String; 8] = Default::default();
            (row[0], row[1]) = (stage, "none".to_owned());
            rows.push(row);
            continue;
        }
        for member in members {
            let moves = member.moves.map(|moves| format!(", moving to stage {}", moves.to));
            let (state, moves) = (member.state, moves.unwrap_or_default());
            let state = format!("{} {}{moves}", state.sign(), state.name());
            let [trip, rate, lost] = link_labels(member);
            let (stage, peer) = (stage.clone(), member.peer.short());
            let name = member.name.as_ref().map(ToString::to_string).unwrap_or_default();
            rows.push([stage, peer, name, state, roles(member), trip, rate, lost]);
        }
    }
    rows
}

/// A summary of node, run and training: a name and a line each, the most important first.
pub(crate) fn standing(status: &Status) -> Vec<(&'static str, String)> {
    let mut lines = vec![("state", state(status)), ("node", node(status))];
    if let Some(run) = &status.run {
        let id = run.id.to_string();
        let coordinator =
            run.coordinator.map_or_else(|| "none".to_owned(), |peer| status.title_of(peer));
        lines.push((
            "run",
            format!(
                "{id:.8}: {}, era {}, term {}, coordinator {coordinator}",
                StepCount::of_version(run.version).of(run.steps),
                run.era,
                run.term
            ),
        ));
    }
    lines.push(("training", training(status)));
    if let Some(survival) = &status.survival {
        lines.push(("survives", survival.text.clone()));
        if !survival.advice.is_empty() {
            lines.push(("would help", survival.advice.clone()));
        }
    }
    lines.extend(status.cost.as_ref().map(|cost| ("cost", describe_cost(cost))));
    if let Some(checkpoint) = status.run.as_ref().and_then(|run| run.checkpoint.as_ref()) {
        let hash = checkpoint.hash.map(|hash| format!(" ({:.8})", hash.to_string()));
        let step = StepCount::of_version(checkpoint.version);
        let line = format!("{step}{}", hash.unwrap_or_default());
        lines.push(("checkpoint", line));
    }
    lines.extend(status.scored.as_ref().map(|scored| {
        let step = StepCount::of_version(scored.version);
        ("scores", format!("{step}: {}", scores::describe(&scored.scores)))
    }));
    if status.node.own_port != OwnPort::Unknown {
        lines.push(("UDP port", status.node.own_port.to_string()));
    }
    lines.push(("memory", memory(status)));
    let (sent, received) = (&status.node.sent, &status.node.received);
    lines.push((
        "traffic",
        format!(
            "sent {} of tensors, {} of files, {} of messages; received {}, {}, {}",
            Bytes(sent.tensor_bytes),
            Bytes(sent.file_bytes),
            Bytes(sent.control_bytes),
            Bytes(received.tensor_bytes),
            Bytes(received.file_bytes),
            Bytes(received.control_bytes),
        ),
    ));
    lines
}

fn node(status: &Status) -> String {
    let node = &status.node;
    let peer = node.peer.map_or_else(|| "a new peer".to_owned(), |peer| status.title_of(peer));
    let place = match node.stages {
        Some(span) if !span.is_empty() => format!(", stage {span}"),
        _ => String::new(),
    };
    format!("{peer}, incarnation {}{place}", node.incarnation)
}

/// The node's state and its cause.
fn state(status: &Status) -> String {
    let node = &status.node;
    let why = node.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    format!("{}{why}", node.state.name())
}

/// The newest step, its losses and the throughput.
fn training(status: &Status) -> String {
    let training = &status.training;
    let open = status.node.open_step.as_ref().map(|open| format!(", {}", open_step(open)));
    let Some(step) = training.step.map(StepCount::of_version) else {
        return format!("no step is committed yet{}", open.unwrap_or_default());
    };
    let number = |value: Option<f64>| value.map_or_else(|| "?".to_owned(), |v| format!("{v:.3}"));
    let held_out = training.held_out_loss.map(|loss| format!(", held out {loss:.3}"));
    let throughput =
        training.tokens_per_second.map(|rate| format!(", {} tokens/s", with_prefix(rate)));
    let time = training.seconds_per_step.map(|seconds| format!(", {seconds:.2} s a step"));
    let last = training.committed_at_ms.map(|at| format!(", {}", age(status.at_ms, at)));
    let left = training.seconds_left.map(|left| format!(", {} left", duration(left)));
    let is_long = training.seconds_per_step.is_some_and(|seconds| seconds >= LONG_STEP);
    let open = open.filter(|_| is_long);
    let parts = [held_out, throughput, time, last, left, open].map(Option::unwrap_or_default);
    let parts = parts.concat();
    format!("{step}: loss {}{parts}", number(training.loss))
}

/// The cost of the run, and the tokens for it.
fn describe_cost(cost: &CostStatus) -> String {
    let tokens = cost
        .tokens_per_currency_unit
        .map(|tokens| format!(", {} tokens per unit of currency", with_prefix(tokens)));
    let CostStatus { total, per_hour, .. } = cost;
    let [total, per_hour] = [*total, *per_hour].map(currency);
    format!("{total} so far, {per_hour} an hour{}", tokens.unwrap_or_default())
}

fn amount(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

fn memory(status: &Status) -> String {
    let (node, load) = (&status.node, &status.node.load);
    let limit = node.memory_limit_bytes;
    format!(
        "process {}; may use {}; in flight {}; output log {} ({} on the disk), memory for it {}",
        node.resident_bytes.map_or_else(|| "?".to_owned(), amount),
        limit.map_or_else(|| "all of its device".to_owned(), amount),
        Bytes(load.in_flight_bytes),
        Bytes(load.logged_bytes),
        Bytes(load.logged_on_disk_bytes),
        Bytes(load.log_memory_bytes),
    )
}

/// A member's roles besides hosting stages.
fn roles(member: &MemberStatus) -> String {
    let all = [
        (member.own, "this peer"),
        (member.coordinator, "coordinator"),
        (member.anchor, "anchor"),
        (member.archive, "archive"),
    ];
    let has = all.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).to_owned());
    let several = (member.devices.get() > 1).then(|| format!("{} devices", member.devices));
    has.chain(several).collect::<Vec<_>>().join(", ")
}

/// Round trip, measured throughput and packet loss of the link to a member.
fn link_labels(member: &MemberStatus) -> [String; 3] {
    let Some(link) = &member.link else { return ["-", "-", "-"].map(str::to_owned) };
    let rate = |rate: f64| format!("{}/s", Bytes(rate as u64));
    let lost = link.lost_packets as f64 / link.sent_packets.max(1) as f64;
    [
        milliseconds(link.round_trip_seconds) + if link.relayed { ", relayed" } else { "" },
        link.bytes_per_second.map_or_else(|| "-".to_owned(), rate),
        format!("{:.2}%", lost * 100.0),
    ]
}

/// Formats a duration as `12.3 ms`.
fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

/// The time from `then` to `now`, both in milliseconds since 1970.
pub(crate) fn age(now: u64, then: u64) -> String {
    match now.saturating_sub(then) / 1000 {
        seconds if seconds < 120 => format!("{seconds}s ago"),
        seconds if seconds < 7200 => format!("{}min ago", seconds / 60),
        seconds if seconds < 172_800 => format!("{}h ago", seconds / 3600),
        seconds => format!("{}d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        let ages = [0, 119_999, 120_000, 7_200_000, 172_800_000].map(|then| age(then, 0));
        assert_eq!(ages, ["0s ago", "119s ago", "2min ago", "2h ago", "2d ago"]);
        assert_eq!(age(0, 5), "0s ago");
    }
}
