//! Tests of invalid bytes: the receiver closes the connection with the reason, and does nothing
//! else.

use super::*;
use crate::frame::{FrameError, HEADER};
use crate::net::transport::link::CloseCode;

/// The prefix of a part of message 9.
fn prefix(tag: u16, frames: u8, part: u32) -> Vec<u8> {
    let mut prefix = tag.to_le_bytes().to_vec();
    prefix.extend([frames, 0]);
    prefix.extend(part.to_le_bytes());
    prefix.extend(9u64.to_le_bytes());
    prefix
}

/// A valid message with one tensor.
fn message() -> Vec<u8> {
    let frame = frame(1, 1000);
    [&prefix(3, 1, 0), &b"tag"[..], &frame.header().encode(), frame.body()].concat()
}

async fn refused(target: &mut Node, raw: &Raw, expected: Violation) {
    let (member, reason) = target.disconnected().await;
    assert_eq!(member.peer, raw.identity.peer_id());
    assert_eq!(reason, DisconnectReason::Violation(expected.clone()));
    assert_eq!(raw.closed().await, (CloseCode::Violation.into(), expected.to_string()));
}

async fn tensor_is_refused(message: &[u8], expected: Violation) {
    let mut target = Node::new();
    let raw = Raw::greeted(&mut target).await;
    let mut stream = raw.connection.open_uni().await.expect("open");
    // The other end may close before all is written.
    let _ = stream.write_all(message).await;
    let _ = stream.finish();
    refused(&mut target, &raw, expected).await;
}

#[tokio::test]
async fn a_handwritten_valid_message_is_received() {
    let mut target = Node::new();
    let raw = Raw::greeted(&mut target).await;
    let mut stream = raw.connection.open_uni().await.expect("open");
    stream.write_all(&message()).await.expect("open");
    stream.finish().expect("open");
    let received = target.tensor().await;
    assert_eq!((&received.tag[..], &received.frames[..]), (&b"tag"[..], &[frame(1, 1000)][..]));
}

#[tokio::test]
async fn damaged_tensors_are_refused() {
    let whole = message();
    let mut flipped = whole.clone();
    flipped[tensor::PREFIX + 3 + HEADER + 500] ^= 1;
    tensor_is_refused(&flipped, FrameError::Checksum.into()).await;
    let torn = &whole[..whole.len() - 1];
    tensor_is_refused(torn, Violation::TensorCutShort).await;
    tensor_is_refused(&whole[..20], Violation::TensorCutShort).await;
    let longer = [&whole[..], b"x"].concat();
    tensor_is_refused(&longer, Violation::TensorTrailing).await;
    let mut unknown = whole.clone();
    unknown[tensor::PREFIX + 3 + 1] = 77;
    tensor_is_refused(&unknown, FrameError::UnknownElement { code: 77 }.into()).await;
}

#[tokio::test]
async fn announced_sizes_over_the_limits_are_refused() {
    let tag = tensor::TAG + 1;
    tensor_is_refused(&prefix(tag as u16, 1, 0), Violation::TensorHeader { tag, frames: 1 }).await;
    tensor_is_refused(&prefix(0, 0, 0), Violation::TensorHeader { tag: 0, frames: 0 }).await;
    tensor_is_refused(&prefix(0, 5, 0), Violation::TensorHeader { tag: 0, frames: 5 }).await;
    // One byte more than the largest tensor.
    let bytes = limits::TENSOR.0 + 1;
    let mut header = frame(1, 1).header().encode();
    header[4..8].copy_from_slice(&(bytes as u32).to_le_bytes());
    header[20..28].copy_from_slice(&bytes.to_le_bytes());
    header[28..36].copy_from_slice(&bytes.to_le_bytes());
    let message = [&prefix(0, 1, 0)[..], &header[..]].concat();
    tensor_is_refused(&message, FrameError::TooLarge { bytes: Some(bytes) }.into()).await;
}

/// Only the heads are sent: the receiver does not wait for the bodies.
#[tokio::test]
async fn a_message_over_the_limit_of_the_run_is_refused_before_its_bodies() {
    let half = frame(1, (limits::TENSOR_MESSAGE.0 / 2) as usize).header().encode();
    let one = frame(1, 1).header().encode();
    let message = [&prefix(0, 3, 0)[..], &half, &half, &one].concat();
    let largest = limits::TENSOR_MESSAGE.0;
    let refusal = Violation::TensorsTooLarge { bytes: largest + 1, largest };
    tensor_is_refused(&message, refusal).await;

    let manifest = crate::manifest::example::small();
    let largest = manifest.largest_message().0;
    assert!(largest < limits::TENSOR_MESSAGE.0);
    let run = Run { id: manifest.run_id(), manifest: manifest.to_bytes() };
    let mut target = Node::new();
    let raw = Raw::greeted(&mut target).await;
    target.transport.set_run(run);
    let header = frame(1, largest as usize + 1).header().encode();
    let mut stream = raw.connection.open_uni().await.expect("open");
    stream.write_all(&[&prefix(0, 1, 0)[..], &header].concat()).await.expect("open");
    let refusal = Violation::TensorsTooLarge { bytes: largest + 1, largest };
    refused(&mut target, &raw, refusal).await;
}

#[tokio::test]
async fn inconsistent_parts_are_refused() {
    let none = [&prefix(3, 1, 1)[..], &message()[tensor::PREFIX..]].concat();
    tensor_is_refused(&none, Violation::TensorPart { part: 1 }).await;

    let frame = frame(1, tensor::PART + 1);
    let part = |tag: u8, number| {
        let body = [1; 1];
        [&prefix(1, 1, number)[..], &[tag], &frame.header().encode(), &body].concat()
    };
    // The second part again, and a part of another message under the same number.
    for (again, expected) in [
        (part(7, 1), Violation::TensorPart { part: 1 }),
        (part(8, 0), Violation::TensorHeader { tag: 1, frames: 1 }),
    ] {
        let mut target = Node::new();
        let raw = Raw::greeted(&mut target).await;
        target.transport.set_members([raw.identity.peer_id()]);
        let mut streams = Vec::new();
        for bytes in [part(7, 1), again] {
            let mut stream = raw.connection.open_uni().await.expect("open");
            let _ = stream.write_all(&bytes).await;
            streams.push(stream);
        }
        refused(&mut target, &raw, expected).await;
    }
}

#[tokio::test]
async fn a_control_message_over_the_limit_is_refused() {
    let mut target = Node::new();
    let mut raw = Raw::greeted(&mut target).await;
    let size = limits::CONTROL_MESSAGE.0 as u32 + 1;
    raw.send.write_all(&size.to_le_bytes()).await.expect("open");
    refused(&mut target, &raw, Violation::ControlTooLarge { size: size.into() }).await;
}

#[tokio::test]
async fn a_control_stream_that_ends_is_refused() {
    let mut target = Node::new();
    let mut raw = Raw::greeted(&mut target).await;
    raw.send.write_all(&[9, 0, 0, 0, 1, 2]).await.expect("open");
    raw.send.finish().expect("open");
    refused(&mut target, &raw, Violation::ControlEnded).await;
}

#[tokio::test]
async fn a_malformed_hello_is_refused() {
    let target = Node::new();
    let version = limits::PROTOCOL_VERSION.to_le_bytes();
    for hello in [
        &[0, 0, 0, 0][..],
        &[3, 0, 0, 0, version[0], 0, 0],
        &[0xff, 0xff, 0xff, 0xff],
        &[&[8, 0, 0, 0][..], &version, &[0xff, 0xff, 0xff, 0xff]].concat(),
    ] {
        let mut raw = Raw::dial(Identity::ephemeral(), &target).await;
        raw.send.write_all(hello).await.expect("open");
        assert_eq!(raw.closed().await.0, CloseCode::Violation.into());
    }
}
