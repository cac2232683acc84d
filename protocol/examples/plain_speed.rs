//! Measures libraries alone over loopback, for comparison with `transport_speed loopback`: quinn
//! with the same packets, windows and cipher, or TLS over TCP.
//!
//!     plain_speed quinn [MIB] [PIECE_MIB]
//!     plain_speed tls [MIB] [PIECE_MIB]
//!
//! Nothing is checked or stored: the receiver counts bytes. Both ends run in this process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, MtuDiscoveryConfig, TokioRuntime, TransportConfig, VarInt};
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use socket2::{Domain, Socket, Type};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The parameters of the transport.
const LARGEST_PACKET: u16 = 6500;
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;
const SOCKET_BUFFER: usize = 4 << 20;

/// Messages in flight at once.
const STREAMS: usize = 8;

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, other: usize| -> Result<usize> {
        Ok(arguments.get(index).map_or(Ok(other), |number| number.parse())?)
    };
    let (total, piece) = (number(1, 2048)?, number(2, 2)?);
    let start = Instant::now();
    match arguments.first().map(String::as_str) {
        Some("quinn") => {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(2).enable_all().build()?;
            runtime.block_on(quinn_alone(total / piece, piece << 20))?;
        }
        Some("tls") => tls_over_tcp(total / piece, piece << 20)?,
        _ => return Err("unknown arguments: expected quinn or tls".into()),
    }
    let megabytes = ((total / piece * piece) << 20) as f64 / 1e6;
    let seconds = start.elapsed().as_secs_f64();
    println!("{megabytes:.0} MB in pieces of {piece} MiB: {:.0} MB/s", megabytes / seconds);
    Ok(())
}

/// The configurations of both ends, with AES-128-GCM, which the transport prefers.
fn tls() -> Result<(ServerConfig, ClientConfig)> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let certificate: CertificateDer<'static> = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.key_pair.serialize_der())?;
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone())?;
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![cipher_suite::TLS13_AES_128_GCM_SHA256];
    let provider = Arc::new(provider);
    let versions = [&rustls::version::TLS13];
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions)?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok((server, client))
}

fn transport() -> Arc<TransportConfig> {
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(LARGEST_PACKET);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW))
        .send_window(u64::from(CONNECTION_WINDOW))
        .mtu_discovery_config(Some(mtu));
    Arc::new(config)
}

fn endpoint(server: Option<quinn::ServerConfig>) -> Result<Endpoint> {
    let address = SocketAddr::from(LOOPBACK);
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.bind(&address.into())?;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(LARGEST_PACKET)?;
    Ok(Endpoint::new(config, server, socket.into(), Arc::new(TokioRuntime))?)
}

async fn quinn_alone(messages: usize, bytes: usize) -> Result<()> {
    let (server, client) = tls()?;
    let server = QuicServerConfig::try_from(server)?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(server));
    server.transport_config(transport());
    let receiver = endpoint(Some(server))?;
    let sender = endpoint(None)?;
    let mut client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?));
    client.transport_config(transport());
    let dial = sender.connect_with(client, receiver.local_addr()?, "localhost")?;
    let answer = async { Ok(receiver.accept().await.ok_or("no connection arrived")?.await?) };
    let (out, into): (quinn::Connection, quinn::Connection) =
        tokio::try_join!(async { Result::Ok(dial.await?) }, answer)?;
    let body = Bytes::from(vec![1; bytes]);
    let mut sends = tokio::task::JoinSet::new();
    for first in 0..STREAMS {
        let (out, body) = (out.clone(), body.clone());
        sends.spawn(async move {
            for _ in (first..messages).step_by(STREAMS) {
                let mut stream = out.open_uni().await?;
                stream.write_chunk(body.clone()).await?;
                stream.finish()?;
                stream.stopped().await?;
            }
            Result::Ok(())
        });
    }
    let mut reads = tokio::task::JoinSet::new();
    for _ in 0..messages {
        let mut stream = into.accept_uni().await?;
        reads.spawn(async move {
            let mut count = 0;
            while let Some(chunk) = stream.read_chunk(usize::MAX, true).await? {
                count += chunk.bytes.len();
            }
            Result::Ok(count)
        });
    }
    let mut received = 0;
    while let Some(count) = reads.join_next().await {
        received += count??;
    }
    while let Some(sent) = sends.join_next().await {
        sent??;
    }
    assert_eq!(received, messages * bytes, "all bytes arrive");
    Ok(())
}

fn tls_over_tcp(messages: usize, bytes: usize) -> Result<()> {
    let (server, client) = tls()?;
    let listener = TcpListener::bind(SocketAddr::from(LOOPBACK))?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> Result<()> {
        let name = ServerName::try_from("localhost")?;
        let connection = ClientConnection::new(Arc::new(client), name)?;
        let mut stream = rustls::StreamOwned::new(connection, TcpStream::connect(address)?);
        let body = vec![1; bytes];
        for _ in 0..messages {
            stream.write_all(&body)?;
        }
        stream.conn.send_close_notify();
        stream.flush()?;
        // Unread data from the other end would reset the connection on close.
        stream.read_to_end(&mut Vec::new())?;
        Ok(())
    });
    let (socket, _) = listener.accept()?;
    let mut stream = rustls::StreamOwned::new(ServerConnection::new(Arc::new(server))?, socket);
    let (mut buffer, mut received) = (vec![0; 1 << 18], 0);
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            count => received += count,
        }
    }
    stream.conn.send_close_notify();
    stream.flush()?;
    drop(stream);
    sender.join().map_err(|_| "the sender panicked")??;
    assert_eq!(received, messages * bytes, "all bytes arrive");
    Ok(())
}
