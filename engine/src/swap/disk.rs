//! The thread that reads and writes the file while the engine computes.

use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::Place;
use super::file::{Extent, read, write};
use super::region::Region;

/// Orders that are not answered, at most. Neither queue is longer, so neither side ever waits for room.
const ORDERS: usize = 64;

/// The direction of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the file.
    In,
    /// Into the file.
    Out,
}

/// Bytes to read or to write.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) place: Place,
    pub(super) direction: Direction,
    pub(super) extent: Extent,
    pub(super) region: Region,
}

/// The handle of the thread, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Disk {
    orders: Option<SyncSender<Order>>,
    done: Receiver<(Order, io::Result<()>)>,
    thread: Option<JoinHandle<()>>,
    open: usize,
}

impl Disk {
    pub(super) fn start(file: File) -> io::Result<Self> {
        let (orders, queue) = sync_channel::<Order>(ORDERS);
        let (results, done) = sync_channel(ORDERS);
        let thread = std::thread::Builder::new().name("swap".into()).spawn(move || {
            for mut order in queue {
                let result = match order.direction {
                    Direction::In => read(&file, order.extent, order.region.bytes_mut()),
                    Direction::Out => write(&file, order.extent, order.region.bytes()),
                };
                if results.send((order, result)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { orders: Some(orders), done, thread: Some(thread), open: 0 })
    }

    /// Whether another order can be given.
    pub(super) fn has_room(&self) -> bool {
        self.open < ORDERS
    }

    pub(super) fn is_idle(&self) -> bool {
        self.open == 0
    }

    pub(super) fn give(&mut self, order: Order) {
        assert!(self.has_room(), "the caller waits for an answer first");
        self.open += 1;
        let orders = self.orders.as_ref().expect("the thread runs as long as its handle");
        orders.send(order).expect("the thread takes every order");
    }

    /// Waits for an answer. The caller knows that an order is open.
    pub(super) fn wait(&mut self) -> (Order, io::Result<()>) {
        assert!(self.open > 0, "an order is open");
        self.open -= 1;
        self.done.recv().expect("the thread answers every order")
    }

    /// An answer that is there.
    pub(super) fn poll(&mut self) -> Option<(Order, io::Result<()>)> {
        let answer = self.done.try_recv().ok()?;
        self.open -= 1;
        Some(answer)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was seen by whoever waited for its answer.
            let _ = thread.join();
        }
    }
}
