//! The first messages on a control stream: who dials says hello, the other end answers.
//!
//! Both begin with the protocol version in four bytes, which never move, so that builds of
//! different versions understand at least why they cannot talk.

use std::net::SocketAddr;

use quinn::{RecvStream, SendStream};

use super::control;
use super::error::{ConnectError, Refusal};
use super::event::Run;
use crate::ids::Incarnation;
use crate::net::admission::{Pass, Signed, UnixTime};
use crate::{limits, wire};

/// Who dials and what it knows.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(super) struct Hello {
    /// Its life.
    pub(super) incarnation: Incarnation,
    /// Its run; `None` before it has joined one.
    pub(super) run: Option<Run>,
    /// The dialler's number for this connection.
    pub(super) number: u64,
    /// The number of the last connection that the answering end dialled and that the dialler saw
    /// end: who still holds on to that one learns here that it is gone.
    pub(super) lost: Option<u64>,
    /// What lets it in.
    pub(super) pass: Pass,
    /// What it asks a permit for, where the answering end gives them.
    pub(super) ticket: Option<Signed>,
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(super) enum Reply {
    /// Talk.
    Welcome {
        /// The life of the answering peer.
        incarnation: Incarnation,
        /// Its run; `None` before it has joined one.
        run: Option<Run>,
        /// What lets the answering peer in.
        pass: Pass,
        /// For the dialler: a permit of its own, new or renewed.
        certificate: Option<Signed>,
        /// What the answering peer's clock says.
        clock: UnixTime,
        /// Where it sees the dialler.
        seen: SocketAddr,
    },
    /// Do not.
    Refused(Refusal),
}

/// What came instead of a hello or a reply.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// One of another version, which we do not look into.
    Version(u32),
    /// Neither.
    Malformed(String),
    /// Nothing: the connection broke.
    Lost,
}

const VERSION: usize = 4;

pub(super) fn encode<T: bincode::Encode>(message: &T) -> Vec<u8> {
    let body = wire::encode(message).expect("a manifest under its cap fits a control message");
    framed(&[&limits::PROTOCOL_VERSION.to_le_bytes(), &body[..]].concat())
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&control::prefix(message), message].concat()
}

pub(super) fn decode<T: bincode::Decode<()>>(message: &[u8]) -> Result<T, Unreadable> {
    let Some((version, body)) = message.split_first_chunk::<VERSION>() else {
        return Err(Unreadable::Malformed("it is too short".to_owned()));
    };
    let version = u32::from_le_bytes(*version);
    if version != limits::PROTOCOL_VERSION {
        return Err(Unreadable::Version(version));
    }
    wire::decode(body).map_err(|error| Unreadable::Malformed(error.to_string()))
}

async fn read<T: bincode::Decode<()>>(stream: &mut RecvStream) -> Result<(T, usize), Unreadable> {
    let message = control::read(stream).await.map_err(|failure| match failure {
        control::ReadFailure::Violation(violation) => Unreadable::Malformed(violation.to_string()),
        control::ReadFailure::End | control::ReadFailure::Lost => Unreadable::Lost,
    })?;
    decode(&message).map(|value| (value, message.len() + control::PREFIX))
}

/// Says hello and waits for the answer; gives it with the bytes sent and received. A connection
/// counts as established only then: who dials with TLS 1.3 is done before the other end has looked
/// at its certificate.
pub(super) async fn greet(
    hello: &Hello,
    send: &mut SendStream,
    recv: &mut RecvStream,
) -> Result<(Reply, usize, usize), ConnectError> {
    let hello = encode(hello);
    let lost = || ConnectError::Malformed { reason: "the connection ended".to_owned() };
    send.write_all(&hello).await.map_err(|_| lost())?;
    match read(recv).await {
        Ok((reply, received)) => Ok((reply, hello.len(), received)),
        Err(Unreadable::Version(theirs)) => {
            Err(Refusal::Version { ours: limits::PROTOCOL_VERSION, theirs }.into())
        }
        Err(Unreadable::Malformed(reason)) => Err(ConnectError::Malformed { reason }),
        Err(Unreadable::Lost) => Err(lost()),
    }
}

/// Waits for a hello; gives it with the bytes received.
pub(super) async fn hear(recv: &mut RecvStream) -> Result<(Hello, usize), Unreadable> {
    read(recv).await
}

/// Answers a hello; gives the bytes sent. The answer to a hello of another version is our version
/// alone.
pub(super) async fn answer(reply: Option<&Reply>, send: &mut SendStream) -> Option<usize> {
    let reply = match reply {
        Some(reply) => encode(reply),
        None => framed(&limits::PROTOCOL_VERSION.to_le_bytes()),
    };
    send.write_all(&reply).await.ok()?;
    Some(reply.len())
}
