//! Commits, snapshots, migrations, drains and the end.

use super::*;

fn commit(step: Step) -> CommitRecord {
    let outcome = RoundOutcome { hash: ContentHash([5; 32]), square_norm: 1.0, proof: 0 };
    CommitRecord {
        era: Era(0),
        term: Term(1),
        step,
        rounds: vec![(Attempt(0), outcome); 2],
        gradient_norm: 1.0,
        loss: FixedLoss::new(1, 1),
        held_out_loss: None,
    }
}

#[test]
fn a_peer_without_stages_follows_every_commit() {
    let (mut watcher, _) = Probe::hosting(StageSpan::none(), 1, PeerLimits::default());
    // More steps than the engine may apply at once.
    for step in (0..2000).map(Step) {
        let record = commit(step);
        let actions = watcher.receive_from_coordinator(FromCoordinator::Commit(record.clone()));
        assert!(actions.contains(&PeerAction::Event(PeerEvent::Applied { record })), "{actions:?}");
        assert_eq!(watcher.peer.version(), step.next());
    }
}

#[test]
fn a_snapshot_is_written_at_its_version_and_its_report_can_be_repeated() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let (version, stage) = (Step(0), Stage(1));
    let store = FromCoordinator::Store { version, stage };
    let task = PeerAction::Compute(Task::Store { version, stage });
    assert_eq!(probe.receive_from_coordinator(store.clone()), [task]);
    assert_eq!(probe.receive_from_coordinator(store.clone()), [], "it is being written");
    let files = Vec::new();
    let stored = TaskResult::Stored { version, stage, files: files.clone() };
    let report = PeerAction::ToCoordinator(ToCoordinator::Stored { version, stage, files });
    assert_eq!(probe.done(stored), vec![report.clone()]);
    assert_eq!(probe.receive_from_coordinator(store), [report]);
    let later = FromCoordinator::Store { version: Step(1), stage };
    assert_eq!(probe.receive_from_coordinator(later), [], "that version is not reached");
}

#[test]
fn a_migration_without_its_files_restarts_only_until_it_is_decided() {
    for decided in [None, Some(Step(1))] {
        let (mut probe, _) = Probe::at(1, |_| {});
        let (to, reason) = (StageSpan::one(Stage(0)), MoveReason::Uneven);
        let begun = PeerAction::Event(PeerEvent::MoveBegun { to, reason });
        assert!(probe.assign_move(2, None).contains(&begun));
        let stored = StoredStage { holders: vec![member(1).peer], files: Vec::new() };
        let (version, stage) = (Step(1), to.first);
        let parts = vec![SnapshotPart { stage, stored }];
        probe.receive_from_coordinator(FromCoordinator::Snapshot { version, view: 2, parts });
        if decided.is_some() {
            probe.assign_move(3, decided);
        }
        let actions = probe.input(PeerInput::Fetched { version, stage, whole: false });
        let of = if decided.is_none() { Followed::Destination } else { Followed::Own };
        let behind = PeerAction::ToCoordinator(ToCoordinator::Behind(of));
        assert!(actions.contains(&behind), "{actions:?}");
    }
}

#[test]
fn a_migration_begins_only_from_a_snapshot_for_a_membership_that_has_it() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.assign_move(2, None);
    let mut snapshot = |view| {
        let parts = Vec::new();
        probe.receive_from_coordinator(FromCoordinator::Snapshot { version: Step(0), view, parts })
    };
    // This peer's own one again, from before: results of the other stage were not for it then.
    assert_eq!(snapshot(1), []);
    let restore = Task::Restore { version: Step(0), stage: Stage(0) };
    assert_eq!(snapshot(2), [PeerAction::Compute(restore)]);
}

#[test]
fn an_unexpected_tensor_is_released() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let activation = TensorTag::Activation { key: key(1, 0), exchange: FIRST };
    assert_eq!(probe.tensor(1, activation, 4), [PeerAction::Release(PayloadId(4))]);
    let gradient = TensorTag::ActivationGradient { key: key(1, 0), exchange: FIRST };
    assert_eq!(probe.tensor(1, gradient, 5), [PeerAction::Release(PayloadId(5))]);
}

#[test]
fn an_expelled_peer_ends_and_keeps_nothing() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    probe.offer(1, 1);
    probe.tensor(1, TensorTag::Activation { key: key(1, 0), exchange: FIRST }, 1);
    probe.tensor(1, TensorTag::Activation { key: key(1, 1), exchange: FIRST }, 2);
    // A peer goes on without its coordinator, since another one follows.
    assert_eq!(probe.input(PeerInput::Disconnected { member: member(COORDINATOR) }), []);
    let ended = probe
        .receive_from_coordinator(FromCoordinator::Expelled { reason: "it was silent".to_owned() });
    assert!(matches!(ended.last(), Some(PeerAction::Event(PeerEvent::Expelled { .. }))));
    // The engine uses both activations; they are released when their passes end.
    for (microbatch, payload) in [(0, 1), (1, 2)] {
        let key = key(1, microbatch);
        let forwarded =
            TaskResult::Forwarded { key, output: None, loss: Some(FixedLoss::new(1, 1)) };
        assert_eq!(probe.done(forwarded), [PeerAction::Release(PayloadId(payload))]);
    }
    assert_eq!(probe.peer.next_timeout(), None);
}

#[test]
fn a_draining_peer_accepts_only_the_open_step_and_leaves_when_idle() {
    let (mut probe, _) = Probe::at(1, |_| {});
    probe.offer(1, 0);
    let draining = PeerAction::ToCoordinator(ToCoordinator::Draining);
    assert_eq!(probe.input(PeerInput::Drain), std::slice::from_ref(&draining));
    // A new coordinator does not know of it.
    assert!(probe.receive_from_coordinator(FromCoordinator::TakenOver).contains(&draining));
    assert_eq!(probe.offer(1, 1), [accepted(1, 1), claim(1)]);
    let key = ClaimKey { step: Step(1), ..key(1, 0) };
    let offer = PeerMessage::Offer { key, size: Bytes(64), retry: false };
    assert_eq!(probe.receive_from(1, offer), [send(1, PeerMessage::Busy { key, service_time: 0 })]);
    let leaves = PeerAction::ToCoordinator(ToCoordinator::Leave);
    let (mut idle, _) = Probe::at(1, |_| {});
    let left = idle.input(PeerInput::Drain);
    assert_eq!(left, [leaves, PeerAction::Event(PeerEvent::Drained)]);
}

#[test]
fn a_member_that_cannot_follow_says_so_until_it_is_out() {
    let (mut probe, _) = Probe::at(1, |_| {});
    let behind = PeerAction::ToCoordinator(ToCoordinator::Behind(Followed::Own));
    let commits = probe.receive_from_coordinator(FromCoordinator::Commit(commit(Step(0))));
    assert!(!commits.contains(&behind), "its result may be on its way: {commits:?}");
    for time in ["the first time", "again", "and again"] {
        probe.now = probe.now + Duration::from_secs(600);
        assert!(probe.input(PeerInput::Tick).contains(&behind), "{time}");
    }
    let next = probe.receive_from_coordinator(FromCoordinator::TakenOver);
    assert!(next.contains(&behind), "the next coordinator: {next:?}");
}
