//! UDP sockets, and the QUIC parameters on them.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use quinn::congestion::{BbrConfig, ControllerFactory, CubicConfig};
use quinn::crypto::{CryptoError, HmacKey};
use quinn::{
    Connection, Endpoint, EndpointConfig, MtuDiscoveryConfig, Runtime, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
};
use quinn_proto::HashedConnectionIdGenerator;
use socket2::{Domain, Protocol, Socket, Type};

use super::class::{QUEUES, TENSOR_STREAMS};
use super::congestion::TolerantConfig;
use super::error::TransportError;
use super::reachability::socket::{ProbeSocket, Probes};
use super::relay::Relay;
use super::sending::LANES;
use super::tensor::{FRAMES, PART, PREFIX, TAG};
use super::tls::Tls;
use crate::frame::HEADER;
use crate::limits;
use crate::net::identity::Identity;
use crate::units::Bytes;

/// The congestion control of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Congestion {
    /// Backs off when queues fill up; tolerates random loss.
    #[default]
    Tolerant,
    /// Backs off on every loss (RFC 9438).
    Cubic,
    /// Follows the measured bandwidth; retransmits much.
    Bbr,
}

/// Maximum UDP payload. QUIC's cost is per packet. Segmentation offload passes ten packets to the
/// kernel at once, and ten of this size still fit into the 64 KiB of one call.
const LARGEST_PACKET: u16 = 6500;

/// Requested size of the kernel's socket buffers in bytes.
const SOCKET_BUFFER: usize = 4 << 20;

/// Receive window of a stream. A stream with more than 2.75 MiB in flight breaks the connection at
/// a bottleneck that drops every other packet, because the receiver tracks at most 1024 gaps.
/// Larger messages use several streams ([`super::tensor::PART`]).
const STREAM_WINDOW: u32 = 5 << 19;
const _: () = assert!(PART + PREFIX + TAG + FRAMES * HEADER <= STREAM_WINDOW as usize);

/// Bytes in flight on all streams: a round trip of 500 ms at 1 Gbit/s, or of 50 ms at 10 Gbit/s. A
/// sender whose bytes are not read yet can use this much memory. Data that is being read uses
/// further memory: [`limits::RECEIVE_ROOM`], or one message of the run's largest size.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Bytes sent before the first acknowledgement.
const INITIAL_WINDOW: u64 = 1 << 20;

/// Bytes in flight on all streams of a guest's connection (`guests`).
pub(super) const GUEST_WINDOW: u32 = 64 << 10;

/// Streams with tensors that a guest may have open: its tensors are taken only as a courtesy to members that
/// this peer has yet to hear of.
const GUEST_STREAMS: u32 = 4;

const UNI_STREAMS: usize = QUEUES * TENSOR_STREAMS + LANES;

/// Maximum number of request streams, and the control stream.
const REQUEST_STREAMS: u32 = 16;

/// Bytes of relayed packets queued on a connection; more are dropped.
const RELAYED: usize = 1 << 20;

/// Maximum number of handshakes that wait to be accepted.
const INCOMING: usize = 256;

/// Opens a UDP socket, and a QUIC endpoint on it. The endpoint's owner releases the socket.
pub(super) fn bind(
    address: SocketAddr,
    identity: &Identity,
    tls: &Tls,
    quic: &Arc<TransportConfig>,
    probes: &Arc<Probes>,
) -> Result<(Endpoint, Arc<ProbeSocket>), TransportError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => TransportError::AddressInUse { address },
        _ => TransportError::Bind { address, source },
    };
    let socket = open_socket(address).map_err(failed)?;
    let socket = TokioRuntime.wrap_udp_socket(socket).map_err(failed)?;
    let socket = Arc::new(ProbeSocket::new(socket, probes.clone()).map_err(failed)?);
    let (config, server) = (endpoint_config(identity), server(tls, quic));
    let runtime = Arc::new(TokioRuntime);
    let endpoint =
        Endpoint::new_with_abstract_socket(config, Some(server), socket.clone(), runtime);
    Ok((endpoint.map_err(failed)?, socket))
}

/// Opens a QUIC endpoint on the relay.
pub(super) fn over(
    relay: Arc<Relay>,
    identity: &Identity,
    tls: &Tls,
    quic: &Arc<TransportConfig>,
) -> Result<Endpoint, TransportError> {
    let (config, server) = (endpoint_config(identity), server(tls, quic));
    Endpoint::new_with_abstract_socket(config, Some(server), relay, Arc::new(TokioRuntime))
        .map_err(TransportError::Relay)
}

fn server(tls: &Tls, quic: &Arc<TransportConfig>) -> ServerConfig {
    let mut server = ServerConfig::with_crypto(tls.server());
    server.transport_config(quic.clone()).max_incoming(INCOMING);
    server
}

fn open_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        // IPv4 uses its own socket.
        socket.set_only_v6(true)?;
    }
    // The kernel may grant smaller buffers; bursts then lose packets.
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    let (receive, send) = (socket.recv_buffer_size()?, socket.send_buffer_size()?);
    let bytes = |count: usize| Bytes(count as u64);
    tracing::debug!(%address, receive = %bytes(receive), send = %bytes(send), "UDP socket buffers");
    if receive.min(send) < SOCKET_BUFFER {
        tracing::info!(
            receive = %bytes(receive),
            send = %bytes(send),
            wanted = SOCKET_BUFFER,
            "small UDP socket buffers lose packets in bursts: sysctl -w net.core.rmem_max=N net.core.wmem_max=N"
        );
    }
    Ok(socket.into())
}

/// A process that restarts on the same socket recognises the connections of its former incarnation
/// by their ids, and resets them at the other ends at once.
fn endpoint_config(identity: &Identity) -> EndpointConfig {
    let mut config = EndpointConfig::new(Arc::new(ResetKey(identity.derive_secret("quic reset"))));
    let secret = identity.derive_secret("quic connection id");
    let key = u64::from_le_bytes(*secret.first_chunk().expect("32 bytes"));
    config.cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(key)));
    config.max_udp_payload_size(LARGEST_PACKET).expect("more than the smallest allowed");
    config
}

/// The key of the tokens that reset lost connections.
struct ResetKey([u8; 32]);

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        signature_out.copy_from_slice(blake3::keyed_hash(&self.0, data).as_bytes());
    }

    fn signature_len(&self) -> usize {
        blake3::OUT_LEN
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        // The comparison of hashes takes constant time.
        let signature = blake3::Hash::from_slice(signature).map_err(|_| CryptoError)?;
        if blake3::keyed_hash(&self.0, data) == signature { Ok(()) } else { Err(CryptoError) }
    }
}

/// The parameters of connections that others dial, who are guests until they are known to be members.
pub(super) fn of_guests(mut config: TransportConfig) -> TransportConfig {
    config
        .receive_window(VarInt::from_u32(GUEST_WINDOW))
        .max_concurrent_uni_streams(VarInt::from_u32(GUEST_STREAMS));
    config
}

/// Gives a connection the room of a member.
pub(super) fn entitle(connection: &Connection) {
    connection.set_receive_window(VarInt::from_u32(CONNECTION_WINDOW));
    connection.set_max_concurrent_uni_streams(VarInt::from_u32(UNI_STREAMS as u32));
}

/// Leaves a connection the room of a guest.
pub(super) fn restrict(connection: &Connection) {
    connection.set_receive_window(VarInt::from_u32(GUEST_WINDOW));
}

/// The parameters of relayed connections, which carry no relayed packets themselves.
pub(super) fn relayed(congestion: Congestion) -> TransportConfig {
    let mut config = quic(congestion);
    config.datagram_receive_buffer_size(None);
    config
}

/// The parameters of direct connections.
pub(super) fn quic(congestion: Congestion) -> TransportConfig {
    let mut mtu = MtuDiscoveryConfig::default();
    // The MTU is found within a few round trips on loopback and networks with jumbo frames.
    // Elsewhere, the search costs a few lost probe packets.
    mtu.upper_bound(LARGEST_PACKET);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW))
        .send_window(u64::from(CONNECTION_WINDOW))
        .max_concurrent_uni_streams(VarInt::from_u32(UNI_STREAMS as u32))
        .max_concurrent_bidi_streams(VarInt::from_u32(REQUEST_STREAMS))
        .datagram_receive_buffer_size(Some(RELAYED))
        .datagram_send_buffer_size(RELAYED)
        .max_idle_timeout(Some(
            limits::LOSSY_CONNECTION_TIMEOUT.try_into().expect("a timeout of seconds"),
        ))
        .keep_alive_interval(Some(limits::CONNECTION_TIMEOUT / 3))
        .mtu_discovery_config(Some(mtu))
        .congestion_controller_factory(controller(congestion));
    config
}

fn controller(congestion: Congestion) -> Arc<dyn ControllerFactory + Send + Sync> {
    match congestion {
        Congestion::Tolerant => Arc::new(TolerantConfig { initial_window: INITIAL_WINDOW }),
        Congestion::Cubic => {
            let mut config = CubicConfig::default();
            config.initial_window(INITIAL_WINDOW);
            Arc::new(config)
        }
        Congestion::Bbr => {
            let mut config = BbrConfig::default();
            config.initial_window(INITIAL_WINDOW);
            Arc::new(config)
        }
    }
}

/// The socket to dial `address` from: of the same address family, and on loopback only if the
/// address is.
pub(super) fn route(endpoints: &[Endpoint], address: SocketAddr) -> Option<&Endpoint> {
    let suits = |endpoint: &&Endpoint| {
        endpoint.local_addr().is_ok_and(|local| {
            local.is_ipv4() == address.is_ipv4()
                && (!local.ip().is_loopback() || address.ip().is_loopback())
        })
    };
    endpoints.iter().find(suits)
}
