//! The deaths that a run survives, in figures and as a sentence.

use shoal_formats::words::counted;
use shoal_protocol::ids::Stage;
use shoal_scheduler::coordinator::placing::anchors;

use super::{MemberState, MemberStatus, RunStatus, SurvivalStatus};
use crate::event_text::{duration, listed};

/// Anchors that the death of one does not stop.
const WANTED_ANCHORS: usize = 3;

/// Derives the deaths that a run survives from its members and its newest checkpoint. `None` when the run is complete
/// or no member serves.
pub(super) fn survival(
    run: &RunStatus,
    members: &[MemberStatus],
    seconds_per_step: Option<f64>,
) -> Option<SurvivalStatus> {
    let serving: Vec<&MemberStatus> =
        members.iter().filter(|member| member.state == MemberState::Serving).collect();
    if run.version >= run.steps || serving.is_empty() {
        return None;
    }
    let hosts =
        |stage| serving.iter().filter(|member| member.stages.contains(Stage(stage))).count();
    let with = |wanted| (0..run.stages).filter(|stage| hosts(*stage) == wanted).collect();
    let (uncovered, single): (Vec<u16>, Vec<u16>) = (with(0), with(1));
    let anchors = members.iter().filter(|member| member.anchor).count();
    let spare_anchors = anchors::spare(anchors);
    let steps_at_risk = run.saved.map(|saved| run.version.saturating_sub(saved));
    let mut status = SurvivalStatus {
        any_one_peer: uncovered.is_empty() && single.is_empty() && spare_anchors > 0,
        uncovered_stages: uncovered,
        single_replica_stages: single,
        spare_anchors,
        steps_at_risk,
        seconds_at_risk: steps_at_risk.and_then(|steps| match steps {
            0 => Some(0.0),
            steps => Some(steps as f64 * seconds_per_step?),
        }),
        text: String::new(),
        advice: String::new(),
    };
    status.text = text(&status, run, serving.len());
    status.advice = advice(&status, run);
    Some(status)
}

/// The sentence: whether any one peer may die, why not, and what is lost if all do.
fn text(status: &SurvivalStatus, run: &RunStatus, serving: usize) -> String {
    let mut reasons = Vec::new();
    if serving == 1 && run.stages > 0 && status.uncovered_stages.is_empty() {
        reasons.push("one peer trains".to_owned());
    } else {
        reasons.extend(have(&status.uncovered_stages, run.stages, "no replica"));
        reasons.extend(have(&status.single_replica_stages, run.stages, "one replica"));
    }
    if status.spare_anchors == 0 && serving > 1 {
        reasons.push("the log has one anchor".to_owned());
    }
    let one = match status.any_one_peer {
        true => "any one peer: yes".to_owned(),
        false => format!("any one peer: no, {}", reasons.join(", ")),
    };
    let all = match (status.steps_at_risk, status.seconds_at_risk) {
        (None, _) => return one,
        (Some(0), _) => "no finished step is lost".to_owned(),
        (Some(steps), None) => format!("{} lost", are(steps)),
        (Some(steps), Some(seconds)) => {
            format!("{} ({}) are lost", duration(seconds), counted(steps, "step"))
        }
    };
    format!("{one}; if all die now {all}")
}

fn are(steps: u64) -> String {
    let verb = if steps == 1 { "is" } else { "are" };
    format!("{} {verb}", counted(steps, "step"))
}

/// Says what some stages have; nothing of no stage.
fn have(stages: &[u16], all: u16, what: &str) -> Option<String> {
    match stages {
        [] => None,
        [one] => Some(format!("stage {one} has {what}")),
        many if many.len() == usize::from(all) => Some(format!("every stage has {what}")),
        many => Some(format!("stages {} have {what}", listed(many))),
    }
}

/// The measures that would make the run survive more; empty if there are none.
fn advice(status: &SurvivalStatus, run: &RunStatus) -> String {
    let mut all = Vec::new();
    let mut short = [&status.uncovered_stages[..], &status.single_replica_stages[..]].concat();
    short.sort_unstable();
    match short[..] {
        [] => {}
        [stage] if run.stages > 1 => {
            all.push(format!("one more peer: `shoal join ... --stage {stage}`"));
        }
        _ => all.push("more peers: `shoal join ...`".to_owned()),
    }
    if status.spare_anchors == 0 {
        all.push(format!("{WANTED_ANCHORS} anchors: `--anchor` on peers that stay"));
    }
    if !run.saves && status.steps_at_risk.is_some_and(|steps| steps > 0) {
        all.push("checkpoints: `[checkpoint] interval` in run.toml".to_owned());
    }
    all.join("; ")
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::StageSpan;

    use super::*;
    use crate::status::example;

    /// A run of two stages at version 40 of 200 with a checkpoint of version 30, and peers that serve spans;
    /// the first `anchors` of them are anchors.
    fn of(spans: &[StageSpan], anchors: usize) -> (RunStatus, Vec<MemberStatus>) {
        let example = example::status();
        let run = RunStatus { stages: 2, saved: Some(30), ..example.run.expect("a run") };
        let member = |(index, span): (usize, &StageSpan)| MemberStatus {
            stages: *span,
            state: MemberState::Serving,
            anchor: index < anchors,
            ..example.members[0].clone()
        };
        (run, spans.iter().enumerate().map(member).collect())
    }

    fn survives((run, members): &(RunStatus, Vec<MemberStatus>)) -> SurvivalStatus {
        survival(run, members, Some(24.0)).expect("the run goes on")
    }

    const BOTH: fn() -> StageSpan = || StageSpan::all(2);

    #[test]
    fn replicas_and_anchors_make_any_one_death_harmless() {
        let status = survives(&of(&[BOTH(), BOTH(), BOTH()], 3));
        assert!(status.any_one_peer && status.spare_anchors == 1, "{status:?}");
        assert_eq!((status.steps_at_risk, status.seconds_at_risk), (Some(10), Some(240.0)));
        let text = "any one peer: yes; if all die now 4 min (10 steps) are lost";
        assert_eq!((status.text.as_str(), status.advice.as_str()), (text, ""));
    }

    #[test]
    fn a_stage_with_one_replica_is_named_with_what_would_do() {
        let one = |stage| StageSpan::one(Stage(stage));
        let mut swarm = of(&[one(0), one(0), one(1)], 3);
        let status = survives(&swarm);
        assert_eq!(status.single_replica_stages, [1]);
        let text =
            "any one peer: no, stage 1 has one replica; if all die now 4 min (10 steps) are lost";
        assert_eq!(status.text, text);
        assert_eq!(status.advice, "one more peer: `shoal join ... --stage 1`");
        // A replica that still fetches the weights does not count.
        swarm.1[1].state = MemberState::CatchingUp;
        assert!(
            survives(&swarm).text.starts_with("any one peer: no, every stage has one replica;")
        );
        swarm.1.truncate(1);
        swarm.1[0].stages = one(1);
        let status = survives(&swarm);
        assert_eq!((status.uncovered_stages, status.single_replica_stages), (vec![0], vec![1]));
    }

    #[test]
    fn a_log_with_one_anchor_is_a_reason() {
        for anchors in [1, 2] {
            let status = survives(&of(&[BOTH(), BOTH(), BOTH()], anchors));
            assert!(status.text.starts_with("any one peer: no, the log has one anchor;"));
            assert_eq!(status.advice, "3 anchors: `--anchor` on peers that stay");
        }
    }

    #[test]
    fn a_peer_alone_is_told_so() {
        let status = survives(&of(&[BOTH()], 1));
        assert!(status.text.starts_with("any one peer: no, one peer trains; if all die now"));
        assert!(status.advice.starts_with("more peers: `shoal join ...`; 3 anchors"));
    }

    #[test]
    fn losses_are_told_as_far_as_they_are_known() {
        let (mut run, members) = of(&[BOTH(), BOTH(), BOTH()], 3);
        let end = |run: &RunStatus, step| {
            let text = survival(run, &members, step).expect("it goes on").text;
            text.strip_prefix("any one peer: yes").expect("it does").to_owned()
        };
        assert_eq!(end(&run, None), "; if all die now 10 steps are lost");
        run.saved = Some(run.version);
        assert_eq!(end(&run, None), "; if all die now no finished step is lost");
        run.saved = None;
        assert_eq!(end(&run, Some(1.0)), "");
    }

    #[test]
    fn a_run_without_checkpoints_is_told_how_to_make_some() {
        let (mut run, members) = of(&[BOTH(), BOTH(), BOTH()], 3);
        (run.saves, run.saved) = (false, Some(0));
        let advice = survival(&run, &members, None).expect("it goes on").advice;
        assert_eq!(advice, "checkpoints: `[checkpoint] interval` in run.toml");
    }

    #[test]
    fn a_complete_run_has_nothing_to_lose() {
        let (mut run, members) = of(&[BOTH()], 1);
        run.version = run.steps;
        assert_eq!(survival(&run, &members, None), None);
        run.version = 0;
        assert_eq!(survival(&run, &[], None), None);
    }
}
