//! Measures the sending of tensors from one peer to another.
//!
//!     transport_speed loopback [MIB] [PIECE_MIB]
//!     transport_speed receive ADDRESS
//!     transport_speed send PEER ADDRESS CONGESTION SECONDS [KIB]
//!
//! On loopback both ends run in this process, and the processor time is that of both. Between
//! machines, the receiver prints its id and ends when its input does; the sender prints JSON.
//! Messages of 32,768 KiB fill the room of a class, so each is sent alone, after the previous one
//! has arrived.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame};
use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::{Class, Congestion, NoFiles, TransportEvent};
use tokio::time::sleep;

use common::{bind, take_until_input_ends};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Warm-up in which the congestion control finds the rate; not measured.
const SETTLING: Duration = Duration::from_secs(3);

/// Default size of a message over a link. Messages on all streams together fill a long link. The
/// measurement is accurate to a few of these sizes times the number of streams.
const PIECE_KIB: usize = 256;

fn main() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["receive", address] => runtime.block_on(receive(address.parse()?)),
        ["send", peer, address, congestion, seconds, ref size @ ..] => {
            let congestion = congestion_of(congestion)?;
            let seconds = Duration::from_secs_f64(seconds.parse()?);
            let kibi = match size {
                [] => PIECE_KIB,
                [kibi] => kibi.parse()?,
                _ => return Err("one size at most".into()),
            };
            let frame = piece(kibi << 10)?;
            runtime.block_on(send(peer.parse()?, address.parse()?, congestion, seconds, frame))
        }
        ["loopback"] => runtime.block_on(measure(2048, 8)),
        ["loopback", total] => runtime.block_on(measure(total.parse()?, 8)),
        ["loopback", total, piece] => runtime.block_on(measure(total.parse()?, piece.parse()?)),
        _ => Err("unknown arguments: see the beginning of the source".into()),
    }
}

fn congestion_of(name: &str) -> Result<Congestion> {
    match name {
        "tolerant" => Ok(Congestion::Tolerant),
        "cubic" => Ok(Congestion::Cubic),
        "bbr" => Ok(Congestion::Bbr),
        other => Err(format!("no congestion control is called {other}").into()),
    }
}

/// Receives and discards messages.
async fn receive(address: SocketAddr) -> Result<()> {
    let (transport, events) = bind(address, Congestion::default(), Arc::new(NoFiles))?;
    println!("{}", transport.peer_id());
    take_until_input_ends(&transport, events).await;
    Ok(())
}

/// Sends for this long, and prints the throughput after the warm-up. Messages that have left the
/// queue are acknowledged.
async fn send(
    peer: PeerId,
    address: SocketAddr,
    congestion: Congestion,
    seconds: Duration,
    frame: Frame,
) -> Result<()> {
    let local = SocketAddr::from(([0, 0, 0, 0], 0));
    let (transport, _events) = bind(local, congestion, Arc::new(NoFiles))?;
    transport.connect(peer, &[address]).await?;
    let push = async {
        loop {
            let frames = vec![frame.clone()];
            transport.send_tensor(peer, Vec::new(), frames, Class::Round)?.await;
        }
    };
    let snapshot = || Some((transport.traffic().tensor.sent.0, transport.path_to(peer)?));
    let measure = async {
        sleep(SETTLING.min(seconds)).await;
        let (before, since) = (snapshot(), Instant::now());
        sleep(seconds).await;
        (before, since.elapsed(), snapshot())
    };
    let (before, elapsed, after) = tokio::select! {
        measured = measure => measured,
        failed = push => return failed,
    };
    let ((before, then), (after, now)) = before.zip(after).ok_or("the connection broke")?;
    let sent = after - before;
    println!(
        "{{\"mbit\": {:.2}, \"sent_packets\": {}, \"lost_packets\": {}, \"round_trip_ms\": {:.1}}}",
        sent as f64 * 8e-6 / elapsed.as_secs_f64(),
        now.packets.sent - then.packets.sent,
        now.packets.lost - then.packets.lost,
        now.round_trip.as_secs_f64() * 1e3,
    );
    // Queued messages are discarded.
    Ok(())
}

fn piece(bytes: usize) -> Result<Frame> {
    let body = Bytes::from(vec![1; bytes]);
    Ok(Frame::pack(Element::U8, &[u32::try_from(bytes)?], body, Packing::Raw)?)
}

async fn measure(total: usize, mebi: usize) -> Result<()> {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let (sender, _sender_events) = bind(loopback, Congestion::default(), Arc::new(NoFiles))?;
    let (receiver, mut events) = bind(loopback, Congestion::default(), Arc::new(NoFiles))?;
    // Only members have room for large tensors.
    receiver.set_members([sender.peer_id()]);
    let start = Instant::now();
    sender.connect(receiver.peer_id(), &receiver.local_addresses()).await?;
    println!("connected in {:.1} ms", start.elapsed().as_secs_f64() * 1e3);

    let bytes = mebi << 20;
    let frame = piece(bytes)?;
    let messages = total.div_ceil(mebi);
    let to = receiver.peer_id();
    let start = Instant::now();
    let processor = processor_seconds();
    let send = async {
        for _ in 0..messages {
            sender.send_tensor(to, Vec::new(), vec![frame.clone()], Class::Round)?.await;
        }
        Result::Ok(())
    };
    let receive = async {
        let mut received = 0;
        while received < messages {
            match events.recv().await {
                Some(TransportEvent::Tensor(_)) => received += 1,
                Some(TransportEvent::Connected { .. }) => {}
                other => return Err(format!("unexpected: {other:?}").into()),
            }
        }
        Result::Ok(())
    };
    tokio::try_join!(send, receive)?;
    let seconds = start.elapsed().as_secs_f64();
    let megabytes = (messages * bytes) as f64 / 1e6;
    println!(
        "{megabytes:.0} MB in pieces of {mebi} MiB: {:.0} MB/s, {:.2} CPU s/GB both ends",
        megabytes / seconds,
        (processor_seconds() - processor) / megabytes * 1e3,
    );
    sender.close().await;
    receiver.close().await;
    Ok(())
}

/// User and system time of this process, from the kernel.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields after the name, which may contain spaces. Fields 11 and 12, counted from there,
    // are times in hundredths of a second.
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
