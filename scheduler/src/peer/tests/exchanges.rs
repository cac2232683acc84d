//! Virtual workers with many exchanges: of several stages, or joined to a meeting on their way.

use shoal_protocol::manifest::{DistanceCodec, InnerLoop, InnerMoments};

use super::*;

/// A run whose workers make two updates of two passes each.
fn workers(stages: u16, overlap: u32) -> Manifest {
    let mut manifest = Scenario::small_manifest(stages, 2, 3);
    manifest.model.block.tied = false;
    manifest.training.staleness = u8::from(overlap > 0);
    let optimizer = manifest.optimizer.clone();
    let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
    let inner = InnerLoop { steps: 2, microbatches: 2, optimizer, codec, moments, overlap };
    manifest.inner = Some(inner);
    manifest
}

/// A peer of a stage in a run of two.
fn probe(stage: u16) -> Probe {
    let manifest = workers(2, 0);
    let (span, limits) = (StageSpan::one(Stage(stage)), PeerLimits::default());
    Probe::of_run(manifest, NonZeroU16::MIN, (span, 1 - stage), limits).0
}

fn activation(exchange: u32) -> TensorTag {
    TensorTag::Activation { key: key(1, 0), exchange: Exchange(exchange) }
}

fn gradient(exchange: u32) -> TensorTag {
    TensorTag::ActivationGradient { key: key(0, 0), exchange: Exchange(exchange) }
}

fn sent(to: u8, tag: TensorTag, payload: u64) -> PeerAction {
    PeerAction::SendTensor { to: member(to), tag, seal: None, payload: PayloadId(payload) }
}

/// The exchanges whose forward passes go to the engine.
fn forward(actions: &[PeerAction]) -> Vec<u32> {
    let pass = |action: &PeerAction| match action {
        PeerAction::Compute(Task::Forward { exchange, .. }) => Some(exchange.0),
        _ => None,
    };
    actions.iter().filter_map(pass).collect()
}

fn forwarded(stage: u16, output: Option<u64>) -> TaskResult {
    TaskResult::Forwarded { key: key(stage, 0), output: output.map(payload), loss: None }
}

fn returned(stage: u16, gradient: Option<u64>) -> TaskResult {
    TaskResult::Returned { key: key(stage, 0), gradient: gradient.map(payload), leaves: false }
}

fn tensors(actions: &[PeerAction]) -> Vec<PeerAction> {
    let is_tensor = |action: &&PeerAction| matches!(action, PeerAction::SendTensor { .. });
    actions.iter().filter(is_tensor).cloned().collect()
}

fn accepts(wanted: u32) -> PeerMessage {
    PeerMessage::Accepted { key: key(1, 0), wanted: Exchange(wanted), service_time: 0 }
}

#[test]
fn a_new_receiver_gets_every_activation_from_the_first_on_update_by_update() {
    let mut probe = probe(0);
    assert_eq!(forward(&probe.hand_out(0..1)), [0, 1]);
    let (to, _) = offered(&probe.input(PeerInput::Tick)).pop().unwrap_or((member(1), key(1, 0)));
    let first = if to == member(1) { 1 } else { 2 };
    let other = 3 - first;
    probe.receive_from(first, accepts(0));
    assert_eq!(tensors(&probe.done(forwarded(0, Some(10)))), [sent(first, activation(0), 10)]);
    assert_eq!(tensors(&probe.done(forwarded(0, Some(11)))), [sent(first, activation(1), 11)]);
    for exchange in 0..2 {
        probe.tensor(first, gradient(exchange), 20 + u64::from(exchange));
        let begun = forward(&probe.done(returned(0, None)));
        assert_eq!(begun, if exchange == 0 { vec![] } else { vec![2, 3] }, "the next update");
    }
    assert_eq!(tensors(&probe.done(forwarded(0, Some(12)))), [sent(first, activation(2), 12)]);
    let gone = [member(first)].into();
    let change = ViewChange { since: 1, number: 2, gone, ..ViewChange::default() };
    let actions = probe.receive_from_coordinator(FromCoordinator::View(change));
    assert_eq!(offered(&actions), [(member(other), key(1, 0))]);
    let again = [sent(other, activation(0), 10), sent(other, activation(1), 11)];
    assert_eq!(tensors(&probe.receive_from(other, accepts(0))), again);
    // Its gradients are known here, and tell how far it is.
    let actions = probe.tensor(other, gradient(1), 30);
    assert!(actions.contains(&PeerAction::Release(PayloadId(30))), "{actions:?}");
    assert_eq!(tensors(&actions), [sent(other, activation(2), 12)]);
}

/// The last stage has made the first update.
fn after_an_update() -> Probe {
    let mut probe = probe(1);
    probe.offer(1, 0);
    let (key, next_holder) = (key(1, 0), None);
    let granted = FromCoordinator::Granted { key, grant: grant(0), next_holder };
    probe.receive_from_coordinator(granted);
    for exchange in 0..2 {
        probe.tensor(1, activation(exchange), 10 + u64::from(exchange));
        probe.done(forwarded(1, None));
        let gradient_id = 20 + u64::from(exchange);
        let actions = probe.done(returned(1, Some(gradient_id)));
        assert_eq!(tensors(&actions), [sent(1, gradient(exchange), gradient_id)]);
        assert!(
            !actions
                .iter()
                .any(|action| matches!(action, PeerAction::Compute(Task::Accumulate { .. })))
        );
    }
    probe
}

#[test]
fn an_activation_that_comes_again_is_answered_from_the_log() {
    let mut probe = after_an_update();
    let again = probe.tensor(1, activation(0), 40);
    assert_eq!(again, [PeerAction::Release(PayloadId(40)), sent(1, gradient(0), 20)]);
    // A peer that offered nothing gets nothing.
    let stranger = probe.tensor(2, activation(0), 41);
    assert_eq!(stranger.last(), Some(&PeerAction::Release(PayloadId(41))));
    assert!(tensors(&stranger).is_empty(), "{stranger:?}");
}

#[test]
fn a_worker_that_nobody_feeds_any_more_is_given_up_half_way() {
    let mut probe = after_an_update();
    let gone = [member(1)].into();
    let change = ViewChange { since: 1, number: 2, gone, ..ViewChange::default() };
    let actions = probe.receive_from_coordinator(FromCoordinator::View(change));
    let (key, grant) = (key(1, 0), grant(0));
    let released = PeerAction::ToCoordinator(ToCoordinator::Released { key, grant });
    let discard = PeerAction::Compute(Task::Discard { key, device: DeviceIndex::default() });
    assert!(actions.contains(&released) && actions.contains(&discard), "{actions:?}");
    for logged in [20, 21] {
        assert!(actions.contains(&PeerAction::Release(PayloadId(logged))), "{actions:?}");
    }
}

#[test]
fn a_worker_waits_for_the_meeting_that_it_joins_and_is_not_late() {
    let (span, limits) = (StageSpan::one(Stage(0)), PeerLimits::default());
    let mut probe = Probe::of_run(workers(1, 1), NonZeroU16::MIN, (span, 0), limits).0;
    let (step, grant) = (Step(1), grant(0));
    let key = ClaimKey { step, ..key(0, 0) };
    let grants = vec![(Microbatch(0), grant)];
    let begun = probe.receive_from_coordinator(FromCoordinator::Work { step, grants });
    assert_eq!(forward(&begun), [0], "from the weights of the meeting before");
    let mut ends = |result| forward(&probe.done(result));
    for next in [vec![1], vec![]] {
        let forwarded = TaskResult::Forwarded { key, output: None, loss: None };
        let returned = TaskResult::Returned { key, gradient: None, leaves: false };
        let begun = [ends(forwarded), ends(returned)].concat();
        assert_eq!(begun, next, "the first step is not committed");
    }
    probe.now = probe.now + Duration::from_secs(3600);
    let second = Duration::from_secs(1);
    let patience = PassTimes { forward: second, backward: second };
    let asked = FromCoordinator::Reclaim { key, grant, patience };
    let working = PeerAction::ToCoordinator(ToCoordinator::Working { key, grant });
    assert_eq!(probe.receive_from_coordinator(asked)[0], working);
}

#[test]
fn workers_of_a_step_are_divided_among_devices_also_while_one_waits() {
    let span = StageSpan::one(Stage(0));
    let limits = PeerLimits { first_window: 2, ..PeerLimits::default() };
    let devices = NonZeroU16::new(2).expect("two");
    let mut probe = Probe::of_run(workers(1, 1), devices, (span, 0), limits).0;
    let places = |actions: &[PeerAction]| -> Vec<(u64, u32, u16)> {
        let place = |action: &PeerAction| match action {
            PeerAction::Compute(Task::Forward { key, device, .. }) => {
                Some((key.step.0, key.microbatch.0, device.0))
            }
            _ => None,
        };
        actions.iter().filter_map(place).collect()
    };
    assert_eq!(places(&probe.hand_out(0..1)), [(0, 0, 0)]);
    let step = Step(1);
    let work = |number| {
        let grants = vec![(Microbatch(number), grant(number))];
        FromCoordinator::Work { step, grants }
    };
    assert_eq!(places(&probe.receive_from_coordinator(work(0))), [(1, 0, 1)]);
    let key = ClaimKey { step, ..key(0, 0) };
    for last in [false, true] {
        let forwarded = TaskResult::Forwarded { key, output: None, loss: None };
        let returned = TaskResult::Returned { key, gradient: None, leaves: false };
        let begun = [probe.done(forwarded), probe.done(returned)].concat();
        let next = if last { vec![] } else { vec![(1, 0, 1)] };
        assert_eq!(places(&begun), next, "it waits for the meeting");
    }
    let begun = places(&probe.receive_from_coordinator(work(1)));
    assert_eq!(begun, [], "the idle device has a worker of this step, and the other one is busy");
}
