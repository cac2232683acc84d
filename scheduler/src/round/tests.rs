use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{Attempt, Era, Incarnation, PeerId, Step, Term, WeightGroup};
use shoal_protocol::message::{LinkEstimate, Mended, RoundGroup, RoundId, RoundMember};
use shoal_protocol::units::Rate;

use super::*;
use crate::round::RoundCut;

const CUT: RoundCut = RoundCut { block_elements: 2, piece_elements: 4 };

fn member(number: u8) -> Member {
    Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
}

fn id() -> RoundId {
    RoundId {
        era: Era(0),
        term: Term(1),
        step: Step(3),
        weights: WeightGroup(1),
        attempt: Attempt(0),
    }
}

/// A round of members 0, 1, ... with these weights.
fn round(weights: &[u32]) -> Round {
    let parts: Vec<(u32, Option<u16>)> = weights.iter().map(|weight| (*weight, None)).collect();
    round_of(&parts)
}

/// A round of members 0, 1, ... with these weights and islands.
fn round_of(parts: &[(u32, Option<u16>)]) -> Round {
    let part = |(number, (weight, island)): (usize, &(u32, Option<u16>))| RoundMember {
        member: member(number as u8),
        weight: *weight,
        island: *island,
    };
    let members = parts.iter().enumerate().map(part).collect();
    let group = RoundGroup { members, ..RoundGroup::default() }.into();
    Round { id: id(), group, mended: Mended::default() }
}

fn layout(round: &Round, elements: usize) -> Layout {
    Layout::new(round, elements, CUT, SumCodec::Exact)
}

/// Member 0's side of a round of two over 12 elements: it owns the pieces 0 (0..4) and 2 (8..10), the other
/// member 1 (4..8) and 3 (10..12). One piece may be in flight; both members count tags of sum 5.
fn of_two() -> Reduction {
    let round = round(&[1, 1]);
    let layout = layout(&round, 12);
    Reduction::new(round, member(0), layout, vec![1; 2], 5, 10).expect("a member")
}

/// The round of a single member with a stage of three elements, which counted tags of this sum.
fn of_one(own_proof: u64) -> Reduction {
    let round = round(&[1]);
    let layout = layout(&round, 3);
    Reduction::new(round, member(0), layout, vec![1], own_proof, 10).expect("a member")
}

/// A member's integers for piece 0 or 1, of four elements, or 2 or 3, of two.
fn part(number: u64, piece: u32) -> Payload {
    Payload {
        id: PayloadId(number),
        size: Bytes(if piece < 2 { 32 } else { 16 }),
        hash: None,
        seal: None,
    }
}

/// The result of a piece.
fn mean(number: u64, piece: u32) -> Payload {
    Payload {
        id: PayloadId(number),
        size: Bytes(if piece < 2 { 16 } else { 8 }),
        hash: None,
        seal: None,
    }
}

fn export(piece: u32, range: Range<usize>) -> PeerAction {
    PeerAction::Compute(Task::Export {
        round: id(),
        to: member(1),
        piece,
        range,
        parts: Vec::new(),
    })
}

fn actions(act: impl FnOnce(&mut Vec<PeerAction>)) -> Vec<PeerAction> {
    let mut out = Vec::new();
    act(&mut out);
    out
}

fn is_summary(action: &PeerAction) -> bool {
    matches!(action, PeerAction::Compute(Task::Summarise { .. }))
}

#[test]
fn a_round_needs_its_owner_as_a_member() {
    let round = round(&[1, 1]);
    let layout = layout(&round, 12);
    let none = Reduction::new(round, member(7), layout, vec![1; 2], 0, 0);
    assert!(none.is_none());
}

#[test]
fn a_piece_is_sent_when_the_previous_one_has_come_back() {
    let mut reduction = of_two();
    let started = actions(|out| assert_eq!(reduction.start(out), Ok(())));
    assert_eq!(started, [export(1, 4..8)]);
    let sent = actions(|out| reduction.exported(member(1), 1, part(1, 1), out));
    let tag = TensorTag::RoundPart { round: id(), mend: Mend(0), piece: 1, proof: 5 };
    let send = PeerAction::SendTensor { to: member(1), tag, seal: None, payload: PayloadId(1) };
    assert_eq!(sent, [send, PeerAction::Release(PayloadId(1))]);
    let back = actions(|out| {
        assert_eq!(reduction.result(member(1), 1, 10, mean(2, 1), out), Ok(()));
    });
    let install = Task::Install { round: id(), range: 4..8, payload: PayloadId(2) };
    assert_eq!(back, [PeerAction::Compute(install), export(3, 10..12)]);
    assert_eq!(reduction.held(), Bytes(16));
    let installed = actions(|out| reduction.installed(&(4..8), out));
    assert_eq!(installed, [PeerAction::Release(PayloadId(2))]);
    assert_eq!(reduction.held(), Bytes(0));
}

#[test]
fn the_first_pieces_go_to_each_in_turn_from_the_next_member_on() {
    let round = round(&[1, 1, 1, 1]);
    let layout = layout(&round, 32);
    let mut second = Reduction::new(round, member(1), layout, vec![2; 4], 5, 10).expect("a member");
    let exported = actions(|out| second.start(out).expect("a valid round"));
    let order: Vec<(Member, u32)> = exported
        .iter()
        .map(|action| match action {
            PeerAction::Compute(Task::Export { to, piece, .. }) => (*to, *piece),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [(2, 2), (3, 3), (0, 0), (2, 6), (3, 7), (0, 4)];
    assert_eq!(order, expected.map(|(to, piece)| (member(to), piece)));
}

#[test]
fn an_own_piece_is_summed_when_all_parts_are_in_and_goes_to_the_others() {
    let mut reduction = of_two();
    let summed = actions(|out| {
        assert_eq!(reduction.part((member(1), Mend(0)), 2, 5, part(3, 2), out), Ok(()));
    });
    let (round, parts) = (id(), vec![PayloadId(3)]);
    let reduce = Task::Reduce { round, piece: 2, range: 8..10, parts };
    assert_eq!(summed, [PeerAction::Compute(reduce)]);
    let reduced = actions(|out| reduction.reduced(2, mean(4, 2), out));
    let tag = TensorTag::RoundResult { round: id(), mend: Mend(0), piece: 2, proof: 10 };
    let expected = [
        PeerAction::Release(PayloadId(3)),
        PeerAction::SendTensor { to: member(1), tag, seal: None, payload: PayloadId(4) },
        PeerAction::Release(PayloadId(4)),
    ];
    assert_eq!(reduced, expected);
}

#[test]
fn the_result_is_measured_when_it_is_whole() {
    let mut reduction = of_two();
    reduction.gave = [1, 3].into();
    for (piece, range) in [(1, 4..8), (3, 10..12)] {
        actions(|out| {
            let id = 10 + u64::from(piece);
            assert_eq!(reduction.result(member(1), piece, 10, mean(id, piece), out), Ok(()));
            reduction.installed(&range, out);
        });
    }
    for piece in [0, 2] {
        let last = actions(|out| {
            let id = 20 + u64::from(piece);
            assert_eq!(
                reduction.part((member(1), Mend(0)), piece, 5, part(id, piece), out),
                Ok(())
            );
            reduction.reduced(piece, mean(id + 10, piece), out);
        });
        let measured = last.iter().any(is_summary);
        assert_eq!(measured, piece == 2);
    }
    assert_eq!(reduction.outcome(), None);
    let outcome = reduction.summarised((ContentHash([1; 32]), 2.5), Vec::new(), Vec::new());
    let expected = RoundOutcome { hash: ContentHash([1; 32]), square_norm: 2.5, proof: 10 };
    assert_eq!(outcome, Some(expected));
    assert_eq!(reduction.outcome(), Some(expected));
}

#[test]
fn a_result_without_this_members_integers_is_no_result() {
    let mut reduction = of_two();
    actions(|out| assert_eq!(reduction.start(out), Ok(())));
    let early = actions(|out| {
        assert_eq!(reduction.result(member(1), 1, 10, mean(2, 1), out), Ok(()));
    });
    assert_eq!(early, [PeerAction::Release(PayloadId(2))]);
    actions(|out| reduction.exported(member(1), 1, part(1, 1), out));
    let whole = actions(|out| {
        assert_eq!(reduction.result(member(1), 1, 10, mean(3, 1), out), Ok(()));
    });
    let install = Task::Install { round: id(), range: 4..8, payload: PayloadId(3) };
    assert_eq!(whole[0], PeerAction::Compute(install));
}

#[test]
fn a_member_alone_sums_its_own() {
    let mut reduction = of_one(10);
    let started = actions(|out| assert_eq!(reduction.start(out), Ok(())));
    let reduce = Task::Reduce { round: id(), piece: 0, range: 0..3, parts: Vec::new() };
    assert_eq!(started, [PeerAction::Compute(reduce)]);
    let reduced = actions(|out| reduction.reduced(0, mean(1, 0), out));
    let measure = PeerAction::Compute(Task::Summarise { round: id(), owned: Vec::new() });
    assert_eq!(reduced, [PeerAction::Release(PayloadId(1)), measure]);
}

#[test]
fn a_wrong_proof_is_refused() {
    let differs = |found| Fault::ProofDiffers { round: id(), expected: 10, found };
    let mut out = Vec::new();
    let summed = of_two().part((member(1), Mend(0)), 0, 6, part(1, 0), &mut out);
    assert_eq!(summed, Err(differs(11)));
    let mut reduction = of_two();
    reduction.gave = [1].into();
    let result = reduction.result(member(1), 1, 9, mean(2, 1), &mut out);
    assert_eq!(result, Err(differs(9)));
    let mut alone = of_one(9);
    assert_eq!(alone.start(&mut out), Err(differs(9)));
    assert!(!out.iter().any(|action| matches!(action, PeerAction::Compute(_))));
}

#[test]
fn unexpected_payloads_are_released() {
    let mut reduction = of_two();
    let mut out = Vec::new();
    let release = |id| vec![PeerAction::Release(PayloadId(id))];
    // No such piece, no such member, the member itself; a piece that the other one owns, or this one.
    for (number, (from, piece)) in [(1, 4), (9, 0), (0, 0), (9, 1), (0, 1)].into_iter().enumerate()
    {
        let (number, from) = (number as u64, member(from));
        assert_eq!(
            reduction.part((from, Mend(0)), piece, 5, part(number, piece), &mut out),
            Ok(())
        );
        assert_eq!(std::mem::take(&mut out), release(number));
        assert_eq!(reduction.result(from, piece, 10, mean(number, piece), &mut out), Ok(()));
        assert_eq!(std::mem::take(&mut out), release(number));
    }
    // Of a wrong length.
    assert_eq!(reduction.part((member(1), Mend(0)), 0, 5, part(6, 2), &mut out), Ok(()));
    assert_eq!(reduction.result(member(1), 1, 10, mean(7, 2), &mut out), Ok(()));
    assert_eq!(std::mem::take(&mut out), [release(6), release(7)].concat());
    // A piece that was received before.
    assert_eq!(reduction.part((member(1), Mend(0)), 0, 5, part(8, 0), &mut out), Ok(()));
    out.clear();
    assert_eq!(reduction.part((member(1), Mend(0)), 0, 5, part(9, 0), &mut out), Ok(()));
    assert_eq!(out, release(9));
}

#[test]
fn the_number_of_pieces_in_flight_depends_on_the_link() {
    let piece = Bytes(1 << 18);
    let link = |rate: u64, milliseconds: u64| {
        let round_trip = Duration::from_millis(milliseconds);
        ahead(piece, AHEAD, Some(&LinkEstimate { rate: Some(Rate(rate)), round_trip }))
    };
    assert_eq!(ahead(piece, AHEAD, None), AHEAD);
    assert_eq!(link(100 << 20, 1), 8, "20 ms of 100 MiB a second");
    assert_eq!(link(8 << 20, 100), 10, "three round trips");
    assert_eq!(link(1000, 10), LEAST_AHEAD);
    assert_eq!(link(u64::MAX, 3_600_000), AHEAD);
    assert_eq!(
        ahead(piece, 1, Some(&LinkEstimate { rate: Some(Rate(0)), round_trip: Duration::ZERO })),
        1
    );
    assert_eq!(most_ahead(piece, Bytes(1 << 24), 5), 16);
    assert_eq!(most_ahead(piece, Bytes(1), 5), 1);
    assert_eq!(most_ahead(piece, Bytes(u64::MAX), 2), AHEAD);
}

/// A mended round of three members over 24 elements without member 2, and member 0's state before
/// the mend: it has summed its first piece. Of the pieces 0 to 5, of four elements each, it owns 0 and 3, member 1
/// owns 1 and 4, member 2 owns 2 and 5.
fn interrupted(changed: &[u16]) -> (Reduction, Round) {
    let before = round(&[1, 1, 1]);
    let layout = layout(&before, 24);
    let mut interrupted =
        Reduction::new(before, member(0), layout, vec![2; 3], 5, 15).expect("a member");
    actions(|out| {
        interrupted.start(out).expect("a valid round");
        for from in [1, 2] {
            let first =
                Payload { id: PayloadId(u64::from(from)), size: Bytes(32), hash: None, seal: None };
            interrupted.part((member(from), Mend(0)), 0, 5, first, out).expect("a valid round");
        }
        let second = Payload { id: PayloadId(3), size: Bytes(32), hash: None, seal: None };
        interrupted.part((member(1), Mend(0)), 3, 5, second, out).expect("a valid round");
        interrupted.reduced(
            0,
            Payload { id: PayloadId(10), size: Bytes(16), hash: None, seal: None },
            out,
        );
    });
    interrupted.gave = interrupted.layout.numbers().collect();
    let mended = Mended { mend: Mend(1), changed: changed.iter().copied().collect() };
    (interrupted, Round { mended, ..round(&[1, 1]) })
}

fn result_of(id: u64) -> Payload {
    Payload { id: PayloadId(id), size: Bytes(16), hash: None, seal: None }
}

#[test]
fn a_mended_round_keeps_summed_pieces_and_unchanged_sums() {
    // Member 0 recomputed member 2's work.
    let (mut interrupted, mended) = interrupted(&[0]);
    actions(|out| {
        interrupted.result(member(1), 1, 15, result_of(20), out).expect("whole");
        interrupted.result(member(2), 2, 15, result_of(21), out).expect("whole");
        interrupted.installed(&(4..8), out);
    });
    interrupted.sums_change();
    let continued = actions(|out| assert_eq!(interrupted.go_on(mended, 10, false, out), Ok(())));
    let id = id();
    let export =
        |piece, range| Task::Export { round: id, to: member(1), piece, range, parts: Vec::new() };
    let parts = vec![PayloadId(3)];
    let expected = [
        // Pieces that member 1 has summed are not sent again; it owns one piece more.
        export(4, 16..20),
        export(7, 20..24),
        Task::Reduce { round: id, piece: 3, range: 12..16, parts },
    ];
    assert_eq!(continued, expected.map(PeerAction::Compute));
    interrupted.gave.extend([4, 7]);
    // A piece that member 2 reduced is released when its installation ends, and is missing.
    let installed = actions(|out| interrupted.installed(&(8..12), out));
    assert_eq!(installed, [PeerAction::Release(PayloadId(21))]);
    actions(|out| interrupted.reduced(3, result_of(30), out));
    for (piece, range) in [(4, 16..20), (7, 20..24)] {
        actions(|out| {
            interrupted
                .result(member(1), piece, 15, result_of(40 + u64::from(piece)), out)
                .expect("whole");
            interrupted.installed(&range, out);
        });
    }
    let new = Payload { id: PayloadId(50), size: Bytes(32), hash: None, seal: None };
    let summed =
        actions(|out| interrupted.part((member(1), Mend(1)), 6, 5, new, out).expect("whole"));
    let parts = vec![PayloadId(50)];
    let reduce = Task::Reduce { round: id, piece: 6, range: 8..12, parts };
    assert_eq!(summed, [PeerAction::Compute(reduce)]);
    let last = actions(|out| interrupted.reduced(6, result_of(51), out));
    assert!(last.iter().any(is_summary), "{last:?}");
    assert!(interrupted.summarised((ContentHash([1; 32]), 2.5), Vec::new(), Vec::new()).is_some());
    assert_eq!(interrupted.held(), Bytes(0));
}

#[test]
fn changed_sums_are_awaited_and_earlier_ones_are_discarded() {
    // Member 1 recomputed member 2's work.
    let (mut interrupted, mended) = interrupted(&[1]);
    let continued = actions(|out| assert_eq!(interrupted.go_on(mended, 5, false, out), Ok(())));
    assert_eq!(continued, [PeerAction::Release(PayloadId(3))]);
    let payload = |id| Payload { id: PayloadId(id), size: Bytes(32), hash: None, seal: None };
    let part = |interrupted: &mut Reduction, mend, piece, id| {
        actions(|out| {
            interrupted.part((member(1), Mend(mend)), piece, 10, payload(id), out).expect("whole")
        })
    };
    assert_eq!(part(&mut interrupted, 0, 3, 60), [PeerAction::Release(PayloadId(60))]);
    // The first piece is summed already.
    assert_eq!(part(&mut interrupted, 1, 0, 61), [PeerAction::Release(PayloadId(61))]);
    let parts = vec![PayloadId(62)];
    let reduce = Task::Reduce { round: id(), piece: 3, range: 12..16, parts };
    assert_eq!(part(&mut interrupted, 1, 3, 62), [PeerAction::Compute(reduce)]);
    // Messages from a lost member are ignored.
    let late =
        actions(|out| interrupted.result(member(2), 2, 15, result_of(63), out).expect("released"));
    assert_eq!(late, [PeerAction::Release(PayloadId(63))]);
}

#[test]
fn changing_sums_are_not_read() {
    let (mut interrupted, mended) = interrupted(&[0]);
    interrupted.sums_change();
    let held_back = actions(|out| {
        interrupted.result(member(1), 1, 15, result_of(70), out).expect("whole");
        let second = Payload { id: PayloadId(71), size: Bytes(32), hash: None, seal: None };
        interrupted.part((member(2), Mend(0)), 3, 5, second, out).expect("a valid round");
    });
    let install = Task::Install { round: id(), range: 4..8, payload: PayloadId(70) };
    assert_eq!(held_back, [PeerAction::Compute(install)]);
    let continued = actions(|out| assert_eq!(interrupted.go_on(mended, 10, false, out), Ok(())));
    assert!(continued.contains(&PeerAction::Release(PayloadId(71))), "{continued:?}");
    assert_eq!(continued.len(), 4, "two pieces for member 1, one is summed: {continued:?}");
}

#[test]
fn a_round_that_begins_while_sums_change_reads_them_once_it_is_mended() {
    let mut begun = of_two();
    begun.sums_change();
    assert_eq!(actions(|out| begun.start(out).expect("a valid round")), []);
    let mended =
        |mend| Round { mended: Mended { mend: Mend(mend), changed: [0].into() }, ..round(&[1, 1]) };
    let again = actions(|out| begun.go_on(mended(1), 7, true, out).expect("a valid round"));
    assert_eq!(again, []);
    let continued = actions(|out| begun.go_on(mended(2), 8, false, out).expect("a valid round"));
    let export =
        Task::Export { round: id(), to: member(1), piece: 1, range: 4..8, parts: Vec::new() };
    assert_eq!(continued, [PeerAction::Compute(export)]);
}

/// The side of member `me` of a round over 16 elements: members 0 and 1 are an island, and 2 and 3. Each owns the piece
/// of its number; the collector of an island stands at the owner's place. All count tags of sum 5.
fn of_two_islands(me: u8) -> Reduction {
    let round = round_of(&[(1, Some(0)), (1, Some(0)), (1, Some(1)), (1, Some(1))]);
    let layout = layout(&round, 16);
    Reduction::new(round, member(me), layout, vec![4; 4], 5, 20).expect("a member")
}

fn integers(number: u64) -> Payload {
    Payload { id: PayloadId(number), size: Bytes(32), hash: None, seal: None }
}

#[test]
fn a_collector_sends_one_sum_of_its_island_and_passes_the_result_on() {
    // Member 2 collects piece 0, which member 0 owns.
    let mut collector = of_two_islands(2);
    let started = actions(|out| collector.start(out).expect("a valid round"));
    let alone = |piece: u32, range, to| {
        let (round, to, parts) = (id(), member(to), Vec::new());
        PeerAction::Compute(Task::Export { round, to, piece, range, parts })
    };
    assert_eq!(started, [alone(1, 4..8, 3), alone(3, 12..16, 3)]);
    actions(|out| {
        collector.exported(member(3), 1, integers(1), out);
        collector.exported(member(3), 3, integers(2), out);
    });
    let (round, to, parts) = (id(), member(0), vec![PayloadId(3)]);
    let export = Task::Export { round, to, piece: 0, range: 0..4, parts };
    let collected = actions(|out| {
        collector.part((member(3), Mend(0)), 0, 5, integers(3), out).expect("a valid round");
    });
    assert_eq!(collected, [PeerAction::Compute(export)]);
    let sent = actions(|out| collector.exported(member(0), 0, integers(4), out));
    let tag = TensorTag::RoundPart { round: id(), mend: Mend(0), piece: 0, proof: 10 };
    let send = PeerAction::SendTensor { to: member(0), tag, seal: None, payload: PayloadId(4) };
    let release = |number| PeerAction::Release(PayloadId(number));
    assert_eq!(sent, [release(3), send, release(4)]);
    let result = actions(|out| {
        collector.result(member(0), 0, 20, result_of(5), out).expect("whole");
    });
    let tag = TensorTag::RoundResult { round: id(), mend: Mend(0), piece: 0, proof: 20 };
    let pass_on = PeerAction::SendTensor { to: member(3), tag, seal: None, payload: PayloadId(5) };
    let install = Task::Install { round: id(), range: 0..4, payload: PayloadId(5) };
    assert_eq!(result, [pass_on, PeerAction::Compute(install)]);
}

#[test]
fn a_sum_that_lacks_a_member_or_has_one_twice_is_refused() {
    for (proof, found) in [(5, 15), (15, 25)] {
        let mut owner = of_two_islands(0);
        let mut out = Vec::new();
        assert_eq!(owner.part((member(1), Mend(0)), 0, 5, integers(1), &mut out), Ok(()));
        let summed = owner.part((member(2), Mend(0)), 0, proof, integers(2), &mut out);
        assert_eq!(summed, Err(Fault::ProofDiffers { round: id(), expected: 20, found }));
    }
}

#[test]
fn integers_and_results_off_their_tree_are_released() {
    let mut owner = of_two_islands(0);
    let mut out = Vec::new();
    // Member 3 is no collector of piece 0, and member 2 does not pass piece 3 on to this island.
    assert_eq!(owner.part((member(3), Mend(0)), 0, 5, integers(1), &mut out), Ok(()));
    assert_eq!(owner.result(member(2), 3, 20, result_of(2), &mut out), Ok(()));
    assert_eq!(out, [1, 2].map(|number| PeerAction::Release(PayloadId(number))));
}

#[test]
fn after_a_mend_an_island_that_lost_a_member_sends_anew() {
    let before = round_of(&[(1, Some(0)), (1, Some(0)), (1, Some(1)), (1, Some(1))]);
    let mut collector = of_two_islands(2);
    actions(|out| {
        collector.start(out).expect("a valid round");
        // It has the sum of its island for piece 0, and is about to send it.
        collector.part((member(3), Mend(0)), 0, 5, integers(1), out).expect("a valid round");
    });
    // Member 3 dies, and member 2 does its work.
    let members = before.group.members[..3].to_vec();
    let group = RoundGroup { members, ..RoundGroup::default() }.into();
    let mended = Mended { mend: Mend(1), changed: [2].into() };
    collector.sums_change();
    let round = Round { id: id(), group, mended };
    let continued = actions(|out| collector.go_on(round, 10, false, out).expect("a valid round"));
    let export = |to, piece, range| {
        let (round, to, parts) = (id(), member(to), Vec::new());
        PeerAction::Compute(Task::Export { round, to, piece, range, parts })
    };
    // Pieces 1 and 3, which member 3 collected or owned, have new numbers. Piece 2 is this member's own.
    assert_eq!(continued, [export(0, 0, 0..4), export(1, 4, 4..8), export(0, 5, 12..16)]);
    let sent = |collector: &mut Reduction, to, piece| {
        let actions = actions(|out| collector.exported(member(to), piece, integers(9), out));
        actions.iter().any(|action| matches!(action, PeerAction::SendTensor { .. }))
    };
    let old = [(3, 1), (3, 3), (0, 0)].map(|(to, piece)| sent(&mut collector, to, piece));
    assert_eq!(old, [false; 3], "integers of before the mend");
    assert!(sent(&mut collector, 0, 0));
}
