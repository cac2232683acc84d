//! What is new between two sights of a run. Every member sees these, whoever keeps the run.

use std::collections::BTreeMap;

use shoal_protocol::ids::PeerId;

use super::{MemberState, MemberStatus, Sight, Tone};

/// What happened from one sight to the next, in words. `causes` are those of losses, where known.
pub(super) fn news(
    before: &Sight,
    now: &Sight,
    causes: &mut BTreeMap<PeerId, String>,
) -> Vec<(Tone, String)> {
    let mut found = Vec::new();
    let (Some(old), Some(new)) = (&before.run, &now.run) else { return found };
    if old.id != new.id {
        return found;
    }
    if new.era > old.era {
        found.push((Tone::Bad, format!("the run goes back to version {}", new.version)));
    }
    if before.view != now.view {
        members(before, now, causes, &mut found);
    }
    if let Some(coordinator) =
        new.coordinator.filter(|coordinator| Some(*coordinator) != old.coordinator)
    {
        found.push((Tone::Plain, format!("{} keeps the run", coordinator.short())));
    }
    let saved = |run: &super::RunStatus| run.checkpoint.as_ref().map(|saved| saved.version);
    if let Some(version) = saved(new).filter(|version| Some(*version) > saved(old)) {
        found.push((Tone::Good, format!("checkpoint of version {version} is complete")));
    }
    found
}

fn members(
    before: &Sight,
    now: &Sight,
    causes: &mut BTreeMap<PeerId, String>,
    found: &mut Vec<(Tone, String)>,
) {
    for member in &before.members {
        if same(now, member).is_none() {
            let how =
                causes.remove(&member.peer).map_or_else(String::new, |how| format!(": {how}"));
            let text = format!("{} is gone from {}{how}", member.peer.short(), place(member));
            found.push((Tone::Bad, text));
        }
    }
    causes.clear();
    for member in &now.members {
        let serves = member.state == MemberState::Serving;
        match same(before, member) {
            None => {
                let does = if serves { "hosts" } else { "comes to" };
                let text = format!("{} {does} {}", member.peer.short(), place(member));
                found.push((Tone::Plain, text));
            }
            Some(was) if serves && was.state == MemberState::CatchingUp => {
                let text = format!("{} serves {}", member.peer.short(), place(member));
                found.push((Tone::Good, text));
            }
            Some(was) => found.extend(moved(was, member)),
        }
    }
}

/// What is new of a member's way to another stage.
fn moved(was: &MemberStatus, member: &MemberStatus) -> Option<(Tone, String)> {
    let peer = member.peer.short();
    let text = if member.stages != was.stages {
        format!("{peer} hosts {} instead of {}", place(member), place(was))
    } else {
        match (was.moves, member.moves) {
            (before, Some(moves)) if before.is_none_or(|before| before.to != moves.to) => {
                let (to, why) = (moves.to, moves.reason.words());
                format!("{peer} goes from {} to stage {to}: {why}", place(member))
            }
            (Some(_), None) => format!("{peer} stays at {}", place(member)),
            _ => return None,
        }
    };
    Some((Tone::Plain, text))
}

/// The same life of the same peer.
fn same<'a>(sight: &'a Sight, member: &MemberStatus) -> Option<&'a MemberStatus> {
    let wanted = (member.peer, member.incarnation);
    sight.members.iter().find(|other| (other.peer, other.incarnation) == wanted)
}

fn place(member: &MemberStatus) -> String {
    if member.stages.is_empty() { "the run".to_owned() } else { format!("stage {}", member.stages) }
}
