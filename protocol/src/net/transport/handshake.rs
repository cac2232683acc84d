//! The first messages on a control stream: the hello of the dialler, and the answer of the other
//! end.
//!
//! Both begin with the protocol version in four bytes, whose position is fixed. Builds of different
//! versions can thus report why they cannot connect.

use std::net::SocketAddr;

use quinn::{RecvStream, SendStream};

use super::control;
use super::error::{ConnectError, Refusal};
use super::event::Run;
use crate::ids::Incarnation;
use crate::net::admission::{Pass, Signed, UnixTime};
use crate::{limits, wire};

/// The first message of the dialler.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(super) struct Hello {
    /// The dialler's incarnation.
    pub(super) incarnation: Incarnation,
    /// The dialler's run; `None` before it has joined one.
    pub(super) run: Option<Run>,
    /// The dialler's number for this connection.
    pub(super) number: u64,
    /// The number of the last connection that the answering end dialled and whose end the dialler
    /// has seen. If the answering end still has that connection open, it learns that it is gone.
    pub(super) lost: Option<u64>,
    /// The dialler's credentials.
    pub(super) pass: Pass,
    /// The ticket to exchange for a certificate, if the answering end is its issuer.
    pub(super) ticket: Option<Signed>,
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub(super) enum Reply {
    /// The peer is accepted.
    Welcome {
        /// The incarnation of the answering peer.
        incarnation: Incarnation,
        /// Its run; `None` before it has joined one.
        run: Option<Run>,
        /// The credentials of the answering peer.
        pass: Pass,
        /// A new or renewed certificate for the dialler.
        certificate: Option<Signed>,
        /// The time of the answering peer's clock.
        clock: UnixTime,
        /// The dialler's address, as the answering peer sees it.
        seen: SocketAddr,
    },
    /// The peer is refused.
    Refused(Refusal),
}

/// The reason why a hello or a reply was not read.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// The message has another version and is not decoded.
    Version(u32),
    /// The message is malformed.
    Malformed(String),
    /// The connection was lost.
    Lost,
}

const VERSION: usize = 4;

pub(super) fn encode<T: bincode::Encode>(message: &T) -> Vec<u8> {
    let body = wire::encode(message).expect("a manifest within its limit fits a control message");
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

/// Sends the hello and waits for the answer. Returns the answer with the bytes sent and received.
/// The connection counts as established only then: with TLS 1.3, the dialler finishes before the
/// other end has checked its certificate.
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

/// Waits for a hello; returns it with the number of bytes received.
pub(super) async fn read_hello(recv: &mut RecvStream) -> Result<(Hello, usize), Unreadable> {
    read(recv).await
}

/// Answers a hello; returns the number of bytes sent. The answer to a hello of another version is
/// only this build's version.
pub(super) async fn answer(reply: Option<&Reply>, send: &mut SendStream) -> Option<usize> {
    let reply = match reply {
        Some(reply) => encode(reply),
        None => framed(&limits::PROTOCOL_VERSION.to_le_bytes()),
    };
    send.write_all(&reply).await.ok()?;
    Some(reply.len())
}
