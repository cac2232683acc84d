//! The messages to be sent to one peer, connected or not.
//!
//! A message leaves the queue only when it has been handed over. So a broken connection loses no
//! queued message: the next connection continues where the last one stopped.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::class::{Class, QUEUES, TENSOR_STREAMS};
use crate::frame::Frame;
use crate::limits;

/// A queued message with tensors. Clones share their bytes.
#[derive(Debug, Clone)]
pub(super) struct TensorJob {
    pub(super) tag: Bytes,
    pub(super) frames: Vec<Frame>,
    pub(super) class: Class,
    /// Its share of the queue's room.
    _room: Arc<OwnedSemaphorePermit>,
}

/// The number of a tensor message within its queue, in order of queueing.
pub(super) type MessageNumber = u64;

/// Maximum bytes written to the control stream at once.
const BATCH: usize = 64 << 10;

/// Minimum size for which a message is counted, at both ends; it limits the number of messages.
pub(super) const SMALLEST: usize = 1024;

/// Tensor messages of the classes that share room.
#[derive(Debug, Default)]
struct Queue {
    queued: BTreeMap<(Reverse<Class>, MessageNumber), TensorJob>,
    in_flight: BTreeMap<MessageNumber, TensorJob>,
}

impl Queue {
    fn len(&self) -> usize {
        self.queued.len() + self.in_flight.len()
    }
}

#[derive(Debug, Default)]
struct Contents {
    control: VecDeque<Bytes>,
    control_bytes: usize,
    /// Whether the link serves a connection.
    connected: bool,
    /// Whether the control queue was full while connected: the connection counts as stuck.
    stuck: bool,
    queues: [Queue; QUEUES],
    next: MessageNumber,
}

/// The queues of one peer. Any task may add messages; one link removes them.
#[derive(Debug)]
pub(super) struct SendQueue {
    contents: Mutex<Contents>,
    rooms: [Arc<Semaphore>; QUEUES],
    control_ready: Notify,
    tensor_ready: Notify,
    /// Wakes the link: there is work without a connection, or the queue is stuck.
    link: Notify,
    /// Wakes tasks that wait until messages have been handed over.
    handed_over: Notify,
}

impl SendQueue {
    pub(super) fn new() -> Self {
        Self {
            contents: Mutex::default(),
            rooms: [(); QUEUES].map(|()| Arc::new(Semaphore::new(limits::SEND_QUEUE.0 as usize))),
            control_ready: Notify::new(),
            tensor_ready: Notify::new(),
            link: Notify::new(),
            handed_over: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        // No code panics while it holds the lock in the middle of a change.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the queued control messages.
    pub(super) fn control_bytes(&self) -> usize {
        self.lock().control_bytes
    }

    /// No further control message may be queued: the connection counts as stuck.
    pub(super) fn overflow(&self) {
        let mut contents = self.lock();
        contents.stuck = contents.connected;
        self.wake(contents, &self.control_ready);
    }

    /// Queues a control message; returns `false` if the queue is full. The connection then counts
    /// as stuck.
    pub(super) fn push_control(&self, message: Bytes) -> bool {
        let mut contents = self.lock();
        let bytes = contents.control_bytes + message.len();
        let full = contents.control.len() >= limits::CONTROL_QUEUE
            || bytes as u64 > limits::CONTROL_QUEUE_BYTES.0;
        if full {
            contents.stuck = contents.connected;
        } else {
            contents.control_bytes = bytes;
            contents.control.push_back(message);
        }
        self.wake(contents, &self.control_ready);
        !full
    }

    /// Queues tensors once their class has room. A message larger than all room waits until its
    /// class has nothing in flight.
    pub(super) async fn push_tensor(&self, tag: Bytes, frames: Vec<Frame>, class: Class) {
        let bytes = tag.len() + frames.iter().map(Frame::wire_length).sum::<usize>();
        let bytes = bytes.clamp(SMALLEST, limits::SEND_QUEUE.0 as usize) as u32;
        let room = self.rooms[class.queue()].clone().acquire_many_owned(bytes).await;
        let room = Arc::new(room.expect("the semaphore is never closed"));
        let mut contents = self.lock();
        let number = contents.next;
        contents.next += 1;
        let job = TensorJob { tag, frames, class, _room: room };
        contents.queues[class.queue()].queued.insert((Reverse(class), number), job);
        self.wake(contents, &self.tensor_ready);
    }

    /// Wakes the writer; wakes the link only if it has something to do.
    fn wake(&self, contents: MutexGuard<'_, Contents>, writer: &Notify) {
        let link = contents.stuck || !contents.connected;
        drop(contents);
        writer.notify_one();
        if link {
            self.link.notify_one();
        }
    }

    /// A connection is established.
    pub(super) fn connected(&self) {
        let mut contents = self.lock();
        contents.connected = true;
        contents.stuck = false;
    }

    /// The control messages to write next, at least one. They stay in the queue.
    pub(super) async fn control(&self) -> Vec<Bytes> {
        loop {
            let batch = self.control_batch();
            if !batch.is_empty() {
                return batch;
            }
            self.control_ready.notified().await;
        }
    }

    fn control_batch(&self) -> Vec<Bytes> {
        let mut bytes = 0;
        let fits = |message: &&Bytes| {
            let first = bytes == 0;
            bytes += message.len();
            first || bytes <= BATCH
        };
        self.lock().control.iter().take_while(fits).cloned().collect()
    }

    /// Removes the first `count` control messages, which are written.
    pub(super) fn control_written(&self, count: usize) {
        let mut contents = self.lock();
        let written: usize = contents.control.drain(..count).map(|message| message.len()).sum();
        contents.control_bytes -= written;
        drop(contents);
        self.handed_over.notify_one();
    }

    /// The tensors to send next, of a class with a free stream. They stay in the queue until
    /// [`Self::tensor_done`].
    pub(super) async fn tensor(&self) -> (MessageNumber, TensorJob) {
        loop {
            if let Some(next) = self.next_tensor() {
                return next;
            }
            self.tensor_ready.notified().await;
        }
    }

    fn next_tensor(&self) -> Option<(MessageNumber, TensorJob)> {
        let mut contents = self.lock();
        let streams = |queue: &&mut Queue| queue.in_flight.len() < TENSOR_STREAMS;
        contents.queues.iter_mut().rev().filter(streams).find_map(|queue| {
            let ((_, number), job) = queue.queued.pop_first()?;
            queue.in_flight.insert(number, job.clone());
            Some((number, job))
        })
    }

    /// Removes a message that the peer has received.
    pub(super) fn tensor_done(&self, number: MessageNumber, class: Class) {
        self.lock().queues[class.queue()].in_flight.remove(&number);
        self.handed_over.notify_one();
        // A message may be waiting for a free stream.
        self.tensor_ready.notify_one();
    }

    /// The connection is lost: its undelivered messages go out on the next one.
    pub(super) fn requeue_in_flight(&self) {
        let mut contents = self.lock();
        contents.connected = false;
        for queue in &mut contents.queues {
            let undelivered = std::mem::take(&mut queue.in_flight);
            let queued =
                undelivered.into_iter().map(|(number, job)| ((Reverse(job.class), number), job));
            queue.queued.extend(queued);
        }
    }

    /// Discards all messages.
    pub(super) fn clear(&self) {
        let mut contents = self.lock();
        let next = contents.next;
        // Dropped outside the lock, because there may be many.
        let discarded = std::mem::replace(&mut *contents, Contents { next, ..Contents::default() });
        drop(contents);
        drop(discarded);
    }

    /// Whether no message is queued or in flight.
    pub(super) fn is_empty(&self) -> bool {
        let contents = self.lock();
        contents.control.is_empty() && contents.queues.iter().all(|queue| queue.len() == 0)
    }

    /// Waits until a message is queued.
    pub(super) async fn filled(&self) {
        while self.is_empty() {
            self.link.notified().await;
        }
    }

    /// Waits until the control queue is full while connected.
    pub(super) async fn stuck(&self) {
        while !self.lock().stuck {
            self.link.notified().await;
        }
    }

    /// Waits until all messages have been handed over.
    pub(super) async fn emptied(&self) {
        while !self.is_empty() {
            self.handed_over.notified().await;
        }
    }

    /// Number of tensor messages, queued or in flight, and of queued control messages.
    pub(super) fn lengths(&self) -> (usize, usize) {
        let contents = self.lock();
        (contents.queues.iter().map(Queue::len).sum(), contents.control.len())
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::codec::packing::Packing;
    use crate::frame::Element;

    fn tensor(bytes: usize) -> Vec<Frame> {
        let raw = Bytes::from(vec![0; bytes]);
        vec![Frame::pack(Element::U8, &[bytes as u32], raw, Packing::Raw).expect("agrees")]
    }

    fn push(send_queue: &SendQueue, name: &'static str, bytes: usize, class: Class) -> bool {
        send_queue
            .push_tensor(Bytes::from_static(name.as_bytes()), tensor(bytes), class)
            .now_or_never()
            .is_some()
    }

    fn next(send_queue: &SendQueue) -> (MessageNumber, Bytes) {
        let (number, job) = send_queue.tensor().now_or_never().expect("something is queued");
        (number, job.tag)
    }

    #[test]
    fn tensors_are_sent_by_class_and_then_in_order() {
        let send_queue = SendQueue::new();
        for (name, class) in [
            ("chunk", Class::Chunk),
            ("round", Class::Round),
            ("first", Class::Activation),
            ("second", Class::Activation),
            ("gradient", Class::Gradient),
        ] {
            assert!(push(&send_queue, name, 10, class));
        }
        let order: Vec<Bytes> = (0..5).map(|_| next(&send_queue).1).collect();
        assert_eq!(order, ["gradient", "first", "second", "round", "chunk"]);
        assert!(send_queue.tensor().now_or_never().is_none());
    }

    #[test]
    fn undelivered_tensors_are_resent_in_order() {
        let send_queue = SendQueue::new();
        for name in ["a", "b", "c"] {
            assert!(push(&send_queue, name, 10, Class::Chunk));
        }
        let (delivered, _) = next(&send_queue);
        let (_, lost) = next(&send_queue);
        assert_eq!(lost, "b");
        send_queue.tensor_done(delivered, Class::Chunk);
        send_queue.requeue_in_flight();
        assert_eq!([next(&send_queue).1, next(&send_queue).1], ["b", "c"]);
    }

    #[test]
    fn queued_bytes_are_limited() {
        let cap = limits::SEND_QUEUE.0 as usize;
        let send_queue = SendQueue::new();
        assert!(push(&send_queue, "small", 10, Class::Chunk));
        assert!(!push(&send_queue, "as large as the cap", cap, Class::Chunk));
        let (number, job) = send_queue.tensor().now_or_never().expect("queued");
        drop(job);
        assert!(!push(&send_queue, "still on its way", cap, Class::Chunk));
        send_queue.tensor_done(number, Class::Chunk);
        assert!(push(&send_queue, "larger than the cap", cap + 1, Class::Chunk));
        assert!(!push(&send_queue, "no room beside it", 1, Class::Chunk));
    }

    #[test]
    fn urgent_tensors_have_room_of_their_own() {
        let cap = limits::SEND_QUEUE.0 as usize;
        let send_queue = SendQueue::new();
        assert!(push(&send_queue, "a round", cap, Class::Round));
        assert!(!push(&send_queue, "and more of it", 1, Class::Round));
        assert!(push(&send_queue, "activation", cap, Class::Activation));
        assert!(push(&send_queue, "gradient", cap, Class::Gradient));
        assert!(!push(&send_queue, "and another", 1, Class::Gradient));
        let order: Vec<Bytes> = (0..3).map(|_| next(&send_queue).1).collect();
        assert_eq!(order, ["gradient", "activation", "a round"]);
    }

    #[test]
    fn urgent_tensors_have_streams_of_their_own() {
        let send_queue = SendQueue::new();
        for _ in 0..=TENSOR_STREAMS {
            assert!(push(&send_queue, "round", 1, Class::Round));
        }
        let (first, _) = next(&send_queue);
        for _ in 1..TENSOR_STREAMS {
            next(&send_queue);
        }
        assert!(send_queue.tensor().now_or_never().is_none(), "all streams are in use");
        assert!(push(&send_queue, "gradient", 1, Class::Gradient));
        assert_eq!(next(&send_queue).1, "gradient");
        send_queue.tensor_done(first, Class::Round);
        assert_eq!(next(&send_queue).1, "round");
    }

    #[test]
    fn a_full_control_queue_counts_as_stuck() {
        let send_queue = SendQueue::new();
        for _ in 0..limits::CONTROL_QUEUE {
            assert!(send_queue.push_control(Bytes::from_static(b"x")));
        }
        // Without a connection, a full queue does not count as stuck.
        assert!(!send_queue.push_control(Bytes::from_static(b"x")));
        send_queue.connected();
        assert!(send_queue.stuck().now_or_never().is_none());
        assert!(!send_queue.push_control(Bytes::from_static(b"x")));
        assert!(send_queue.stuck().now_or_never().is_some());
        send_queue.clear();
        assert!(send_queue.is_empty());
        assert!(send_queue.stuck().now_or_never().is_none());
        assert!(send_queue.push_control(Bytes::from_static(b"x")));
    }

    #[test]
    fn control_messages_stay_until_written() {
        let send_queue = SendQueue::new();
        let large = Bytes::from(vec![0; BATCH]);
        for message in [&large, &large, &Bytes::from_static(b"end")] {
            assert!(send_queue.push_control(message.clone()));
        }
        assert_eq!(send_queue.control().now_or_never(), Some(vec![large.clone()]));
        assert_eq!(send_queue.control().now_or_never().map(|batch| batch.len()), Some(1));
        send_queue.control_written(2);
        assert_eq!(send_queue.control().now_or_never(), Some(vec![Bytes::from_static(b"end")]));
        send_queue.control_written(1);
        assert!(send_queue.emptied().now_or_never().is_some());
    }
}
