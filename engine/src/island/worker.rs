//! The thread of one device of an island, and the engine that it owns.

use std::ops::{Deref, DerefMut};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::exchange::{EndOnDrop, Seat};
use crate::device::setup::{Device, DeviceChoice};
use crate::engine::Engine;
use crate::engine::footprint::Footprint;
use crate::error::{EngineError, Result};
use crate::swap::SwapStats;

/// Orders that wait at most. A device has two passes at a time, each with an order to add or drop its gradient.
const ORDERS: usize = 1 << 10;

/// Work on an engine.
pub(super) type Work = Box<dyn FnOnce(&mut Engine) + Send>;

/// What the thread does next.
enum Order {
    Run(Work),
    /// Hand the engine over, and wait until it is back.
    Lend,
}

/// A thread that carries out orders on its engine, in turn. It ends when this handle is dropped.
#[derive(Debug)]
pub(super) struct Worker {
    device: Device,
    orders: SyncSender<Order>,
    lent: Receiver<Box<Engine>>,
    back: SyncSender<Box<Engine>>,
    noted: Arc<Mutex<Noted>>,
}

/// What is known of a device while its engine works.
#[derive(Debug, Clone, Copy, Default)]
struct Noted {
    /// What was swapped for it by the end of its last work; `None` if it has everything all the time.
    swapped: Option<SwapStats>,
    /// What its tensors took when its engine was last lent.
    footprint: Footprint,
}

/// A thread that makes its engine.
pub(super) struct Starting {
    choice: DeviceChoice,
    begins: Receiver<Result<Device>>,
    orders: SyncSender<Order>,
    lent: Receiver<Box<Engine>>,
    back: SyncSender<Box<Engine>>,
    noted: Arc<Mutex<Noted>>,
}

impl Starting {
    /// Waits until the thread has its device and engine.
    pub(super) fn begun(self) -> Result<Worker> {
        let Self { choice, begins, orders, lent, back, noted } = self;
        let stopped = |_| EngineError::DeviceStopped { device: choice.to_string() };
        let device = begins.recv().map_err(stopped)??;
        Ok(Worker { device, orders, lent, back, noted })
    }
}

impl Worker {
    /// Starts the thread. With a seat, others that compute with it learn of its end.
    pub(super) fn start(
        choice: DeviceChoice,
        threads: usize,
        seat: Option<Seat>,
        make: impl FnOnce(Device) -> Result<Engine> + Send + 'static,
    ) -> Result<Starting> {
        let (orders, next) = sync_channel(ORDERS);
        let (lend, lent) = sync_channel(1);
        let (back, returned) = sync_channel(1);
        let (began, begins) = sync_channel(1);
        let noted = Arc::<Mutex<Noted>>::default();
        let notes = noted.clone();
        let thread = std::thread::Builder::new().name(format!("device {choice}"));
        let run = move || {
            let _end = seat.map(EndOnDrop);
            // libtorch's number of threads is that of the thread that sets it.
            let made = Device::open(choice, threads).and_then(|device| Ok((device, make(device)?)));
            let (device, mut engine) = match made {
                Ok((device, engine)) => (device, Box::new(engine)),
                Err(error) => return drop(began.send(Err(error))),
            };
            if began.send(Ok(device)).is_err() {
                return;
            }
            while let Ok(order) = next.recv() {
                match order {
                    Order::Run(work) => {
                        work(&mut engine);
                        lock(&notes).swapped = engine.swap_stats();
                    }
                    Order::Lend => {
                        let Some(back) = lend.send(engine).ok().and_then(|()| returned.recv().ok())
                        else {
                            return;
                        };
                        engine = back;
                    }
                }
            }
        };
        let stopped = |_| EngineError::DeviceStopped { device: choice.to_string() };
        thread.spawn(run).map_err(stopped)?;
        Ok(Starting { choice, begins, orders, lent, back, noted })
    }

    /// Queues work.
    ///
    /// # Errors
    /// If the thread has ended, which it does when it panics.
    pub(super) fn run(&self, work: Work) -> Result<()> {
        self.orders.send(Order::Run(work)).map_err(|_| self.stopped())
    }

    /// Asks for the engine, to be received by [`Self::receive`].
    pub(super) fn ask(&self) -> Result<()> {
        self.orders.send(Order::Lend).map_err(|_| self.stopped())
    }

    /// Receives the engine once the work before [`Self::ask`] has ended.
    pub(super) fn receive(&self) -> Result<Lent<'_>> {
        let engine = self.lent.recv().map_err(|_| self.stopped())?;
        Ok(Lent { worker: self, engine: Some(engine) })
    }

    /// What was swapped for the device by the end of its last work; `None` if it has everything all the time.
    pub(super) fn swapped(&self) -> Option<SwapStats> {
        lock(&self.noted).swapped
    }

    /// What the device's tensors took when its engine was last lent.
    pub(super) fn footprint(&self) -> Footprint {
        lock(&self.noted).footprint
    }

    fn stopped(&self) -> EngineError {
        EngineError::DeviceStopped { device: self.device.to_string() }
    }
}

fn lock(noted: &Mutex<Noted>) -> MutexGuard<'_, Noted> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine of a device whose thread waits. It goes back when this is dropped.
#[derive(Debug)]
pub(super) struct Lent<'a> {
    worker: &'a Worker,
    engine: Option<Box<Engine>>,
}

impl Deref for Lent<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.engine.as_ref().expect("it goes back only when this is dropped")
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("it goes back only when this is dropped")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            let (swapped, footprint) = (engine.swap_stats(), engine.footprint());
            *lock(&self.worker.noted) = Noted { swapped, footprint };
            // The thread waits for it, unless the process ends.
            let _ = self.worker.back.send(engine);
        }
    }
}
