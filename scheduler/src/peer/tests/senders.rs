//! Every message from every kind of sender that may not send it changes nothing.

use shoal_protocol::message::Recalled;

use super::*;

/// A peer without a place in the view.
const STRANGER: u8 = 9;
/// A member that hosts no stage.
const OBSERVER: u8 = 5;
/// Replicas of the stage before: the first one's offer was taken.
const FEEDER: u8 = 1;
const OTHER_BEFORE: u8 = 2;
/// A replica of the stage after.
const AFTER: [u8; 2] = [3, 4];

fn record_of(probe: &Probe, number: u8, span: StageSpan) -> Arc<MemberRecord> {
    let me = probe.peer.view().record(member(ME)).expect("it is listed").clone();
    Arc::new(MemberRecord { member: member(number), span, ..me })
}

/// A replica of the middle one of three stages, with a microbatch that was taken from `FEEDER`, whose claim is here
/// and whose activation was offered on. Returns it with the replica that was asked, and the one that was not.
fn in_the_middle() -> (Probe, u8, u8) {
    let manifest = Scenario::small_manifest(3, 8, 3);
    let span = StageSpan::one(Stage(1));
    let limits = PeerLimits::default();
    let (mut probe, _) = Probe::of_run(manifest, NonZeroU16::MIN, (span, 0), limits);
    let last = StageSpan::one(Stage(2));
    let here = AFTER.map(|number| record_of(&probe, number, last));
    let observer = record_of(&probe, OBSERVER, StageSpan::none());
    let here = here.into_iter().chain([observer]).collect();
    let change = ViewChange { since: 1, number: 2, here, ..ViewChange::default() };
    probe.receive_from_coordinator(FromCoordinator::View(change));
    let accepted = probe.offer(FEEDER, 0);
    let [(asked, _)] = offered(&accepted)[..] else { panic!("it is offered on: {accepted:?}") };
    let granted = FromCoordinator::Granted { key: key(1, 0), grant: grant(0), next_holder: None };
    probe.receive_from_coordinator(granted);
    let asked = asked.peer.0[0];
    (probe, asked, 7 - asked)
}

/// The state of a peer, without the messages that wait for a view.
fn state(probe: &Probe) -> String {
    let state = format!("{:?}", probe.peer);
    let (before, rest) = state.split_once("waiting: [").expect("it has a list of them");
    let (_, after) = rest.split_once("] }, links").expect("the list ends");
    before.to_owned() + after
}

/// What a peer does with a message besides reporting it.
fn effects(actions: Vec<PeerAction>) -> Vec<PeerAction> {
    let reports =
        |action: &PeerAction| matches!(action, PeerAction::Event(PeerEvent::Unentitled { .. }));
    actions.into_iter().filter(|action| !reports(action)).collect()
}

#[test]
fn messages_of_others_than_their_senders_change_nothing() {
    let (mut probe, asked, not_asked) = in_the_middle();
    let (here, there) = (key(1, 0), key(2, 0));
    let offer = |key| PeerMessage::Offer { key, size: Bytes(64), retry: true };
    let nobody = [STRANGER, OBSERVER];
    let table: Vec<(PeerMessage, Vec<u8>)> = vec![
        (offer(key(1, 1)), vec![STRANGER, OBSERVER, AFTER[0], AFTER[1]]),
        (offer(here), vec![STRANGER, OBSERVER, AFTER[0], AFTER[1]]),
        (
            PeerMessage::Accepted { key: there, wanted: FIRST, service_time: 1 },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE],
        ),
        (
            PeerMessage::Busy { key: there, service_time: 0 },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE, not_asked],
        ),
        (
            PeerMessage::HeldBy { key: there, holder: member(not_asked) },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE, not_asked],
        ),
        // One that is asked may not send the work to where its stage is not.
        (PeerMessage::Free { stage: Stage(2) }, nobody.to_vec()),
        (PeerMessage::Withdrawn { key: here }, vec![STRANGER, OBSERVER, OTHER_BEFORE, asked]),
        (PeerMessage::Evaluated { key: here }, vec![STRANGER, OBSERVER, FEEDER, not_asked]),
        (
            PeerMessage::Recall { key: there, input: Recalled::Activation },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE, AFTER[0], AFTER[1]],
        ),
    ];
    for (message, senders) in table {
        for from in senders {
            let before = state(&probe);
            let actions = effects(probe.receive_from(from, message.clone()));
            assert_eq!(actions, [], "{from}: {message:?}");
            assert_eq!(state(&probe), before, "{from}: {message:?}");
        }
    }
}

#[test]
fn tensors_of_others_than_their_senders_change_nothing() {
    let (mut probe, asked, not_asked) = in_the_middle();
    let key = key(1, 0);
    let table = [
        (
            TensorTag::Activation { key, exchange: FIRST },
            vec![STRANGER, OBSERVER, OTHER_BEFORE, asked, not_asked],
        ),
        (
            TensorTag::ActivationGradient { key, exchange: FIRST },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE, not_asked],
        ),
        (
            TensorTag::Recalled { key, input: Recalled::Activation },
            vec![STRANGER, OBSERVER, FEEDER, OTHER_BEFORE, asked, not_asked],
        ),
    ];
    for (tag, senders) in table {
        for from in senders {
            let before = state(&probe);
            let actions = effects(probe.tensor(from, tag, 77));
            assert_eq!(actions, [PeerAction::Release(PayloadId(77))], "{from}: {tag:?}");
            assert_eq!(state(&probe), before, "{from}: {tag:?}");
        }
    }
    // Those that may send them do.
    let activation = TensorTag::Activation { key, exchange: FIRST };
    let runs = probe.tensor(FEEDER, activation, 78);
    assert!(
        runs.iter().any(|action| matches!(action, PeerAction::Compute(Task::Forward { .. }))),
        "{runs:?}"
    );
}

#[test]
fn one_that_was_asked_sends_work_to_replicas_only() {
    let (mut probe, asked, not_asked) = in_the_middle();
    let there = key(2, 0);
    for holder in [STRANGER, OBSERVER, FEEDER] {
        let redirect = PeerMessage::HeldBy { key: there, holder: member(holder) };
        let actions = probe.receive_from(asked, redirect);
        assert_eq!(offered(&actions), [], "{holder}");
    }
    let redirect = PeerMessage::HeldBy { key: there, holder: member(not_asked) };
    assert_eq!(offered(&probe.receive_from(asked, redirect)), [(member(not_asked), there)]);
}

#[test]
fn an_offer_waits_for_the_view_that_lists_its_sender_and_no_room_is_given_before() {
    let (mut probe, _, _) = in_the_middle();
    let newcomer = 6;
    assert_eq!(probe.offer(newcomer, 1), []);
    let here = vec![record_of(&probe, newcomer, StageSpan::one(Stage(0)))];
    let change = ViewChange { since: 2, number: 3, here, ..ViewChange::default() };
    let actions = probe.receive_from_coordinator(FromCoordinator::View(change));
    assert!(actions.contains(&accepted(newcomer, 1)), "{actions:?}");
    // A stranger's offers take a few places until the next view, and never room for work.
    let offers: Vec<PeerAction> =
        (0..1000).flat_map(|number| probe.offer(STRANGER, number % 8)).collect();
    let reported = offers.iter().filter(|action| {
        matches!(action, PeerAction::Event(PeerEvent::Unentitled { from, .. }) if *from == member(STRANGER))
    });
    assert_eq!((reported.count(), effects(offers)), (1000 - 16, vec![]));
    assert!(!probe.peer.load().window.is_empty());
}

#[test]
fn early_pieces_of_strangers_take_a_few_places() {
    let (mut probe, _, _) = in_the_middle();
    let round = shoal_protocol::message::RoundId {
        era: Era(0),
        term: Term(1),
        step: Step(0),
        weights: shoal_protocol::ids::WeightGroup(1),
        attempt: Attempt(0),
    };
    let mend = shoal_protocol::ids::Mend(0);
    let tag = |piece| TensorTag::RoundPart { round, mend, piece, proof: 0 };
    for (piece, from) in (0..3000_u32).map(|piece| (piece, STRANGER + (piece % 100) as u8)) {
        probe.tensor(from, tag(piece), u64::from(piece));
    }
    let by_strangers = probe.peer.load().rounds;
    assert!(by_strangers == Bytes(32 * 16), "{by_strangers}");
    let kept = effects(probe.tensor(ME, tag(0), 5000));
    assert_eq!(kept, [], "a replica's pieces have their own places");
    assert!(probe.peer.load().rounds > by_strangers);
}
