//! What goes out over the links.

use std::sync::Arc;

use anyhow::Context;
use shoal_metrics::Metrics;
use shoal_protocol::ids::{Era, Member, Term};
use shoal_protocol::message::{Envelope, Message, TensorTag};
use shoal_protocol::net::transport::{Class, Transport, TransportEvent};
use shoal_protocol::wire;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::Gathered;
use super::engine_thread::LOG_LOST;
use super::packer::Packer;
use super::payload::{Held, Tensors};
use super::setup::Network;

/// The links to other peers.
#[derive(Clone)]
pub(crate) struct Links {
    pub(crate) transport: Transport,
    /// Owns sends that wait for room in a peer's queue. What may be on its way is bounded by what
    /// the scheduler lets be in flight.
    pub(crate) tracker: TaskTracker,
    packer: Arc<Packer>,
}

impl Links {
    /// The links of a peer that is not alone, and what happens on them.
    pub(crate) fn of(
        network: Option<Network>,
        tracker: &TaskTracker,
        metrics: Metrics,
    ) -> (Option<Self>, Option<mpsc::Receiver<TransportEvent>>) {
        let Some(Network { transport, events, packing, .. }) = network else {
            return (None, None);
        };
        let packer = Arc::new(Packer::new(packing, metrics));
        (Some(Self { transport, tracker: tracker.clone(), packer }), Some(events))
    }

    /// Queues a control message.
    pub(crate) fn send(&self, me: Member, to: Member, era: Era, term: Term, message: Message) {
        let envelope = Envelope { from: me.incarnation, to: to.incarnation, era, term, message };
        let bytes = wire::encode(&envelope).expect("control messages are kept under their cap");
        if let Err(error) = self.transport.send_control(to.peer, bytes) {
            // A full queue breaks the connection, which is reported as an event of its own.
            tracing::warn!(peer = %to, %error, "a control message was not sent");
        }
    }

    /// Queues tensors; `gathered` hears of those that the disk does not give back.
    pub(crate) fn send_tensors(
        &self,
        to: Member,
        tag: TensorTag,
        held: Held,
        gathered: &mpsc::Sender<Gathered>,
    ) {
        let (links, gathered) = (self.clone(), gathered.clone());
        self.tracker.spawn(async move {
            let tensors = match load(held).await {
                Ok(tensors) => tensors,
                Err(error) => {
                    // Nobody listens any more when the process is about to end.
                    let _ = gathered.send(Gathered::LogLost(error)).await;
                    return;
                }
            };
            if let Err(error) = links.deliver(to, tag, &tensors).await {
                tracing::warn!(peer = %to, %error, "a tensor was not sent");
            }
        });
    }

    async fn deliver(&self, to: Member, tag: TensorTag, tensors: &Tensors) -> anyhow::Result<()> {
        let rate = self.transport.link_rate_to(to.peer);
        let frames = self.packer.frames(&tag, tensors, rate).await?;
        let class = match tag {
            TensorTag::Activation { .. } => Class::Activation,
            TensorTag::ActivationGradient { .. } => Class::Gradient,
            TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => Class::Round,
        };
        self.transport.send_tensor(to.peer, wire::encode(&tag)?, frames, class)?.await;
        Ok(())
    }
}

/// What is on the disk is read where waiting for it holds nobody up.
async fn load(held: Held) -> anyhow::Result<Tensors> {
    match held {
        Held::Memory(tensors) => Ok(tensors),
        Held::Disk(_) => {
            let read = tokio::task::spawn_blocking(move || held.load()).await;
            read.context("reading the output log panicked")?.context(LOG_LOST)
        }
    }
}
