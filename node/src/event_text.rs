//! Events of a run in words, and the numbers in them.

use shoal_formats::open_step::OpenStep;
use shoal_formats::scores;
use shoal_formats::words::{counted, title};
use shoal_protocol::ids::StageSpan;

use crate::events::RunEvent;
use crate::step_count::StepCount;

/// Describes an event on one line; `None` for an event that is not shown to people.
pub(crate) fn describe(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::Started { .. } => return describe_start(event),
        RunEvent::Waiting { stages, members } => waiting(stages, *members),
        RunEvent::Admitted { peer, name, span } => {
            format!("{} hosts {}", title(*peer, name.as_ref()), place(*span))
        }
        RunEvent::Joined { span } => format!("joined, hosting {}", place(*span)),
        RunEvent::MoveBegun { .. }
        | RunEvent::Moves { .. }
        | RunEvent::MoveCancelled { .. }
        | RunEvent::Moved { .. } => return describe_move(event),
        RunEvent::Serving { version: 0 } => return None,
        RunEvent::Serving { version } => {
            format!("caught up at {}", StepCount::of_version(*version))
        }
        RunEvent::Checkpoint { .. }
        | RunEvent::Scored { .. }
        | RunEvent::Uploaded { .. }
        | RunEvent::Continued { .. } => return describe_checkpoint(event),
        RunEvent::Lost { .. } | RunEvent::Convicted { .. } => return describe_loss(event),
        RunEvent::Rewound { version, steps } => format!(
            "the run goes back to {}: {} are computed again",
            StepCount::of_version(*version),
            counted(*steps, "step")
        ),
        RunEvent::Outlier { step, rate, text, .. } => {
            let step = StepCount::of_version(*step + 1);
            match *rate {
                0.0 => format!("{step} is skipped: {text}"),
                rate => format!("{step} counts {rate} times: {text}"),
            }
        }
        RunEvent::Anchors { count } => {
            format!("the run's log has {}", counted(*count as u64, "anchor"))
        }
        RunEvent::Paused { answering, anchors } => format!(
            "the run pauses: {answering} of {anchors} anchors answer, and more than half must"
        ),
        // The first term is not shown.
        RunEvent::BecameCoordinator { term: 0 | 1, .. } => return None,
        RunEvent::BecameCoordinator { claims, .. } => {
            format!("this peer is the coordinator now: members hold {}", counted(*claims, "claim"))
        }
        RunEvent::StageLost { stages, version } => format!(
            "no replica of stage {} is left: searching for the weights of {}",
            listed(stages),
            StepCount::of_version(*version)
        ),
        RunEvent::FewAnchors { .. }
        | RunEvent::UploadFailed { .. }
        | RunEvent::ScoreFailed { .. }
        | RunEvent::CoordinatorUnreachable { .. }
        | RunEvent::CoordinatorReachable
        | RunEvent::AwaitsPeers { .. }
        | RunEvent::Draining { .. } => return describe_notice(event),
        RunEvent::Killed { index } => {
            format!("peer {index} was killed: another takes its place")
        }
        RunEvent::Finished { .. } => "the run is over".to_owned(),
        RunEvent::Stopped { reason } => format!("the run stopped: {reason}"),
        // A flood of strangers must not hide the progress of the run.
        RunEvent::ConnectionRefused { .. } => return None,
        RunEvent::OwnPort(port) => match port.fix() {
            None => format!("this peer's UDP port is {port}"),
            Some(fix) => format!("this peer's UDP port is {port}: {fix}; {}", port.meanwhile()),
        },
        RunEvent::AccessList { banned, revoked, allowed, .. } => format!(
            "new access list: {banned} banned, {revoked} tickets revoked, {allowed} allowed by id"
        ),
        RunEvent::LongStep(open) => open_step(open),
        RunEvent::Listening { .. } | RunEvent::Committed(_) => return None,
    })
}

/// Describes a run that this process takes part in.
fn describe_start(event: &RunEvent) -> Option<String> {
    let RunEvent::Started {
        run, stages, steps, tokens_per_step, microbatches, worker_steps, ..
    } = event
    else {
        return None;
    };
    let what = match worker_steps {
        None => format!("{} of the model", counted(u64::from(*stages), "stage")),
        Some(worker_steps) => format!(
            "in each of which {} make {} of their own: with fewer devices in the swarm some are done in turn",
            counted(u64::from(*microbatches), "worker"),
            counted(u64::from(*worker_steps), "step"),
        ),
    };
    let run = run.to_string();
    Some(format!("run {run:.8}: {steps} steps of {tokens_per_step} tokens, {what}"))
}

/// Describes what happened to a whole checkpoint.
fn describe_checkpoint(event: &RunEvent) -> Option<String> {
    let step = StepCount::of_version;
    Some(match event {
        RunEvent::Checkpoint { version, directory, hash } => {
            format!("{} saved in {directory} ({:.8})", step(*version), hash.to_string())
        }
        RunEvent::Scored { version, scores, seconds } => {
            format!("{} scored {} in {seconds:.0} s", step(*version), scores::describe(scores))
        }
        RunEvent::Uploaded { version, archive } => format!("{} is in {archive}", step(*version)),
        RunEvent::Continued { version, archive } => {
            format!("the run continues from {} in {archive}", step(*version))
        }
        _ => return None,
    })
}

/// Describes an event that the operator must see.
fn describe_notice(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::FewAnchors { wanted } => format!(
            "the run has fewer than {wanted} anchors (start or join with --anchor): the death of \
             one pauses the run until it is back"
        ),
        RunEvent::UploadFailed { version, archive, reason } => format!(
            "{} is not in {archive} yet: {reason}; training goes on, and the upload is tried again",
            StepCount::of_version(*version)
        ),
        RunEvent::ScoreFailed { version, reason } => format!(
            "{} has no scores: the command of --on-checkpoint: {reason}; training goes on",
            StepCount::of_version(*version)
        ),
        RunEvent::CoordinatorUnreachable { wait_seconds } => format!(
            "the coordinator cannot be reached: waiting for it, at most {} minutes; if it ended, \
             run its `shoal start` again with the same --data-dir",
            wait_seconds / 60
        ),
        RunEvent::CoordinatorReachable => "the coordinator is reachable again".to_owned(),
        RunEvent::AwaitsPeers { peers, seconds } => format!(
            "the run is over; waiting at most {seconds} s for {peers} peers that missed the end"
        ),
        RunEvent::Draining { source } => {
            format!("{source}: leaving when the open step is committed")
        }
        _ => return None,
    })
}

/// Describes the move of a member from its stages to others.
fn describe_move(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::MoveBegun { peer, name, from, to, reason } => {
            let (peer, from, to) = (title(*peer, name.as_ref()), place(*from), place(*to));
            format!("{peer} moves from {from} to {to}: {}", reason.words())
        }
        RunEvent::Moves { peer, name, from, to, step, .. } => {
            let (peer, from, to) = (title(*peer, name.as_ref()), place(*from), place(*to));
            format!("{peer} hosts {to} instead of {from} from {} on", StepCount::through(*step))
        }
        RunEvent::MoveCancelled { peer, name, to, obstacle, .. } => {
            let peer = title(*peer, name.as_ref());
            format!("{peer} does not move to {}: {obstacle}", place(*to))
        }
        RunEvent::Moved { from, to, .. } => {
            format!("hosts {} instead of {} from now on", place(*to), place(*from))
        }
        _ => return None,
    })
}

/// Describes how a peer went.
fn describe_loss(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::Lost { peer, name, span, how } if span.is_empty() => {
            format!("{}, which hosted nothing, is gone: {how}", title(*peer, name.as_ref()))
        }
        RunEvent::Lost { peer, name, span, how } => {
            format!("{} is gone from {}: {how}", title(*peer, name.as_ref()), place(*span))
        }
        RunEvent::Convicted { peer, name, step, stage, back, charge } => format!(
            "{} {charge}, in {} at stage {stage}: it is out for good, and the run goes back to {} or earlier",
            title(*peer, name.as_ref()),
            StepCount::through(*step),
            StepCount::of_version(*back)
        ),
        _ => return None,
    })
}

fn place(span: StageSpan) -> String {
    if span.is_empty() { "nothing".to_owned() } else { format!("stage {span}") }
}

fn waiting(stages: &[u16], members: usize) -> String {
    let hosts = match stages {
        [] => None,
        [one] => Some(format!("a host of stage {one}")),
        many => Some(format!("hosts of stages {}", listed(many))),
    };
    let more = (members > 0).then(|| counted(members as u64, "more peer"));
    let parts: Vec<String> = hosts.into_iter().chain(more).collect();
    format!("waits for {}", if parts.is_empty() { "nobody".into() } else { parts.join(" and ") })
}

/// How far this process is in a step.
pub(crate) fn open_step(OpenStep { step, done, microbatches }: &OpenStep) -> String {
    let step = StepCount::through(*step);
    format!("{step}: {done} of {microbatches} microbatches done by this peer")
}

/// `1`, `1, 2`.
pub(crate) fn listed(numbers: &[u16]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u16::to_string).collect();
    numbers.join(", ")
}

/// Formats a duration in its two largest units: `45 s`, `4 min`, `6 h 44 min`, `3 d 4 h`.
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    let (minutes, hours) = (seconds.saturating_add(30) / 60, seconds.saturating_add(30) / 3600);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..3570 => format!("{minutes} min"),
        3570..172_800 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

/// Formats an amount of currency, small ones with more digits.
pub(crate) fn currency(units: f64) -> String {
    if units >= 10.0 { format!("{units:.2}") } else { format!("{units:.4}") }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{ContentHash, PeerId};
    use shoal_protocol::message::MoveReason;

    use super::*;
    use crate::driver::observer::Observer;
    use crate::observers::{EventSink, Observers};
    use crate::terminal::{self, tests::HOSTILE};

    #[test]
    fn waiting_names_what_is_missing() {
        assert_eq!(waiting(&[1, 2], 3), "waits for hosts of stages 1, 2 and 3 more peers");
        assert_eq!(waiting(&[1], 0), "waits for a host of stage 1");
        assert_eq!(waiting(&[], 1), "waits for 1 more peer");
    }

    #[test]
    fn who_hosts_nothing_is_told_of_as_such() {
        let span = StageSpan::none();
        let text = describe(&RunEvent::Joined { span });
        assert_eq!(text.as_deref(), Some("joined, hosting nothing"));
        let text = describe(&RunEvent::Joined { span: StageSpan::all(3) });
        assert_eq!(text.as_deref(), Some("joined, hosting stage 0-2"));
    }

    #[test]
    fn a_run_of_workers_says_that_they_may_be_done_in_turn() {
        let started = |worker_steps| RunEvent::Started {
            run: shoal_protocol::ids::ContentHash([7; 32]),
            seed: 0,
            stages: 1,
            steps: 10,
            tokens_per_step: 800,
            microbatches: 4,
            worker_steps,
        };
        let text = describe(&started(None)).expect("it is shown");
        assert_eq!(text, "run 07070707: 10 steps of 800 tokens, 1 stage of the model");
        let text = describe(&started(Some(30))).expect("it is shown");
        assert!(text.contains("4 workers make 30 steps of their own"), "{text}");
        assert!(text.ends_with("with fewer devices in the swarm some are done in turn"), "{text}");
    }

    /// Every event with a text, each from elsewhere.
    fn with_hostile_texts() -> Vec<RunEvent> {
        let text = || HOSTILE.to_owned();
        let (version, peer, span) = (1, PeerId([1; 32]), StageSpan::all(2));
        vec![
            RunEvent::Listening { address: text() },
            RunEvent::MoveCancelled {
                peer,
                name: None,
                to: span,
                reason: MoveReason::Uneven,
                obstacle: text(),
            },
            RunEvent::Checkpoint { version, directory: text(), hash: ContentHash([1; 32]) },
            RunEvent::Uploaded { version, archive: text() },
            RunEvent::UploadFailed { version, archive: text(), reason: text() },
            RunEvent::ScoreFailed { version, reason: text() },
            RunEvent::Continued { version, archive: text() },
            RunEvent::Outlier { step: 1, reason: text(), rate: 0.0, text: text() },
            RunEvent::Lost { peer, name: None, span, how: text() },
            RunEvent::Convicted { peer, name: None, step: 1, stage: 0, back: 0, charge: text() },
            RunEvent::ConnectionRefused {
                peer: Some(peer),
                address: None,
                reason: text(),
                text: text(),
            },
            RunEvent::Draining { source: text() },
            RunEvent::Stopped { reason: text() },
        ]
    }

    /// The number of texts in the definition of events, so that a new one is added above.
    #[test]
    fn no_event_reaches_a_screen_with_what_it_obeys() {
        let definition = include_str!("events.rs");
        let (_, events) = definition.split_once("pub enum RunEvent {").expect("it is defined");
        let (events, _) = events.split_once("\n}").expect("it ends");
        let texts = events.matches(": String").count();
        let all = with_hostile_texts();
        let written = all.iter().map(|event| serde_json::to_string(event).expect("plain data"));
        let written: Vec<String> = written.collect();
        let found: usize = written.iter().map(|line| line.matches("[2J").count()).sum();
        assert_eq!(found, texts, "with_hostile_texts lacks an event");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events");
        let sink = EventSink::File(path.clone());
        let mut observers = Observers::new(Some(&sink), None, "test").expect("a file");
        for event in &all {
            observers.note(event);
        }
        let stream = std::fs::read_to_string(&path).expect("written");
        assert_eq!(stream.lines().count(), all.len());
        let status = observers.status_watch().status();
        let logged = status.events.iter().map(|event| event.text.clone());
        let described =
            all.iter().filter_map(describe).map(|text| terminal::visible(&text).into_owned());
        for text in stream.lines().map(str::to_owned).chain(logged).chain(described) {
            let obeyed =
                |letter: char| letter.is_control() || "\u{202e}\u{2066}\u{2028}".contains(letter);
            assert!(!text.contains(obeyed), "{text:?}");
        }
        for (line, event) in stream.lines().zip(&all) {
            assert_eq!(&serde_json::from_str::<RunEvent>(line).expect("an event"), event);
        }
    }

    #[test]
    fn durations_have_two_units() {
        let texts = [0.4, 119.0, 120.0, 3569.0, 3570.0, 24_240.0, 172_800.0, 1e6].map(duration);
        let expected =
            ["0 s", "119 s", "2 min", "59 min", "1 h 0 min", "6 h 44 min", "2 d 0 h", "11 d 13 h"];
        assert_eq!(texts, expected);
        assert_eq!(duration(-1.0), "0 s");
        assert!(duration(f64::INFINITY).contains(" d "));
    }
}
