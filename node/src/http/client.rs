//! Sends requests to a node over HTTP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::body::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::status::Status;
use crate::terminal::visible;

/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most bytes of an answer, more than the status of thousands of members.
const ANSWER: usize = 16 << 20;

/// A node's answer.
#[derive(Debug)]
pub struct Answer {
    /// The status code. The health routes answer 503 for a node that is not healthy.
    pub code: StatusCode,
    /// The body.
    pub body: Bytes,
}

/// Sends a request to the node at an address.
///
/// # Errors
/// If nothing answers in time, or the answer is too large.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Answer> {
    tokio::time::timeout(PATIENCE, ask(reachable(address), path))
        .await
        .with_context(|| format!("the node at {address} does not answer"))?
        .with_context(|| format!("no answer from a node at {address}"))
}

/// The status of the node at an address.
///
/// # Errors
/// If nothing answers, or the answer is not a status.
pub async fn status(address: SocketAddr) -> anyhow::Result<Status> {
    let Answer { code, body } = get(address, "/status").await?;
    if code != StatusCode::OK {
        bail!("{address} answers with {code}: it may not be a Shoal node");
    }
    parse(&body)
        .with_context(|| format!("{address} does not answer like a Shoal node of this version"))
}

/// Parses a status. Its texts are escaped: the node and its peers may be strangers, and they go to this
/// terminal.
fn parse(body: &[u8]) -> serde_json::Result<Status> {
    let shown = escaped(serde_json::from_slice(body)?);
    Status::parse(&serde_json::to_vec(&shown)?)
}

fn escaped(value: Value) -> Value {
    match value {
        Value::String(text) => visible(&text).into(),
        Value::Array(list) => list.into_iter().map(escaped).collect(),
        Value::Object(map) => {
            let pairs = map.into_iter();
            pairs.map(|(key, value)| (visible(&key).into_owned(), escaped(value))).collect()
        }
        other => other,
    }
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
    // The connection must be polled while the answer is awaited.
    tokio::pin!(answered, connection);
    tokio::select! {
        answer = &mut answered => answer,
        _ = &mut connection => answered.await,
    }
}

/// Replaces an unspecified address, at which the server listens everywhere, by this machine's
/// loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
