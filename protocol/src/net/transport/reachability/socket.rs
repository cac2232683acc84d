//! A UDP socket that receives probes, and passes all other packets to QUIC.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::task::{Context, Poll, ready};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::sync::watch;

use super::wire::{Nonce, PROBE, Probe};

/// Maximum number of simultaneous probe requests.
const OPEN: usize = 8;

/// Maximum number of ports recorded per request.
const PORTS: usize = 2;

/// The expected probes, at all of a transport's sockets.
#[derive(Debug, Default)]
pub(in super::super) struct Probes(Mutex<BTreeMap<Nonce, watch::Sender<BTreeSet<u16>>>>);

impl Probes {
    fn open(&self) -> MutexGuard<'_, BTreeMap<Nonce, watch::Sender<BTreeSet<u16>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expects probes with this nonce until the result is dropped; `None` if there are too many.
    pub(super) fn listen(&self, nonce: Nonce) -> Option<ReceivedProbes<'_>> {
        let mut open = self.open();
        if open.len() >= OPEN || open.contains_key(&nonce) {
            return None;
        }
        let (sender, ports) = watch::channel(BTreeSet::new());
        open.insert(nonce, sender);
        Some(ReceivedProbes { probes: self, nonce, ports })
    }

    fn record(&self, Probe { nonce, port }: Probe) {
        if let Some(sender) = self.open().get(&nonce) {
            sender.send_if_modified(|ports| ports.len() < PORTS && ports.insert(port));
        }
    }
}

/// The received probes of one request.
pub(super) struct ReceivedProbes<'a> {
    probes: &'a Probes,
    nonce: Nonce,
    ports: watch::Receiver<BTreeSet<u16>>,
}

impl ReceivedProbes<'_> {
    /// Waits for a probe at this port.
    pub(super) async fn at(&mut self, port: u16) {
        // The sender lives as long as `self`.
        let _ = self.ports.wait_for(|ports| ports.contains(&port)).await;
    }

    /// The ports at which probes arrived.
    pub(super) fn ports(&self) -> BTreeSet<u16> {
        self.ports.borrow().clone()
    }
}

impl Drop for ReceivedProbes<'_> {
    fn drop(&mut self) {
        self.probes.open().remove(&self.nonce);
    }
}

/// The socket of the system below, as all of QUIC's tasks share it.
type SystemSocket = Arc<dyn AsyncUdpSocket>;

/// A UDP socket that receives probes, and can be released while connections still have it: a connection that ends
/// on a slow or broken path keeps its socket for several timeouts.
pub(in super::super) struct ProbeSocket {
    address: SocketAddr,
    /// `None` once it is released. Then every packet is lost.
    socket: RwLock<Option<SystemSocket>>,
    probes: Arc<Probes>,
}

impl ProbeSocket {
    /// Wraps a socket.
    ///
    /// # Errors
    /// If the socket has no address.
    pub(in super::super) fn new(socket: SystemSocket, probes: Arc<Probes>) -> io::Result<Self> {
        let address = socket.local_addr()?;
        Ok(Self { address, socket: RwLock::new(Some(socket)), probes })
    }

    /// Gives the port back to the system, whoever still has this value.
    pub(in super::super) fn release(&self) {
        self.socket.write().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn system(&self) -> RwLockReadGuard<'_, Option<SystemSocket>> {
        self.socket.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes probes from the received packets. The kernel may have joined several.
    fn take_probes(&self, buffer: &[u8], meta: &mut RecvMeta) {
        let whole = meta.stride == PROBE || meta.len == PROBE;
        let Some(bytes) = buffer.get(..meta.len).filter(|_| whole) else { return };
        if Probe::decode(&bytes[..PROBE.min(bytes.len())]).is_none() {
            return;
        }
        bytes.chunks(PROBE).filter_map(Probe::decode).for_each(|probe| self.probes.record(probe));
        // QUIC ignores an empty packet.
        meta.len = 0;
    }
}

impl fmt::Debug for ProbeSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeSocket").field("address", &self.address).finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for ProbeSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.system().as_ref().map_or(Ok(()), |socket| socket.try_send(transmit))
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let system = self.system();
        let Some(socket) = system.as_ref() else { return Poll::Pending };
        let count = ready!(socket.poll_recv(context, buffers, meta))?;
        for (buffer, meta) in buffers.iter().zip(meta.iter_mut()).take(count) {
            self.take_probes(buffer, meta);
        }
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }

    fn max_transmit_segments(&self) -> usize {
        self.system().as_ref().map_or(1, |socket| socket.max_transmit_segments())
    }

    fn max_receive_segments(&self) -> usize {
        self.system().as_ref().map_or(1, |socket| socket.max_receive_segments())
    }

    fn may_fragment(&self) -> bool {
        self.system().as_ref().is_none_or(|socket| socket.may_fragment())
    }
}

/// Waits for room in a socket. It has a share of the system's socket only while it waits.
#[derive(Debug)]
struct Writable {
    socket: Arc<ProbeSocket>,
    waiting: Option<Pin<Box<dyn UdpPoller>>>,
}

impl UdpPoller for Writable {
    fn poll_writable(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let poller = match &mut this.waiting {
            Some(poller) => poller,
            None => {
                let system = this.socket.system().clone();
                let Some(system) = system else { return Poll::Ready(Ok(())) };
                this.waiting.insert(system.create_io_poller())
            }
        };
        let writable = ready!(poller.as_mut().poll_writable(context));
        this.waiting = None;
        Poll::Ready(writable)
    }
}
