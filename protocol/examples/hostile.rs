//! Attacks a peer as strangers would; `make bench-hostile` runs it against a run.
//!
//!     hostile PEER ADDRESS CONNECTIONS PER_SECOND
//!
//! Until its input ends, it holds `CONNECTIONS` TCP connections, silent or with an occasional byte,
//! and reopens closed ones. It sends datagrams that resemble the first packet of a connection. It
//! also connects properly as a peer that was not invited. It does each of these `PER_SECOND` times
//! per second. Finally it prints the counts as JSON.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::{Congestion, ConnectError, NoFiles, Transport};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use common::{bind, take_until_input_ends};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Time between two bytes on a slow connection.
const DRIP: Duration = Duration::from_secs(3);

/// Counters of the attacks.
#[derive(Default)]
struct Tally {
    opened: AtomicU64,
    dropped: AtomicU64,
    datagrams: AtomicU64,
    greetings: AtomicU64,
    refused: AtomicU64,
}

impl Tally {
    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [peer, address, connections, rate] = &arguments[..] else {
        return Err("unknown arguments: see the beginning of the source".into());
    };
    let (peer, address): (PeerId, SocketAddr) = (peer.parse()?, address.parse()?);
    let (connections, rate): (u64, u32) = (connections.parse()?, rate.parse()?);
    let (tally, stop, tracker) =
        (Arc::new(Tally::default()), CancellationToken::new(), TaskTracker::new());
    let pause = Duration::from_secs(1) / rate;
    let anywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let (transport, events) = bind(anywhere, Congestion::Cubic, Arc::new(NoFiles))?;
    let until_end = || stop.clone();
    let held = hold_connections(address, connections, pause, tally.clone());
    tracker.spawn(until_end().run_until_cancelled_owned(held));
    tracker.spawn(until_end().run_until_cancelled_owned(noise(address, pause, tally.clone())));
    let greets = connect_uninvited(transport.clone(), (peer, address), pause, tally.clone());
    tracker.spawn(until_end().run_until_cancelled_owned(greets));
    tracker.close();
    take_until_input_ends(&transport, events).await;
    stop.cancel();
    tracker.wait().await;
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        r#"{{"opened":{},"dropped":{},"datagrams":{},"greetings":{},"refused":{}}}"#,
        read(&tally.opened),
        read(&tally.dropped),
        read(&tally.datagrams),
        read(&tally.greetings),
        read(&tally.refused)
    );
    Ok(())
}

/// Ticks at this interval, also after a late tick: handshakes must not accumulate.
fn evenly(pause: Duration) -> Interval {
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Holds this many TCP connections open.
async fn hold_connections(
    address: SocketAddr,
    connections: u64,
    pause: Duration,
    tally: Arc<Tally>,
) {
    let tracker = TaskTracker::new();
    let mut ticks = interval(pause);
    loop {
        ticks.tick().await;
        if tracker.len() as u64 >= connections {
            continue;
        }
        let Ok(mut stream) = TcpStream::connect(address).await else { continue };
        Tally::count(&tally.opened);
        let tally = tally.clone();
        tracker.spawn(async move {
            let mut end = [0; 1024];
            // The other end does not send first: whatever arrives is the end.
            loop {
                tokio::select! {
                    read = tokio::io::AsyncReadExt::read(&mut stream, &mut end) => match read {
                        Ok(1..) => {}
                        _ => break,
                    },
                    () = tokio::time::sleep(DRIP) => if stream.write_all(&[0x13]).await.is_err() { break },
                }
            }
            Tally::count(&tally.dropped);
        });
    }
}

/// Sends datagrams with the header of QUIC's first packet and random content.
async fn noise(address: SocketAddr, pause: Duration, tally: Arc<Tally>) {
    let Ok(socket) = UdpSocket::bind(("0.0.0.0", 0)).await else { return };
    let mut packet = [0x5a; 1200];
    // A long header of version 1, with two connection ids of eight bytes.
    packet[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
    packet[14] = 8;
    packet[23] = 0;
    packet[24..26].copy_from_slice(&[0x44, 0x80]);
    let mut ticks = interval(pause);
    loop {
        ticks.tick().await;
        let number = tally.datagrams.load(Ordering::Relaxed).to_le_bytes();
        packet[6..14].copy_from_slice(&number);
        if socket.send_to(&packet, address).await.is_ok() {
            Tally::count(&tally.datagrams);
        }
    }
}

/// Connects as a peer without credentials.
async fn connect_uninvited(
    transport: Transport,
    (peer, address): (PeerId, SocketAddr),
    pause: Duration,
    tally: Arc<Tally>,
) {
    let mut ticks = evenly(pause);
    loop {
        ticks.tick().await;
        let greeted = transport.connect(peer, &[address]).await;
        if greeted == Err(ConnectError::Closing) {
            return;
        }
        Tally::count(&tally.greetings);
        if greeted.is_err() {
            Tally::count(&tally.refused);
        }
    }
}
