//! The queue of passes for the engine.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::units::Moment;

use super::job::{Job, Pass};
use super::jobs::Jobs;
use super::residency::{Backwards, Forwards, Visit, choose};
use super::visits::Visits;
use crate::action::{DeviceIndex, Payload};
use crate::peer::config::PeerConfig;

/// Passes that a device has at a time: one runs and one waits, so that it never idles while the end of a
/// pass is handled. A longer queue would delay a more urgent pass that arrives later.
const GIVEN: usize = 2;

/// The passes that a device has.
#[derive(Debug, Clone, Copy, Default)]
struct DevicePasses {
    given: usize,
    /// The time at which the last pass ended.
    ended_at: Moment,
}

/// Passes that can run, and the number of those that each device has.
///
/// The oldest step goes first; within a step backward passes, since they end microbatches; among forward
/// passes the latest stage, which is nearest to its backward pass. A peer that swaps its stages goes by
/// visits instead. A backward pass runs on the device that has the graph of its forward pass, and a forward
/// pass on the device that has the fewest passes, then the fewest graphs. A virtual worker of many passes stays on its
/// device, so those of a step are divided equally. Where devices divide the stages, a pass is for the device of its stage:
/// with the order above each runs interleaved 1F1B (Narayanan et al., arXiv 2104.04473), whose bubbles the products that
/// backward passes leave fill (Qi et al., arXiv 2401.10241).
#[derive(Debug)]
pub(super) struct ComputeQueue {
    devices: Vec<DevicePasses>,
    /// Whether they divide the stages.
    divides_stages: bool,
    /// Gradients that devices are to add, with products that are left to that.
    adding: BTreeMap<ClaimKey, DeviceIndex>,
    /// Whether a pass or an addition ended since the window was last considered.
    pass_ended: bool,
    forward: Forwards,
    backward: Backwards,
    /// The visits of a peer that swaps its stages.
    pub(super) visits: Visits,
    /// Dropped work of which the engine still has some.
    dropping: BTreeMap<ClaimKey, Dropped>,
}

/// Resources that dropped work keeps until the engine discards it.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    /// Tensors that the engine is using.
    pub(super) in_use: Vec<Payload>,
    /// Passes that it runs or is about to run.
    pub(super) running: u32,
    pub(super) holds_room: bool,
    /// The device that has its passes.
    pub(super) device: DeviceIndex,
}

impl ComputeQueue {
    /// The queue of a peer's devices.
    pub(super) fn new(config: &PeerConfig) -> Self {
        Self {
            devices: vec![DevicePasses::default(); config.candidate.devices.get().into()],
            divides_stages: config.divides_stages,
            adding: BTreeMap::new(),
            pass_ended: false,
            forward: Forwards::new(),
            backward: Backwards::new(),
            visits: Visits::default(),
            dropping: BTreeMap::new(),
        }
    }

    /// Queues the passes of a job that can run; its next forward pass if `is_next`.
    pub(super) fn queue(&mut self, key: ClaimKey, job: &Job, is_next: bool, held_out: bool) {
        if is_next && job.exchanges.can_run_forward() {
            self.forward.insert((key.step, Reverse(key.stage), key.microbatch));
        }
        if job.can_run_backward() && !held_out {
            self.backward.insert((key.step, key.stage, key.microbatch));
        }
    }

    /// Takes the next pass out of the queue that a device has room for. Forward passes must be of the steps
    /// up to `newest`.
    pub(super) fn next(&mut self, newest: Step, jobs: &Jobs) -> Option<(Pass, DeviceIndex)> {
        let backward = self.next_backward(jobs);
        let (pass, device) = match backward {
            Some((key, device)) => (Pass::Backward(key), device),
            None => {
                let (key, device) = self.next_forward(newest, jobs)?;
                (Pass::Forward(key), device)
            }
        };
        self.devices[device.index()].given += 1;
        Some((pass, device))
    }

    /// The next backward pass whose device has room, unless a forward pass of an older step can run.
    fn next_backward(&mut self, jobs: &Jobs) -> Option<(ClaimKey, DeviceIndex)> {
        let older = self.forward.first().map(|(step, _, _)| *step);
        let possible =
            self.backward.iter().take_while(|(step, ..)| older.is_none_or(|older| older >= *step));
        let (key, device) = possible
            .map(|&(step, stage, microbatch)| ClaimKey { step, stage, microbatch })
            .map(|key| (key, jobs.device_of(key)))
            .find(|(_, device)| self.has_room(*device))?;
        self.backward.remove(&(key.step, key.stage, key.microbatch));
        Some((key, device))
    }

    /// The first forward pass whose device has room: that of the passes before, if there were any.
    fn next_forward(&mut self, newest: Step, jobs: &Jobs) -> Option<(ClaimKey, DeviceIndex)> {
        if !self.devices().any(|device| self.has_room(device)) {
            return None;
        }
        let possible = self.forward.iter().take_while(|(step, ..)| *step <= newest);
        let (key, device) = possible
            .map(|&(step, Reverse(stage), microbatch)| ClaimKey { step, stage, microbatch })
            .find_map(|key| Some((key, self.device_for(key, jobs)?)))?;
        self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
        Some((key, device))
    }

    fn devices(&self) -> impl Iterator<Item = DeviceIndex> + use<> {
        (0..).map(DeviceIndex).take(self.devices.len())
    }

    fn has_room(&self, device: DeviceIndex) -> bool {
        self.devices[device.index()].given < GIVEN
    }

    /// The device that alone has passes of a stage, if devices divide the stages.
    pub(super) fn only_device_of(&self, stage: Stage) -> Option<DeviceIndex> {
        let device = stage.device_in_turn(self.devices.len());
        self.devices().nth(device).filter(|_| self.divides_stages)
    }

    /// The device for a forward pass, if it has room.
    fn device_for(&self, key: ClaimKey, jobs: &Jobs) -> Option<DeviceIndex> {
        let has_room = |device: &DeviceIndex| self.has_room(*device);
        if self.devices.len() == 1 {
            return self.devices().find(has_room);
        }
        if let Some(device) = self.only_device_of(key.stage) {
            return Some(device).filter(has_room);
        }
        if let Some(device) = jobs.device_if_begun(key) {
            return Some(device).filter(has_room);
        }
        let busy =
            |device: DeviceIndex| (self.devices[device.index()].given, jobs.graphs_on(device));
        if jobs.get(key).is_some_and(|job| job.exchanges.are_many()) {
            let all = self.devices();
            let device = all.min_by_key(|device| (jobs.graphs_beside(key, *device), busy(*device)));
            return device.filter(has_room);
        }
        self.devices().filter(has_room).min_by_key(|device| busy(*device))
    }

    /// Like [`Self::next`] for a peer that swaps its stages. `comes` is whether other peers may send more
    /// work of a stage in a step. Returns the visit too, if it is a new one.
    pub(super) fn next_by_visit(
        &mut self,
        now: Moment,
        newest: Step,
        comes: impl Fn(Step, Stage) -> bool,
    ) -> Option<(Pass, Option<Visit>)> {
        assert_eq!(self.devices.len(), 1, "a peer of several devices does not swap");
        if !self.has_room(DeviceIndex::default()) {
            return None;
        }
        let forward = self.forward.first().map(|(step, _, _)| *step).filter(|step| *step <= newest);
        let backward = self.backward.first().map(|(step, _, _)| *step);
        let Some(step) = forward.into_iter().chain(backward).min() else {
            self.visits.rest();
            return None;
        };
        let here = self.visits.current();
        let (visit, pass) = choose(step, here, &self.forward, &self.backward)?;
        let comes = here.is_some_and(|here| comes(step, here.stage));
        if self.visits.waits(now, visit, self.devices[0].given > 0, comes) {
            return None;
        }
        match pass {
            Pass::Forward(key) => {
                self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
            }
            Pass::Backward(key) => {
                self.backward.remove(&(key.step, key.stage, key.microbatch));
            }
        }
        self.devices[0].given += 1;
        Some((pass, self.visits.begin(visit, pass).then_some(visit)))
    }

    /// A device received a pass beyond those of [`Self::next`].
    pub(super) fn note_extra_pass(&mut self, device: DeviceIndex) {
        self.devices[device.index()].given += 1;
    }

    pub(super) fn note_end(&mut self, now: Moment, device: DeviceIndex) {
        let device = &mut self.devices[device.index()];
        device.given -= 1;
        device.ended_at = now;
        self.pass_ended = true;
    }

    /// A device is to add the gradient of a microbatch, and to compute products of it first.
    pub(super) fn note_addition(&mut self, key: ClaimKey, device: DeviceIndex) {
        self.adding.insert(key, device);
    }

    /// A device has added a gradient, or refused it. Returns whether it computed products first.
    pub(super) fn note_added(&mut self, now: Moment, key: ClaimKey) -> bool {
        let Some(device) = self.adding.remove(&key) else { return false };
        self.devices[device.index()].ended_at = now;
        self.pass_ended = true;
        true
    }

    /// The time at which the last pass ended: on this device or, for a pass that any device may run, on any.
    pub(super) fn ended_at(&self, device: Option<DeviceIndex>) -> Moment {
        match device {
            Some(device) => self.devices[device.index()].ended_at,
            None => self.devices.iter().map(|device| device.ended_at).max().unwrap_or_default(),
        }
    }

    /// Whether a pass ended since the last call and a device has nothing left to do.
    pub(super) fn take_idle(&mut self) -> bool {
        let ended = std::mem::take(&mut self.pass_ended);
        let is_idle = |device: DeviceIndex| {
            self.devices[device.index()].given == 0
                && !self.adding.values().any(|adding| *adding == device)
        };
        // Backward passes that wait have other devices, if there are several, and where these divide the stages forward
        // passes too.
        ended
            && self.devices().any(is_idle)
            && (self.forward.is_empty() || self.divides_stages)
            && (self.backward.is_empty() || self.devices.len() > 1)
    }

    /// Takes the passes of a microbatch out of the queue.
    pub(super) fn remove(&mut self, key: ClaimKey) {
        self.forward.remove(&(key.step, Reverse(key.stage), key.microbatch));
        self.backward.remove(&(key.step, key.stage, key.microbatch));
    }

    /// The device that has the passes of dropped work.
    pub(super) fn device_of_dropped(&self, key: ClaimKey) -> Option<DeviceIndex> {
        self.dropping.get(&key).map(|dropped| dropped.device)
    }

    pub(super) fn is_dropping(&self, key: ClaimKey) -> bool {
        self.dropping.contains_key(&key)
    }

    /// Keeps the resources of dropped work until the engine discards it.
    pub(super) fn drop_later(&mut self, key: ClaimKey, dropped: Dropped) {
        let again = self.dropping.insert(key, dropped);
        assert!(again.is_none(), "work is accepted again only after its drop is done");
    }

    /// A pass of dropped work ended. Takes the tensors that the engine stopped using: all after the last pass.
    pub(super) fn take_in_use(&mut self, key: ClaimKey) -> Vec<Payload> {
        let dropped = self.dropping.get_mut(&key).expect("the caller knows that it is dropped");
        dropped.running -= 1;
        if dropped.running > 0 { Vec::new() } else { std::mem::take(&mut dropped.in_use) }
    }

    /// The engine discarded dropped work. Returns what that still occupied.
    pub(super) fn discarded(&mut self, key: ClaimKey) -> Dropped {
        self.dropping.remove(&key).expect("work is discarded once")
    }

    /// Takes the room of all dropped work, for a rewind. Returns the work that occupied it.
    pub(super) fn take_rooms(&mut self) -> Vec<ClaimKey> {
        let held = self.dropping.iter_mut();
        held.filter_map(|(key, dropped)| std::mem::take(&mut dropped.holds_room).then_some(*key))
            .collect()
    }
}
