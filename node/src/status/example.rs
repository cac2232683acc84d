//! An example status for tests of views: a swarm that has just lost the last replica of a stage.

use std::num::NonZeroU16;

use shoal_protocol::ids::{ContentHash, Incarnation, PeerId, Stage, StageSpan};

use super::{
    CheckpointStatus, CostStatus, Curves, LinkStatus, MemberState, MemberStatus, NodeState,
    NodeStatus, Point, RunStatus, Status, StatusEvent, SurvivalStatus, Tone, TrainingStatus,
};

/// The time at which the status was taken, in milliseconds since 1970.
const NOW: u64 = 1_800_000_000_000;

pub(crate) fn peer(number: u8) -> PeerId {
    PeerId([number; 32])
}

fn member(number: u8, stages: StageSpan, state: MemberState) -> MemberStatus {
    let link = LinkStatus {
        relayed: number == 3,
        round_trip_seconds: 0.0125,
        bytes_per_second: Some(2.5e7),
        window_bytes: 100_000,
        sent_packets: 1000,
        lost_packets: 10,
    };
    MemberStatus {
        peer: peer(number),
        name: (number < 3).then(|| format!("gpu-{number}").parse().expect("a name")),
        incarnation: Incarnation(1),
        stages,
        devices: NonZeroU16::MIN.saturating_add(if number == 2 { 3 } else { 0 }),
        state,
        moves: None,
        coordinator: number == 1,
        anchor: number == 1,
        archive: false,
        own: number == 1,
        price: (number == 2).then(|| "0.35".parse().expect("a price")),
        island: (number == 2).then(|| "us-east-1".parse().expect("a name")),
        addresses: vec!["127.0.0.1:7410".parse().expect("an address")],
        link: (number != 1).then_some(link),
    }
}

fn survival() -> SurvivalStatus {
    SurvivalStatus {
        uncovered_stages: vec![2],
        single_replica_stages: vec![0, 1],
        steps_at_risk: Some(0),
        seconds_at_risk: Some(0.0),
        text: "any one peer: no, stage 2 has no replica, stages 0, 1 have one replica".into(),
        advice: "more peers: `shoal join ...`".into(),
        ..SurvivalStatus::default()
    }
}

/// One replica of stage 0, two of stage 1, none of stage 2, and an observer.
pub(crate) fn status() -> Status {
    let one = |stage| StageSpan::one(Stage(stage));
    let status_event =
        |ago, tone, text: &str| StatusEvent { at_ms: NOW - ago, tone, text: text.to_owned() };
    Status {
        version: "0.1.0".into(),
        at_ms: NOW,
        node: NodeStatus {
            peer: Some(peer(1)),
            incarnation: Incarnation(1),
            state: NodeState::Paused,
            why: Some("stage 2 has no replica".into()),
            ready: true,
            stages: Some(one(0)),
            memory_limit_bytes: Some(8_000_000_000),
            resident_bytes: Some(324_000_000),
            ..NodeStatus::default()
        },
        run: Some(RunStatus {
            id: ContentHash([7; 32]),
            stages: 3,
            steps: 200,
            version: 40,
            era: 1,
            term: 2,
            coordinator: Some(peer(1)),
            tokens_per_step: 4096,
            microbatches: 16,
            checkpoint: Some(CheckpointStatus { version: 40, hash: None }),
            saved: Some(40),
            saves: true,
        }),
        members: vec![
            member(1, one(0), MemberState::Serving),
            member(2, one(1), MemberState::Serving),
            member(3, one(1), MemberState::CatchingUp),
            member(4, StageSpan::none(), MemberState::Watching),
        ],
        training: TrainingStatus {
            step: Some(40),
            loss: Some(2.5),
            held_out_loss: Some(2.75),
            gradient_norm: Some(1.25),
            tokens_per_second: Some(8250.0),
            seconds_per_step: Some(0.5),
            committed_at_ms: Some(NOW - 6000),
            seconds_left: Some(80.0),
        },
        survival: Some(survival()),
        scored: None,
        cost: Some(CostStatus {
            per_hour: 0.35,
            total: 1.5,
            tokens_per_currency_unit: Some(2.5e6),
        }),
        curves: Curves {
            loss: (1..=40).map(|step| Point(step, 5.5 - (step - 1) as f64 * 0.075)).collect(),
            held_out_loss: vec![Point(1, 5.5), Point(21, 4.0), Point(40, 2.75)],
            tokens_per_second: (1..=40).map(|step| Point(step, 8000.0)).collect(),
        },
        events: vec![
            status_event(60_000, Tone::Good, "serves stage 1"),
            status_event(5_000, Tone::Bad, "the run goes back to step 40"),
        ],
    }
}
