//! Messages and tensors that leave this process over the links.

use std::sync::Arc;

use anyhow::Context;
use shoal_metrics::Metrics;
use shoal_protocol::ids::Member;
use shoal_protocol::message::{Envelope, Message, Recalled, TensorHeader, TensorTag};
use shoal_protocol::net::transport::{Class, Transport};
use shoal_protocol::wire;

use super::background_results::BackgroundResult;
use super::effect::Stamp;
use super::engine_thread::LOG_LOST;
use super::packer::{Packer, PackingMode};
use super::payload::{Held, Tensors};
use super::peer_names::PeerNames;

/// Sends to other peers.
#[derive(Clone)]
pub(super) struct Links {
    transport: Transport,
    packer: Arc<Packer>,
    names: PeerNames,
}

impl Links {
    pub(super) fn new(
        transport: Transport,
        packing: PackingMode,
        metrics: Metrics,
        names: PeerNames,
    ) -> Self {
        Self { transport, packer: Arc::new(Packer::new(packing, metrics)), names }
    }

    pub(super) fn transport(&self) -> &Transport {
        &self.transport
    }

    /// Queues a control message.
    pub(super) fn send(&self, me: Member, to: Member, stamp: Stamp, message: Message) {
        let Stamp { era, term } = stamp;
        let envelope = Envelope { from: me.incarnation, to: to.incarnation, era, term, message };
        let bytes = wire::encode(&envelope).expect("control messages are kept under their cap");
        if let Err(error) = self.transport.send_control(to.peer, bytes) {
            // A full queue breaks the connection, which is reported as an event of its own.
            tracing::warn!(peer = self.names.member(to), %error, "a control message was not sent");
        }
    }

    /// Sends tensors, which may wait for room in the receiver's queue. The scheduler bounds the
    /// bytes in flight. The result is a logged tensor that the disk did not give back, if any.
    pub(super) fn send_tensors(
        &self,
        to: Member,
        header: TensorHeader,
        held: Held,
    ) -> impl Future<Output = Option<BackgroundResult>> + Send + use<> {
        let links = self.clone();
        async move {
            let tensors = match load(held).await {
                Ok(tensors) => tensors,
                Err(error) => return Some(BackgroundResult::LogLost(error)),
            };
            if let Err(error) = links.deliver(to, header, &tensors).await {
                tracing::warn!(peer = links.names.member(to), %error, "a tensor was not sent");
            }
            None
        }
    }

    async fn deliver(
        &self,
        to: Member,
        header: TensorHeader,
        tensors: &Tensors,
    ) -> anyhow::Result<()> {
        let tag = header.tag;
        let rate = self.transport.link_rate_to(to.peer);
        let frames = self.packer.frames(&tag, tensors, rate).await?;
        let class = match tag {
            TensorTag::Activation { .. }
            | TensorTag::Recalled { input: Recalled::Activation, .. } => Class::Activation,
            TensorTag::ActivationGradient { .. }
            | TensorTag::Recalled { input: Recalled::Gradient, .. } => Class::Gradient,
            TensorTag::RoundPart { .. } | TensorTag::RoundResult { .. } => Class::Round,
        };
        self.transport.send_tensor(to.peer, wire::encode(&header)?, frames, class)?.await;
        Ok(())
    }
}

/// Reads tensors from the disk on a thread that may block.
async fn load(held: Held) -> anyhow::Result<Tensors> {
    match held {
        Held::Memory(tensors) => Ok(tensors),
        Held::Disk(_) => {
            let read = tokio::task::spawn_blocking(move || held.load()).await;
            read.context("reading the output log panicked")?.context(LOG_LOST)
        }
    }
}
