//! Differences between two observations of a run, as events. Every member derives the same ones.

use std::collections::BTreeMap;

use shoal_protocol::ids::PeerId;

use super::{MemberState, MemberStatus, Observation, Tone};
use crate::step_count::StepCount;

/// The changes from one observation to the next. `causes` holds the known causes of losses.
pub(super) fn changes(
    before: &Observation,
    now: &Observation,
    causes: &mut BTreeMap<PeerId, String>,
) -> Vec<(Tone, String)> {
    let mut found = Vec::new();
    let (Some(old), Some(new)) = (&before.run, &now.run) else { return found };
    if old.id != new.id {
        return found;
    }
    if new.era > old.era {
        found.push((
            Tone::Bad,
            format!("the run goes back to {}", StepCount::of_version(new.version)),
        ));
    }
    if before.view != now.view {
        members(before, now, causes, &mut found);
    }
    if let Some(coordinator) =
        new.coordinator.filter(|coordinator| Some(*coordinator) != old.coordinator)
    {
        found.push((Tone::Plain, format!("{} is the coordinator", title_of(now, coordinator))));
    }
    let saved = |run: &super::RunStatus| run.checkpoint.as_ref().map(|saved| saved.version);
    if let Some(version) = saved(new).filter(|version| Some(*version) > saved(old)) {
        found.push((
            Tone::Good,
            format!("the checkpoint of {} is complete", StepCount::of_version(version)),
        ));
    }
    found
}

fn members(
    before: &Observation,
    now: &Observation,
    causes: &mut BTreeMap<PeerId, String>,
    found: &mut Vec<(Tone, String)>,
) {
    for member in &before.members {
        if same(now, member).is_none() {
            let how =
                causes.remove(&member.peer).map_or_else(String::new, |how| format!(": {how}"));
            let text = format!("{} is gone from {}{how}", member.title(), place(member));
            found.push((Tone::Bad, text));
        }
    }
    causes.clear();
    for member in &now.members {
        let serves = member.state == MemberState::Serving;
        match same(before, member) {
            None => {
                let does = if serves { "hosts" } else { "joins" };
                let text = format!("{} {does} {}", member.title(), place(member));
                found.push((Tone::Plain, text));
            }
            Some(was) if serves && was.state == MemberState::CatchingUp => {
                let text = format!("{} serves {}", member.title(), place(member));
                found.push((Tone::Good, text));
            }
            Some(was) => found.extend(moved(was, member)),
        }
    }
}

/// A change of a member's stage, or of its move to one.
fn moved(was: &MemberStatus, member: &MemberStatus) -> Option<(Tone, String)> {
    let peer = member.title();
    let text = if member.stages != was.stages {
        format!("{peer} hosts {} instead of {}", place(member), place(was))
    } else {
        match (was.moves, member.moves) {
            (before, Some(moves)) if before.is_none_or(|before| before.to != moves.to) => {
                let (to, why) = (moves.to, moves.reason.words());
                format!("{peer} moves from {} to stage {to}: {why}", place(member))
            }
            (Some(_), None) => format!("{peer} stays at {}", place(member)),
            _ => return None,
        }
    };
    Some((Tone::Plain, text))
}

fn title_of(observation: &Observation, peer: PeerId) -> String {
    let member = observation.members.iter().find(|member| member.peer == peer);
    member.map_or_else(|| peer.short(), MemberStatus::title)
}

/// The same incarnation of the same peer in another observation.
fn same<'a>(observation: &'a Observation, member: &MemberStatus) -> Option<&'a MemberStatus> {
    let wanted = (member.peer, member.incarnation);
    observation.members.iter().find(|other| (other.peer, other.incarnation) == wanted)
}

fn place(member: &MemberStatus) -> String {
    if member.stages.is_empty() { "the run".to_owned() } else { format!("stage {}", member.stages) }
}
