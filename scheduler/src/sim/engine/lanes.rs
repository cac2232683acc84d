//! The tasks of a peer's devices: those that wait, in order, and those that run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::action::{DeviceIndex, Task};

/// The tasks of a peer's devices.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    waiting: VecDeque<Task>,
    /// The running tasks, with their durations as they are reported. A task that concerns all devices runs
    /// alone, on the first.
    running: BTreeMap<DeviceIndex, (Task, Duration)>,
}

impl Lanes {
    pub(super) fn push(&mut self, task: Task) {
        self.waiting.push_back(task);
    }

    /// Takes a task that can begin. One that concerns all devices waits for all tasks before it.
    pub(super) fn take_able(&mut self) -> Option<Task> {
        if self.running.values().any(|(task, _)| task.device().is_none()) {
            return None;
        }
        let mut taken: BTreeSet<DeviceIndex> = self.running.keys().copied().collect();
        let mut able = None;
        for (place, task) in self.waiting.iter().enumerate() {
            let Some(device) = task.device() else {
                able = (place == 0 && taken.is_empty()).then_some(place);
                break;
            };
            if taken.insert(device) {
                able = Some(place);
                break;
            }
        }
        self.waiting.remove(able?)
    }

    /// A task begins. Returns the device that it occupies.
    pub(super) fn begin(&mut self, task: Task, measured: Duration) -> DeviceIndex {
        let device = task.device().unwrap_or_default();
        let before = self.running.insert(device, (task, measured));
        assert!(before.is_none(), "a device runs one task at a time");
        device
    }

    /// The task that a device runs ends.
    pub(super) fn end(&mut self, device: DeviceIndex) -> Option<(Task, Duration)> {
        self.running.remove(&device)
    }

    /// The task that a device runs.
    pub(super) fn running(&self, device: DeviceIndex) -> Option<&Task> {
        self.running.get(&device).map(|(task, _)| task)
    }

    /// The tasks that wait.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Task> {
        self.waiting.iter()
    }

    /// All tasks.
    pub(super) fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.running.values().map(|(task, _)| task).chain(&self.waiting)
    }
}
