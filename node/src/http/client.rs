//! Asks a node over HTTP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::body::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::status::Status;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most bytes of an answer: more than a swarm of thousands has to say.
const ANSWER: usize = 16 << 20;

/// What a node answered.
#[derive(Debug)]
pub struct Answer {
    /// Whether it is well.
    pub code: StatusCode,
    /// What it said.
    pub body: Bytes,
}

/// Asks the node at an address.
///
/// # Errors
/// When nothing answers there, or not in time, or with too much.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Answer> {
    tokio::time::timeout(PATIENCE, ask(reachable(address), path))
        .await
        .with_context(|| format!("the node at {address} does not answer"))?
        .with_context(|| format!("no answer from a node at {address}"))
}

/// What the node at an address knows of its run.
///
/// # Errors
/// When nothing answers there, or something else does.
pub async fn status(address: SocketAddr) -> anyhow::Result<Status> {
    let Answer { code, body } = get(address, "/status").await?;
    if code != StatusCode::OK {
        bail!("what answers at {address} says {code}: is it a node of Shoal?");
    }
    Status::parse(&body)
        .with_context(|| format!("what answers at {address} is no node of this version of Shoal"))
}

async fn ask(address: SocketAddr, path: &str) -> anyhow::Result<Answer> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path)
        .header(HOST, address.to_string())
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())?;
    let answered = async {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, ANSWER).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        Ok(Answer { code: head.status, body })
    };
    // The connection works as long as somebody waits for it, and ends with the answer.
    tokio::pin!(answered, connection);
    tokio::select! {
        answer = &mut answered => answer,
        _ = &mut connection => answered.await,
    }
}

/// Who listens everywhere is asked on this machine.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
