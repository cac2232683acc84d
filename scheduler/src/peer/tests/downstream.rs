//! Requested work and its delivery to the next stage.

use super::*;

#[test]
fn the_first_stage_requests_a_window_of_work_and_offers_it_at_once() {
    let (mut probe, admitted) = Probe::at(0, |_| {});
    let span = StageSpan::one(Stage(0));
    let serving = PeerEvent::Serving { version: Step(0) };
    let events = [PeerEvent::Admitted { span, version: Step(0) }, serving].map(PeerAction::Event);
    assert_eq!(admitted, [&events[..], &[work_request(5, 5, 0)]].concat());
    let actions = probe.hand_out(0..2);
    let keys: Vec<ClaimKey> = offered(&actions).into_iter().map(|(_, key)| key).collect();
    assert_eq!(keys, [key(1, 0), key(1, 1)]);
    let to: BTreeSet<Member> = offered(&actions).into_iter().map(|(to, _)| to).collect();
    assert_eq!(to, BTreeSet::from([member(1), member(2)]), "each replica gets one offer");
    let forward = |microbatch| {
        let device = DeviceIndex::default();
        let task = Task::Forward {
            key: key(0, microbatch),
            exchange: FIRST,
            activation: None,
            held_out: false,
            device,
        };
        PeerAction::Compute(task)
    };
    assert_eq!(actions[2..], [forward(0), forward(1), work_request(3, 5, 2)]);
    assert_eq!(probe.hand_out(0..2), [], "repeated work counts once");
}

#[test]
fn an_activation_is_sent_once_when_it_is_both_accepted_and_computed() {
    for accepted_first in [true, false] {
        let (mut probe, _) = Probe::at(0, |_| {});
        let (to, _) = offered(&probe.hand_out(0..1))[0];
        let from = to.peer.0[0];
        let accept = PeerMessage::Accepted { key: key(1, 0), wanted: FIRST, service_time: 0 };
        let result = TaskResult::Forwarded { key: key(0, 0), output: Some(payload(9)), loss: None };
        let last = if accepted_first {
            assert_eq!(probe.receive_from(from, accept.clone()), []);
            probe.done(result)
        } else {
            probe.done(result);
            probe.receive_from(from, accept.clone())
        };
        let tag = TensorTag::Activation { key: key(1, 0), exchange: FIRST };
        assert_eq!(last, [PeerAction::SendTensor { to, tag, seal: None, payload: PayloadId(9) }]);
        assert_eq!(probe.receive_from(from, accept), [], "a repeated acceptance sends nothing");
        assert_eq!(probe.peer.load().logged, Bytes(32));
    }
}

#[test]
fn work_goes_to_the_holder_and_from_a_busy_replica_to_another() {
    let (mut probe, _) = Probe::at(0, |_| {});
    let (first, _) = offered(&probe.hand_out(0..1))[0];
    let other = if first == member(1) { 2 } else { 1 };
    let busy = PeerMessage::Busy { key: key(1, 0), service_time: 5 };
    let again = probe.receive_from(first.peer.0[0], busy.clone());
    assert_eq!(offered(&again), [(member(other), key(1, 0))]);
    assert_eq!(offered(&probe.receive_from(other, busy)), [], "no replica has room");
    let freed = probe.receive_from(other, PeerMessage::Free { stage: Stage(1) });
    assert_eq!(offered(&freed), [(member(other), key(1, 0))]);
    let holder = first;
    let redirected = probe.receive_from(other, PeerMessage::HeldBy { key: key(1, 0), holder });
    assert_eq!(offered(&redirected), [(first, key(1, 0))]);
    let again = probe.receive_from(other, PeerMessage::HeldBy { key: key(1, 0), holder });
    assert_eq!(offered(&again), [], "it is offered to the holder already");
}

#[test]
fn blocked_work_is_offered_again_after_a_retry_interval() {
    let (mut probe, _) = Probe::at(0, |_| {});
    probe.hand_out(0..1);
    for from in [1, 2, 1, 2] {
        probe.receive_from(from, PeerMessage::Busy { key: key(1, 0), service_time: 0 });
    }
    probe.now = probe.peer.next_timeout().expect("it waits");
    assert_eq!(offered(&probe.input(PeerInput::Tick)).len(), 1);
}

#[test]
fn the_window_widens_by_one_only_when_the_engine_idles() {
    let (mut probe, _) = Probe::at(0, |limits| limits.largest_windows = vec![6]);
    assert_eq!(probe.peer.load().window[&Stage(0)], 5);
    probe.hand_out(0..5);
    for microbatch in 0..5 {
        assert_eq!(probe.peer.load().window[&Stage(0)], 5, "the engine has work");
        let (key, output) = (key(0, microbatch), Some(payload(u64::from(microbatch))));
        let actions = probe.done(TaskResult::Forwarded { key, output, loss: None });
        let idle = microbatch == 4;
        assert_eq!(actions.contains(&work_request(1, 6, 5)), idle, "{actions:?}");
    }
    assert_eq!(probe.peer.load().window[&Stage(0)], 6);
    probe.hand_out(5..6);
    let (key, output) = (key(0, 5), Some(payload(5)));
    probe.done(TaskResult::Forwarded { key, output, loss: None });
    assert_eq!(probe.peer.load().window[&Stage(0)], 6, "it has a limit");
}

#[test]
fn a_busy_holder_released_the_claim_and_other_replicas_are_tried() {
    let (mut probe, _) = Probe::at(0, |_| {});
    let (first, key) = offered(&probe.hand_out(0..1))[0];
    let first = first.peer.0[0];
    let holder = 3 - first;
    let redirect = probe.receive_from(first, PeerMessage::HeldBy { key, holder: member(holder) });
    assert_eq!(offered(&redirect), [(member(holder), key)]);
    let busy = probe.receive_from(holder, PeerMessage::Busy { key, service_time: 0 });
    assert_eq!(offered(&busy), [(member(first), key)]);
}

#[test]
fn an_acceptance_of_dropped_work_is_answered_with_a_withdrawal() {
    let (mut probe, _) = Probe::at(0, |_| {});
    let key = key(1, 4);
    let withdrawn = send(2, PeerMessage::Withdrawn { key });
    assert_eq!(
        probe.receive_from(2, PeerMessage::Accepted { key, wanted: FIRST, service_time: 0 }),
        [withdrawn]
    );
}
