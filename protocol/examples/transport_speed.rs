//! How fast one peer sends tensors to another over loopback.
//!
//!     cargo run --release -p shoal-protocol --features net --example transport_speed -- [MIB] [PIECE_MIB]
//!
//! Both ends run in this process: the processor time is that of both.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame};
use shoal_protocol::ids::Incarnation;
use shoal_protocol::net::Identity;
use shoal_protocol::net::transport::{
    Congestion, NoBlobs, Priority, Transport, TransportConfig, TransportEvent,
};
use tokio::sync::mpsc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let total = arguments.next().transpose()?.unwrap_or(2048);
    let piece = arguments.next().transpose()?.unwrap_or(8);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(measure(total, piece))
}

async fn measure(total: usize, piece: usize) -> Result<(), Box<dyn std::error::Error>> {
    let (sender, _sender_events) = bind()?;
    let (receiver, mut events) = bind()?;
    let start = Instant::now();
    sender.connect(receiver.peer_id(), &receiver.local_addresses()).await?;
    println!("connected in {:.1} ms", start.elapsed().as_secs_f64() * 1e3);

    let bytes = piece << 20;
    let frame = Frame::pack(
        Element::U8,
        &[u32::try_from(bytes)?],
        Bytes::from(vec![1; bytes]),
        Packing::Raw,
    )?;
    let messages = total.div_ceil(piece);
    let to = receiver.peer_id();
    let start = Instant::now();
    let processor = processor_seconds();
    let send = async {
        for _ in 0..messages {
            sender.send_tensor(to, Vec::new(), vec![frame.clone()], Priority::Bulk)?.await;
        }
        Ok::<(), Box<dyn std::error::Error>>(())
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
        Ok::<(), Box<dyn std::error::Error>>(())
    };
    tokio::try_join!(send, receive)?;
    let seconds = start.elapsed().as_secs_f64();
    let megabytes = (messages * bytes) as f64 / 1e6;
    println!(
        "{megabytes:.0} MB in pieces of {piece} MiB: {:.0} MB/s, {:.2} CPU s/GB both ends",
        megabytes / seconds,
        (processor_seconds() - processor) / megabytes * 1e3,
    );
    sender.close().await;
    receiver.close().await;
    Ok(())
}

fn bind() -> Result<(Transport, mpsc::Receiver<TransportEvent>), Box<dyn std::error::Error>> {
    let config = TransportConfig {
        incarnation: Incarnation(1),
        run: None,
        congestion: Congestion::Cubic,
        blobs: Arc::new(NoBlobs),
    };
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    Ok(Transport::bind(&Identity::ephemeral(), &[listen], config)?)
}

/// User and system time of this process, from the kernel's accounts.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields after the name, which may itself hold spaces; 11 and 12 count from there, in
    // hundredths of a second.
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
