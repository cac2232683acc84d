//! The jobs of a peer: every microbatch at a hosted stage, with the bytes that they keep.

use std::collections::BTreeMap;
use std::collections::btree_map::{Iter, IterMut, Keys};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Exchange, Grant, Microbatch, Stage, Step};
use shoal_protocol::message::{Handover, HeldClaim, PeerMessage, ToCoordinator};
use shoal_protocol::units::{Bytes, Moment};

use super::job::{Claim, Job, Report};
use crate::action::{DeviceIndex, Payload, PeerAction};
use crate::peer::Out;
use crate::peer::senders::{Asked, Feeder};

/// All jobs, by step, stage and microbatch.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    by_key: BTreeMap<ClaimKey, Job>,
    /// Bytes of received activations and gradients that wait or are in use.
    in_flight: Bytes,
    /// Bytes of the activations and gradients in the output log.
    logged: Bytes,
}

/// What is left of a removed job.
#[derive(Debug)]
pub(super) struct Removed {
    /// The device that has its passes, if one has.
    pub(super) device: Option<DeviceIndex>,
    pub(super) holds_room: bool,
    /// Passes that the engine has.
    pub(super) running: u32,
    /// Whether it began, and not all of its backward passes ended.
    pub(super) has_graph: bool,
    /// Tensors that the engine is using.
    pub(super) in_use: Vec<Payload>,
}

impl Jobs {
    pub(super) fn in_flight(&self) -> Bytes {
        self.in_flight
    }

    pub(super) fn logged(&self) -> Bytes {
        self.logged
    }

    pub(super) fn contains(&self, key: ClaimKey) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Whether there is a job of this key that is not done.
    pub(super) fn is_open(&self, key: ClaimKey) -> bool {
        self.by_key.get(&key).is_some_and(|job| job.report == Report::NotDone)
    }

    pub(super) fn get(&self, key: ClaimKey) -> Option<&Job> {
        self.by_key.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: ClaimKey) -> Option<&mut Job> {
        self.by_key.get_mut(&key)
    }

    /// The job of this key, which the caller knows to exist.
    pub(super) fn existing(&mut self, key: ClaimKey) -> &mut Job {
        self.by_key.get_mut(&key).expect("the caller knows that the job exists")
    }

    pub(super) fn insert(&mut self, key: ClaimKey, job: Job) {
        self.by_key.insert(key, job);
    }

    /// The device of a job whose forward pass has begun.
    pub(super) fn device_of(&self, key: ClaimKey) -> DeviceIndex {
        self.device_if_begun(key).expect("its forward pass has begun")
    }

    /// The device of a job, once a forward pass has begun.
    pub(super) fn device_if_begun(&self, key: ClaimKey) -> Option<DeviceIndex> {
        self.by_key.get(&key).and_then(|job| job.device)
    }

    /// Number of jobs whose forward pass went to this device, and whose backward pass has not ended.
    pub(super) fn graphs_on(&self, device: DeviceIndex) -> usize {
        self.by_key.values().filter(|job| job.is_open_on(device)).count()
    }

    /// The same, of the step and the stage of another job.
    pub(super) fn graphs_beside(&self, key: ClaimKey, device: DeviceIndex) -> usize {
        self.at(key.step, key.stage).filter(|job| job.is_open_on(device)).count()
    }

    /// The jobs of a step at a stage.
    pub(super) fn at(&self, step: Step, stage: Stage) -> impl Iterator<Item = &Job> {
        let key = |microbatch| ClaimKey { step, stage, microbatch };
        let all = key(Microbatch(0))..=key(Microbatch(u32::MAX));
        self.by_key.range(all).map(|(_, job)| job)
    }

    pub(super) fn keys(&self) -> Keys<'_, ClaimKey, Job> {
        self.by_key.keys()
    }

    pub(super) fn iter(&self) -> Iter<'_, ClaimKey, Job> {
        self.by_key.iter()
    }

    pub(super) fn iter_mut(&mut self) -> IterMut<'_, ClaimKey, Job> {
        self.by_key.iter_mut()
    }

    /// Takes an activation that a job expects. Returns whether a job expects it; otherwise releases it.
    pub(super) fn receive_input(
        &mut self,
        now: Moment,
        (from, exchange): (Feeder, Exchange),
        payload: Payload,
        out: &mut Out,
    ) -> bool {
        let job = self.by_key.get_mut(&from.key());
        if let Some(job) = job
            && job.exchanges.receive_input(exchange, payload)
        {
            if job.exchanges.running() == 0 {
                job.ready_at = now;
            }
            self.in_flight += payload.size;
            return true;
        }
        out.push(PeerAction::Release(payload.id));
        false
    }

    /// Takes a gradient that a job expects. Returns whether a job expects it; otherwise releases it.
    pub(super) fn receive_gradient(
        &mut self,
        now: Moment,
        (from, exchange): (Asked, Exchange),
        payload: Payload,
        out: &mut Out,
    ) -> bool {
        let job = self.by_key.get_mut(&from.key());
        if let Some(job) = job
            && job.exchanges.receive_gradient(exchange, payload)
        {
            if job.exchanges.can_run_backward() && job.exchanges.running() == 0 {
                job.ready_at = now;
            }
            self.in_flight += payload.size;
            return true;
        }
        out.push(PeerAction::Release(payload.id));
        false
    }

    /// Releases a received tensor.
    pub(super) fn release(&mut self, payload: Payload, out: &mut Out) {
        self.in_flight = self.in_flight - payload.size;
        out.push(PeerAction::Release(payload.id));
    }

    /// Puts a job's next gradient into the output log.
    pub(super) fn log_gradient(&mut self, key: ClaimKey, gradient: Payload) {
        self.existing(key).input_gradients.push(gradient);
        self.logged += gradient.size;
    }

    /// Puts a job's next activation into the output log.
    pub(super) fn log_output(&mut self, key: ClaimKey, output: Payload) {
        self.existing(key).delivery.outputs.push(output);
        self.logged += output.size;
    }

    /// Removes a job and its output log. Returns it with the tensors that the engine is using; all others
    /// are released.
    pub(super) fn remove(&mut self, key: ClaimKey, out: &mut Out) -> Removed {
        let job = self.by_key.remove(&key).expect("the caller knows that the job exists");
        for logged in job.delivery.outputs.into_iter().chain(job.input_gradients) {
            self.logged = self.logged - logged.size;
            out.push(PeerAction::Release(logged.id));
        }
        let exchanges = &job.exchanges;
        let (running, has_graph) =
            (exchanges.running(), exchanges.have_begun() && !exchanges.are_over());
        let (in_use, others) = job.exchanges.into_received();
        for payload in others {
            self.release(payload, out);
        }
        Removed { device: job.device, holds_room: job.holds_room, running, has_graph, in_use }
    }

    /// Whether work of a step at a stage was granted here and is not done.
    pub(super) fn has_granted(&self, step: Step, stage: Stage) -> bool {
        self.at(step, stage).any(|job| job.grant().is_some() && job.report == Report::NotDone)
    }

    /// The gradient of a microbatch's input in the output log.
    pub(super) fn logged_gradient(&self, key: ClaimKey) -> Option<Payload> {
        self.by_key.get(&key)?.input_gradients.first().copied()
    }

    /// The activation of a microbatch in the output log.
    pub(super) fn logged_output(&self, key: ClaimKey) -> Option<Payload> {
        self.by_key.get(&key)?.delivery.outputs.first().copied()
    }

    /// The jobs of the steps up to this one.
    pub(super) fn keys_through(&self, step: Step) -> Vec<ClaimKey> {
        self.keys().take_while(|key| key.step <= step).copied().collect()
    }

    /// Marks a report as acknowledged by the coordinator.
    pub(super) fn acknowledge_report(&mut self, key: ClaimKey, grant: Grant) {
        if let Some(job) = self.by_key.get_mut(&key)
            && job.grant() == Some(grant)
            && matches!(job.report, Report::Sent { .. })
        {
            job.report = Report::Acknowledged;
        }
    }

    /// Reports finished work to the coordinator.
    pub(super) fn report(&mut self, now: Moment, key: ClaimKey, out: &mut Out) {
        let job = self.existing(key);
        let grant = job.grant().expect("work is done under its claim");
        job.report = Report::Sent { at: now };
        out.push(PeerAction::ToCoordinator(job.done(key, grant)));
    }

    /// Repeats claim requests and reports without an answer.
    pub(super) fn repeat_reports(&mut self, now: Moment, retry: Duration, out: &mut Out) {
        for (key, job) in &mut self.by_key {
            if let Claim::Requested { at } = &mut job.claim
                && now.since(*at) >= retry
            {
                *at = now;
                out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key: *key }));
            }
            if let (Claim::Granted(grant), Report::Sent { at }) = (job.claim, &mut job.report)
                && now.since(*at) >= retry
            {
                *at = now;
                out.push(PeerAction::ToCoordinator(job.done(*key, grant)));
            }
        }
    }

    /// Requests every pending claim again, of a new coordinator.
    pub(super) fn repeat_claims(&mut self, now: Moment, out: &mut Out) {
        for (key, job) in &mut self.by_key {
            if let Claim::Requested { at } = &mut job.claim {
                *at = now;
                out.push(PeerAction::ToCoordinator(ToCoordinator::Claim { key: *key }));
            }
        }
    }

    /// The granted claims, for a census. Work that is listed as done needs no further report.
    pub(super) fn held_claims(&mut self) -> Vec<HeldClaim> {
        let held = self.by_key.iter_mut().filter_map(|(key, job)| {
            let grant = job.grant()?;
            let done = job.report != Report::NotDone;
            if done {
                job.report = Report::Acknowledged;
            }
            let loss = job.loss.filter(|_| done);
            let handover = if done { job.handover } else { Handover::default() };
            Some(HeldClaim { key: *key, grant, done, loss, handover })
        });
        held.collect()
    }

    /// Repeats acceptances whose activation did not arrive for this long.
    pub(super) fn repeat_acceptances(
        &mut self,
        now: Moment,
        patience: Duration,
        service_time: u64,
        out: &mut Out,
    ) {
        for (key, job) in &mut self.by_key {
            if job.exchanges.awaits_input() && now.since(job.upstream.accepted_at) >= patience {
                job.upstream.accepted_at = now;
                for to in job.upstream.senders.iter().copied() {
                    let wanted = job.exchanges.wanted();
                    let message = PeerMessage::Accepted { key: *key, wanted, service_time };
                    out.push(PeerAction::Send { to, message });
                }
            }
        }
    }
}
