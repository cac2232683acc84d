//! The spans with which an era begins, after stages have lost their last replica.
//!
//! All members begin an era with the same version and fetch what they lack, so spans may change freely. Members whose
//! stages have other replicas move to the lost stages. Where that is not enough and nobody comes, members host stages
//! beside their own, as far as they have room, in memory or below it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::message::MemberRecord;

/// The spans of all members.
type Spans = BTreeMap<Member, StageSpan>;

fn hosts(spans: &Spans, stage: Stage) -> usize {
    spans.values().filter(|span| span.contains(stage)).count()
}

/// The first stage that no member hosts.
fn first_without_host(spans: &Spans, stages: u16) -> Option<Stage> {
    (0..stages).map(Stage).find(|stage| hosts(spans, *stage) == 0)
}

/// Moves members whose stages have other replicas to stages without one: the first of them from the stage with the
/// most replicas.
pub(crate) fn move_spare(spans: &mut Spans, stages: u16, movable: &[&MemberRecord]) {
    while let Some(stage) = first_without_host(spans, stages) {
        let spare = movable.iter().filter(|record| {
            let span = spans[&record.member];
            let replicated = |stage| hosts(spans, stage) > 1;
            record.room.most > 0 && !span.is_empty() && span.stages().all(replicated)
        });
        let most = spare.max_by_key(|record| {
            (hosts(spans, spans[&record.member].first), Reverse(record.member))
        });
        let Some(most) = most else { return };
        spans.insert(most.member, StageSpan::one(stage));
    }
}

/// Lengthens spans until every stage has a host; leaves all as they are where that is not possible. Spans that memory
/// holds come before those that are swapped, and short ones before long ones.
pub(crate) fn extend(spans: &mut Spans, stages: u16, movable: &[&MemberRecord]) {
    let mut longer = spans.clone();
    while first_without_host(&longer, stages).is_some() {
        let lacking = (0..stages).map(Stage).filter(|stage| hosts(&longer, *stage) == 0);
        let lacking: BTreeSet<Stage> = lacking.collect();
        let extensions = movable.iter().flat_map(|record| {
            let own = longer[&record.member];
            let with = lacking.iter().map(move |stage| with_stage(own, *stage));
            let has_room = move |span: &StageSpan| {
                !own.is_empty() && length(*span) <= record.room.most.min(record.longest.max(1))
            };
            with.filter(has_room).map(|span| (*record, span))
        });
        let least = extensions.min_by_key(|(record, span)| {
            let added = length(*span) - length(longer[&record.member]);
            let is_swapped = length(*span) > record.room.in_memory;
            (added, is_swapped, length(*span), record.member)
        });
        let Some((record, span)) = least else { return };
        longer.insert(record.member, span);
    }
    *spans = longer;
}

fn length(span: StageSpan) -> u16 {
    u16::try_from(span.stages().count()).unwrap_or(u16::MAX)
}

/// The shortest span that contains another one and a stage.
fn with_stage(span: StageSpan, stage: Stage) -> StageSpan {
    StageSpan { first: span.first.min(stage), last: span.last.max(stage) }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};
    use shoal_protocol::message::StageRoom;
    use shoal_protocol::units::Rate;

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn room(in_memory: u16, most: u16) -> StageRoom {
        StageRoom { in_memory, most, swap_rate: Rate(1) }
    }

    /// Members with these spans and rooms in a run of six stages, and their spans afterwards.
    fn extended(members: &[(&str, StageRoom, u16)]) -> Vec<String> {
        let record =
            |(number, (span, room, longest)): (u8, &(&str, StageRoom, u16))| MemberRecord {
                room: *room,
                longest: *longest,
                ..MemberRecord::plain(member(number), span.parse().expect("a span"))
            };
        let records: Vec<MemberRecord> = (0..).zip(members).map(record).collect();
        let mut spans = records.iter().map(|record| (record.member, record.span)).collect();
        extend(&mut spans, 6, &records.iter().collect::<Vec<_>>());
        spans.values().map(ToString::to_string).collect()
    }

    #[test]
    fn members_take_the_stages_beside_their_own() {
        let (roomy, swaps) = (room(6, 6), room(2, 6));
        assert_eq!(extended(&[("0-1", swaps, 6), ("4-5", swaps, 6)]), ["0-2", "3-5"]);
        assert_eq!(extended(&[("0-1", swaps, 6), ("4-5", roomy, 6)]), ["0-1", "2-5"], "in memory");
        assert_eq!(extended(&[("2", swaps, 6)]), ["0-5"]);
        let three = [("0", roomy, 6), ("2", roomy, 6), ("4", roomy, 6)];
        assert_eq!(extended(&three), ["0-1", "2-3", "4-5"]);
    }

    #[test]
    fn a_span_goes_over_stages_of_others_where_those_have_no_room() {
        let fixed = StageRoom::NONE;
        assert_eq!(extended(&[("0", room(6, 6), 6), ("1-3", fixed, 1)]), ["0-5", "1-3"]);
    }

    #[test]
    fn nothing_changes_where_a_stage_would_still_lack_a_host() {
        let few = room(2, 2);
        assert_eq!(extended(&[("0-1", few, 6), ("4-5", few, 6)]), ["0-1", "4-5"]);
        // Each wants one stage at a time.
        assert_eq!(extended(&[("0", room(6, 6), 1), ("1-5", room(6, 6), 1)]), ["0", "1-5"]);
        assert_eq!(extended(&[("0", room(6, 6), 1), ("2-5", room(6, 6), 1)]), ["0", "2-5"]);
    }
}
