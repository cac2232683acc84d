//! Offers, claims, reclaims and the passes of accepted work.

use super::*;

#[test]
fn offers_are_taken_up_to_the_window_then_queued_then_answered_busy() {
    let (mut probe, _) = Probe::at(1, |limits| {
        limits.largest_windows = vec![1];
        limits.offers = 1;
    });
    assert_eq!(probe.offer(1, 3), [accepted(1, 3), claim(3)]);
    assert_eq!(probe.offer(1, 3), [accepted(1, 3)], "a repeated offer is answered again");
    assert_eq!(probe.offer(1, 5), []);
    assert_eq!(probe.offer(2, 6), [send(2, PeerMessage::Busy { key: key(1, 6), service_time: 0 })]);
    // An older microbatch goes first in the queue; the sender that loses its place is refused.
    assert_eq!(probe.offer(2, 4), [send(1, PeerMessage::Busy { key: key(1, 5), service_time: 0 })]);
    let load = probe.peer.load();
    assert_eq!((load.accepted[&Stage(1)], load.waiting[&Stage(1)]), (1, 1));
}

#[test]
fn the_gradient_releases_room_and_refused_senders_are_notified() {
    let (mut probe, _) = Probe::at(1, |limits| {
        limits.largest_windows = vec![1];
        limits.offers = 1;
    });
    for (from, microbatch) in [(1, 0), (2, 1), (1, 2)] {
        probe.offer(from, microbatch);
    }
    let actions = probe.complete(0);
    let tag = TensorTag::ActivationGradient { key: key(0, 0), exchange: FIRST };
    let service_time = 2_000_000;
    let expected = [
        PeerAction::Compute(Task::Accumulate { key: key(1, 0), device: DeviceIndex::default() }),
        PeerAction::SendTensor { to: member(1), tag, seal: None, payload: PayloadId(100) },
        send(2, PeerMessage::Accepted { key: key(1, 1), wanted: FIRST, service_time }),
        claim(1),
        send(1, PeerMessage::Free { stage: Stage(1) }),
    ];
    assert_eq!(actions, expected);
}

#[test]
fn nothing_is_counted_without_its_claim_and_a_report_repeats_until_it_is_acknowledged() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let key = key(1, 0);
    probe.tensor(1, TensorTag::Activation { key, exchange: FIRST }, 1);
    let forwarded = TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss::new(7, 1)) };
    assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(1))]);
    let granted = FromCoordinator::Granted { key, grant: grant(0), next_holder: None };
    let backward = PeerAction::Compute(Task::Backward {
        key,
        exchange: FIRST,
        gradient: None,
        device: DeviceIndex::default(),
    });
    assert_eq!(probe.receive_from_coordinator(granted.clone()), [backward]);
    assert_eq!(probe.receive_from_coordinator(granted), []);
    probe.done(TaskResult::Returned { key, gradient: Some(payload(2)), leaves: false });
    let report = done(key, grant(0), Some(FixedLoss::new(7, 1)));
    let counted = PeerAction::Event(PeerEvent::Counted { key });
    assert_eq!(
        probe.done(TaskResult::Accumulated { key, broken: false }),
        [counted, report.clone()]
    );
    probe.now = probe.peer.next_timeout().expect("it waits for an answer");
    assert_eq!(probe.input(PeerInput::Tick), [report]);
    probe.receive_from_coordinator(FromCoordinator::Noted { key, grant: grant(0) });
    probe.now = probe.peer.next_timeout().expect("it goes on");
    assert_eq!(probe.input(PeerInput::Tick), []);
}

#[test]
fn backward_passes_go_first_and_few_passes_wait_in_the_engine() {
    let (mut probe, _) = Probe::at(1, |limits| limits.first_window = 8);
    let passes = |actions: &[PeerAction]| -> Vec<(bool, u32)> {
        let pass = |action: &PeerAction| match action {
            PeerAction::Compute(Task::Forward { key, .. }) => Some((true, key.microbatch.0)),
            PeerAction::Compute(Task::Backward { key, .. }) => Some((false, key.microbatch.0)),
            _ => None,
        };
        actions.iter().filter_map(pass).collect()
    };
    let next_holder = None;
    for microbatch in 0..4 {
        probe.offer(1, microbatch);
        let key = key(1, microbatch);
        // The last stage runs the backward pass at once where it holds the claim.
        if microbatch > 0 {
            probe.receive_from_coordinator(FromCoordinator::Granted {
                key,
                grant: grant(microbatch),
                next_holder,
            });
        }
        let given =
            probe.tensor(1, TensorTag::Activation { key, exchange: FIRST }, u64::from(microbatch));
        let expected: &[(bool, u32)] = match microbatch {
            0 => &[(true, 0)],
            1 => &[(true, 1), (false, 1)],
            _ => &[],
        };
        assert_eq!(passes(&given), expected);
    }
    let forwarded = |microbatch| TaskResult::Forwarded {
        key: key(1, microbatch),
        output: None,
        loss: Some(FixedLoss::new(1, 1)),
    };
    assert_eq!(passes(&probe.done(forwarded(0))), [], "two passes and a claim are missing");
    probe.receive_from_coordinator(FromCoordinator::Granted {
        key: key(1, 0),
        grant: grant(0),
        next_holder,
    });
    assert_eq!(passes(&probe.done(forwarded(1))), [(false, 0)], "before new forward passes");
    let returned =
        TaskResult::Returned { key: key(1, 1), gradient: Some(payload(9)), leaves: false };
    assert_eq!(passes(&probe.done(returned)), [(true, 2), (false, 2)]);
}

#[test]
fn an_engine_that_adds_a_gradient_is_not_idle() {
    let (mut probe, _) = Probe::at(1, |limits| limits.first_window = 1);
    let window = |probe: &Probe| probe.peer.load().window[&Stage(1)];
    assert_eq!(window(&probe), 3, "a stage before it has as many in flight");
    for microbatch in 0..5 {
        probe.offer(1, microbatch);
    }
    probe.complete_all_but(0, true);
    assert_eq!(window(&probe), 3, "it computes what the pass left");
    probe.done(TaskResult::Accumulated { key: key(1, 0), broken: false });
    assert_eq!(window(&probe), 4, "it has nothing to do");
}

#[test]
fn a_reclaim_releases_late_work_only() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let (key, grant) = (key(1, 0), grant(0));
    let second = Duration::from_secs(1);
    let patience = PassTimes { forward: second, backward: second };
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    assert_eq!(probe.receive_from_coordinator(reclaim), [released], "the claim is unknown here");
    let late_grant = FromCoordinator::Granted { key, grant, next_holder: None };
    probe.offer(1, 0);
    assert_eq!(probe.receive_from_coordinator(late_grant), [], "a released grant stays void");

    let grant = grant_number(9);
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    probe.receive_from_coordinator(FromCoordinator::Granted { key, grant, next_holder: None });
    let begin = probe.now;
    probe.now = begin + second;
    assert_eq!(probe.receive_from_coordinator(reclaim.clone())[0], working, "its input is missing");
    probe.tensor(1, TensorTag::Activation { key, exchange: FIRST }, 1);
    probe.now = begin + second + second / 2;
    assert_eq!(
        probe.receive_from_coordinator(reclaim.clone()),
        [working],
        "the pass began a moment ago"
    );
    probe.now = begin + second * 2;
    let released_actions = probe.receive_from_coordinator(reclaim);
    let busy = send(1, PeerMessage::Busy { key, service_time: 0 });
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    let discard = PeerAction::Compute(Task::Discard { key, device: DeviceIndex::default() });
    assert_eq!(released_actions[..3], [busy, released, discard], "{released_actions:?}");
}

#[test]
fn finished_work_is_never_late() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    probe.complete(0);
    let (key, grant) = (key(1, 0), grant(0));
    probe.done(TaskResult::Accumulated { key, broken: false });
    let reclaim = FromCoordinator::Reclaim { key, grant, patience: PassTimes::default() };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    assert_eq!(probe.receive_from_coordinator(reclaim), [working], "its report was sent");
}

#[test]
fn work_whose_claim_another_member_holds_is_dropped_and_its_sender_redirected() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let key = key(1, 0);
    probe.tensor(1, TensorTag::Activation { key, exchange: FIRST }, 1);
    let holder = member(9);
    let held = probe.receive_from_coordinator(FromCoordinator::Held { key, holder });
    let redirect = send(1, PeerMessage::HeldBy { key, holder });
    assert_eq!(
        held,
        [redirect, PeerAction::Compute(Task::Discard { key, device: DeviceIndex::default() })]
    );
    // It is not accepted again before the engine discarded it.
    assert_eq!(probe.offer(1, 0), [send(1, PeerMessage::Busy { key, service_time: 0 })]);
    let forwarded = TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss::new(1, 1)) };
    assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(1))]);
    let free = send(1, PeerMessage::Free { stage: Stage(1) });
    assert_eq!(probe.done(TaskResult::Discarded { key }), [free]);
    assert_eq!(probe.peer.load().in_flight, Bytes(0));
}

#[test]
fn a_forward_pass_may_wait_for_the_longer_backward_pass_of_another_microbatch() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let (key, grant) = (key(1, 0), grant_number(9));
    probe.receive_from_coordinator(FromCoordinator::Granted { key, grant, next_holder: None });
    probe.tensor(1, TensorTag::Activation { key, exchange: FIRST }, 1);
    let second = Duration::from_secs(1);
    let patience = PassTimes { forward: second, backward: second * 3 };
    let reclaim = FromCoordinator::Reclaim { key, grant, patience };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    let begin = probe.now;
    probe.now = begin + second * 2;
    assert_eq!(probe.receive_from_coordinator(reclaim.clone())[0], working);
    probe.now = begin + second * 3;
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    assert!(probe.receive_from_coordinator(reclaim).contains(&released));
}

#[test]
fn each_device_has_two_passes_and_the_graphs_of_its_own_forward_passes() {
    let devices = NonZeroU16::new(2).expect("two");
    let (span, limits) = (StageSpan::one(Stage(1)), PeerLimits::default());
    let (mut probe, _) = Probe::with_devices(devices, span, 0, limits);
    let passes = |actions: &[PeerAction]| -> Vec<(bool, u32, u16)> {
        let pass = |action: &PeerAction| match action {
            PeerAction::Compute(Task::Forward { key, device, .. }) => {
                Some((true, key.microbatch.0, device.0))
            }
            PeerAction::Compute(Task::Backward { key, device, .. }) => {
                Some((false, key.microbatch.0, device.0))
            }
            _ => None,
        };
        actions.iter().filter_map(pass).collect()
    };
    let given = |probe: &mut Probe, microbatch| {
        probe.offer(1, microbatch);
        passes(&probe.tensor(
            1,
            TensorTag::Activation { key: key(1, microbatch), exchange: FIRST },
            microbatch.into(),
        ))
    };
    assert_eq!(given(&mut probe, 0), [(true, 0, 0)]);
    assert_eq!(given(&mut probe, 1), [(true, 1, 1)], "the other device is idle");
    assert_eq!(given(&mut probe, 2), [(true, 2, 0)]);
    assert_eq!(given(&mut probe, 3), [(true, 3, 1)]);
    let forwarded = |microbatch| TaskResult::Forwarded {
        key: key(1, microbatch),
        output: None,
        loss: Some(FixedLoss::new(1, 1)),
    };
    assert_eq!(passes(&probe.done(forwarded(1))), [], "its claim is missing");
    let granted = |microbatch| FromCoordinator::Granted {
        key: key(1, microbatch),
        grant: grant(microbatch),
        next_holder: None,
    };
    assert_eq!(passes(&probe.receive_from_coordinator(granted(1))), [(false, 1, 1)]);
    assert_eq!(passes(&probe.receive_from_coordinator(granted(0))), [], "its pass goes on");
    assert_eq!(passes(&probe.done(forwarded(0))), [(false, 0, 0)]);
    let returned = probe.done(TaskResult::Returned {
        key: key(1, 1),
        gradient: Some(payload(9)),
        leaves: false,
    });
    let accumulates = Task::Accumulate { key: key(1, 1), device: DeviceIndex(1) };
    assert!(returned.contains(&PeerAction::Compute(accumulates)), "{returned:?}");
}

#[test]
fn devices_that_divide_the_stages_have_passes_of_their_own_alone() {
    let devices = NonZeroU16::new(2).expect("two");
    // Hosts the last three of four stages, and gets microbatches from members of the first.
    let span = StageSpan { first: Stage(1), last: Stage(3) };
    let manifest = Scenario::small_manifest(4, 8, 3);
    let limits = PeerLimits::default();
    let (mut probe, _) = Probe::with_division(manifest, (devices, true), (span, 0), limits);
    let passes = |actions: &[PeerAction]| -> Vec<(u16, u32, u16)> {
        let pass = |action: &PeerAction| match action {
            PeerAction::Compute(Task::Forward { key, device, .. }) => {
                Some((key.stage.0, key.microbatch.0, device.0))
            }
            _ => None,
        };
        actions.iter().filter_map(pass).collect()
    };
    let given = |probe: &mut Probe, microbatch| {
        probe.offer(1, microbatch);
        let tag = TensorTag::Activation { key: key(1, microbatch), exchange: FIRST };
        passes(&probe.tensor(1, tag, microbatch.into()))
    };
    assert_eq!(given(&mut probe, 0), [(1, 0, 1)]);
    assert_eq!(given(&mut probe, 1), [(1, 1, 1)]);
    assert_eq!(given(&mut probe, 2), [], "the other device has stage 2, and no input of it");
    let forwarded = TaskResult::Forwarded { key: key(1, 0), output: Some(payload(20)), loss: None };
    assert_eq!(passes(&probe.done(forwarded)), [(1, 2, 1)]);
}
