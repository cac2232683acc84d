//! Strangers at a peer's door: what `make bench-hostile` has a run go through.
//!
//!     hostile PEER ADDRESS CONNECTIONS PER_SECOND
//!
//! Until its input ends it holds so many TCP connections on which it says nothing, or one byte now and then, and
//! opens again what was closed; sends datagrams that look like the first of a connection; and greets properly as
//! a peer that nobody has invited. Per second it does each of these so often. Then it prints, as JSON, what it
//! came to.

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

/// From one byte to the next, on a connection that drips.
const DRIP: Duration = Duration::from_secs(3);

/// What was done so far.
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
        return Err("see the beginning of the source for what can be asked".into());
    };
    let (peer, address): (PeerId, SocketAddr) = (peer.parse()?, address.parse()?);
    let (connections, rate): (u64, u32) = (connections.parse()?, rate.parse()?);
    let (tally, stop, tracker) =
        (Arc::new(Tally::default()), CancellationToken::new(), TaskTracker::new());
    let pause = Duration::from_secs(1) / rate;
    let anywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let (transport, events) = bind(anywhere, Congestion::Cubic, Arc::new(NoFiles))?;
    let until_end = || stop.clone();
    let held = connection_limits(address, connections, pause, tally.clone());
    tracker.spawn(until_end().run_until_cancelled_owned(held));
    tracker.spawn(until_end().run_until_cancelled_owned(noise(address, pause, tally.clone())));
    let greets = knock(transport.clone(), (peer, address), pause, tally.clone());
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

/// So often and no more, also after something took long: greetings that nobody waits for are none.
fn evenly(pause: Duration) -> Interval {
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Keeps so many TCP connections open.
async fn connection_limits(
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
            // The other end speaks first to nobody: whatever comes is the end.
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

/// Sends datagrams with the head of a first packet of QUIC and nothing in it that can be read.
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

/// Greets as a peer that has nothing to show.
async fn knock(
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
