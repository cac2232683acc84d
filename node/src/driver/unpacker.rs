//! Unpacks tensors beside the event loop, so that messages do not wait for them.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;

use anyhow::Context;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::ids::{ContentHash, Member};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{TensorHeader, TensorTag};
use shoal_protocol::net::transport::TensorMessage;
use tokio::task::JoinSet;

use super::incoming::{self, Unusable};
use super::payload::{Tensor, hash_of};

/// Messages that are unpacked at once, so that a large one delays no other.
const AT_ONCE: usize = 4;

/// Messages that wait at most. A further one is unpacked on the event loop, which slows its sender down.
const WAITING: usize = 256;

/// Tensors from a peer, or the reason not to use them.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) from: Member,
    pub(crate) result: Result<(TensorHeader, Vec<Tensor>), Unusable>,
    /// The hash of an activation or gradient, in a run with audits.
    pub(crate) hash: Option<ContentHash>,
}

/// Unpacks the tensors of messages. They come out in any order, as tensors do from the links, and
/// perhaps after their connection has ended.
#[derive(Debug)]
pub(crate) struct Unpacker {
    manifest: Arc<Manifest>,
    /// Each counts against the bytes that its sender may have in flight.
    waiting: VecDeque<TensorMessage>,
    in_work: JoinSet<Unpacked>,
}

impl Unpacker {
    pub(crate) fn new(manifest: Arc<Manifest>) -> Self {
        Self { manifest, waiting: VecDeque::new(), in_work: JoinSet::new() }
    }

    /// Takes in a message. Returns it at once if no tensor is packed, or too many messages wait.
    pub(crate) fn take(&mut self, message: TensorMessage) -> Option<Unpacked> {
        let mut packings = message.frames.iter().map(|frame| frame.header().packing());
        let is_raw = packings.all(|packing| packing == Packing::Raw);
        // Hashing takes its time too.
        let is_quick = is_raw && !self.manifest.audit.is_on();
        if is_quick || self.waiting.len() >= WAITING {
            return Some(unpack(&message, &self.manifest));
        }
        self.waiting.push_back(message);
        self.start();
        None
    }

    /// Waits for the next message; without end where none is in work. Safe to cancel.
    ///
    /// # Errors
    /// When unpacking panicked.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Unpacked> {
        let Some(unpacked) = self.in_work.join_next().await else { return pending().await };
        self.start();
        unpacked.context("unpacking a tensor panicked")
    }

    /// Drops messages that wait, and waits for those in work.
    pub(crate) async fn close(&mut self) {
        self.waiting.clear();
        while self.in_work.join_next().await.is_some() {}
    }

    fn start(&mut self) {
        while self.in_work.len() < AT_ONCE
            && let Some(message) = self.waiting.pop_front()
        {
            let manifest = self.manifest.clone();
            self.in_work.spawn_blocking(move || unpack(&message, &manifest));
        }
    }
}

fn unpack(message: &TensorMessage, manifest: &Manifest) -> Unpacked {
    let result = incoming::unpack(&message.tag, &message.frames, manifest);
    let hashed = |tag: &TensorTag| manifest.audit.is_on() && tag.input().is_some();
    let hash = match &result {
        Ok((header, tensors)) if hashed(&header.tag) => Some(hash_of(tensors)),
        _ => None,
    };
    Unpacked { from: message.member, result, hash }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use bytes::Bytes;
    use shoal_metrics::Refusal;
    use shoal_protocol::frame::{Element, Frame};
    use shoal_protocol::ids::{ClaimKey, Exchange, Incarnation, Microbatch, PeerId, Stage, Step};
    use shoal_protocol::net::admission::Gate;
    use shoal_protocol::net::identity::Identity;
    use shoal_protocol::net::transport::{
        Class, Congestion, NoFiles, Transport, TransportConfig, TransportEvent,
    };
    use shoal_protocol::wire;
    use shoal_scheduler::sim::Scenario;
    use tokio::sync::mpsc;

    use super::*;

    struct Pair {
        sender: Transport,
        receiver: Transport,
        events: mpsc::Receiver<TransportEvent>,
        /// Keeps the sending transport alive.
        _owner: mpsc::Receiver<TransportEvent>,
    }

    impl Pair {
        async fn connected() -> Self {
            let bind = || {
                let config = TransportConfig {
                    incarnation: Incarnation(1),
                    run: None,
                    congestion: Congestion::default(),
                    files: Arc::new(NoFiles),
                    gate: Gate::default(),
                };
                let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
                Transport::bind(&Identity::ephemeral(), &[loopback], config).expect("a free port")
            };
            let ((sender, _owner), (receiver, events)) = (bind(), bind());
            let at = receiver.local_addresses();
            sender.connect(receiver.peer_id(), &at).await.expect("it listens");
            Self { sender, receiver, events, _owner }
        }

        fn sender(&self) -> PeerId {
            self.sender.peer_id()
        }

        /// Sends a gradient of this microbatch, and returns it as it is received.
        async fn carry(&mut self, microbatch: u32, frame: Frame) -> TensorMessage {
            let key =
                ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(microbatch) };
            let tag = TensorTag::ActivationGradient { key, exchange: Exchange(0) };
            let tag = wire::encode(&TensorHeader::from(tag)).expect("small");
            let to = self.receiver.peer_id();
            let sent = self.sender.send_tensor(to, tag, vec![frame], Class::Gradient);
            sent.expect("under the caps").await;
            loop {
                match self.events.recv().await.expect("the transport lives") {
                    TransportEvent::Tensor(message) => return message,
                    TransportEvent::Connected { .. } => {}
                    other => panic!("no tensor: {other:?}"),
                }
            }
        }
    }

    fn manifest() -> Arc<Manifest> {
        Arc::new(Scenario::small_manifest(2, 1, 1))
    }

    /// Makes a whole gradient of zeros.
    fn zeros(manifest: &Manifest, packing: Packing) -> Frame {
        let shape = manifest.boundary_shape();
        let raw = vec![0; 4 * shape.iter().product::<u32>() as usize];
        Frame::pack(Element::F32, &shape, raw.into(), packing).expect("its shape")
    }

    /// Makes a gradient with a right checksum whose bytes are no zstd, against its header.
    fn damaged(manifest: &Manifest) -> Frame {
        let shape = manifest.boundary_shape();
        let length = 4 * shape.iter().product::<u32>() as usize;
        let noise = (Packing::Zstd, Bytes::from(vec![7; 20]));
        Frame::seal(Element::F32, &shape, length, noise).expect("its shape")
    }

    #[tokio::test]
    async fn a_message_without_packed_tensors_comes_back_at_once() {
        let (manifest, mut pair) = (manifest(), Pair::connected().await);
        let mut unpacker = Unpacker::new(manifest.clone());
        let message = pair.carry(0, zeros(&manifest, Packing::Raw)).await;
        assert!(unpacker.take(message).is_some_and(|unpacked| unpacked.result.is_ok()));
    }

    #[tokio::test]
    async fn each_packed_message_comes_out_once_and_damage_is_its_senders() {
        const MESSAGES: u32 = 3 * AT_ONCE as u32;
        const DAMAGED: u32 = 5;
        let (manifest, mut pair) = (manifest(), Pair::connected().await);
        let mut unpacker = Unpacker::new(manifest.clone());
        for microbatch in 0..MESSAGES {
            let whole = microbatch != DAMAGED;
            let frame = if whole { zeros(&manifest, Packing::Zstd) } else { damaged(&manifest) };
            assert!(unpacker.take(pair.carry(microbatch, frame).await).is_none());
            assert!(unpacker.in_work.len() <= AT_ONCE);
        }
        let mut good = Vec::new();
        let mut refused = Vec::new();
        for _ in 0..MESSAGES {
            let Unpacked { from, result, .. } = unpacker.next().await.expect("no panic");
            assert_eq!(from.peer, pair.sender());
            match result {
                Ok((
                    TensorHeader { tag: TensorTag::ActivationGradient { key, .. }, .. },
                    tensors,
                )) => {
                    assert!(tensors[0].bytes.iter().all(|byte| *byte == 0));
                    good.push(key.microbatch.0);
                }
                Ok((other, _)) => panic!("another tag: {other:?}"),
                Err(error) => refused.push((error.refusal(), error.is_violation())),
            }
        }
        good.sort_unstable();
        let whole: Vec<u32> = (0..MESSAGES).filter(|number| *number != DAMAGED).collect();
        assert_eq!(good, whole);
        assert_eq!(refused, [(Refusal::Malformed, true)]);
    }

    #[tokio::test]
    async fn closing_leaves_nothing_behind() {
        let (manifest, mut pair) = (manifest(), Pair::connected().await);
        let mut unpacker = Unpacker::new(manifest.clone());
        for microbatch in 0..2 * AT_ONCE as u32 {
            let message = pair.carry(microbatch, zeros(&manifest, Packing::Zstd)).await;
            assert!(unpacker.take(message).is_none());
        }
        unpacker.close().await;
        assert!(unpacker.waiting.is_empty() && unpacker.in_work.is_empty());
    }
}
