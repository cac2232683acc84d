//! The decoders of data from a connection, with their checks. See [`crate::decoder`].

use std::fs::File;
use std::net::SocketAddr;

use bytes::Bytes;

use super::control::{PREFIX, prefix};
use super::error::Refusal;
use super::event::Run;
use super::file_piece::{HEAD, Head, Piece};
use super::file_server::{FileSource, OpenFile, piece_of};
use super::file_transfer::{REQUEST, Request};
use super::handshake::{self, Hello, Reply};
use super::reachability::wire;
use super::{relay, tensor};
use crate::codec::packing::Packing;
use crate::decoder::{Decoder, reads_back_by};
use crate::frame::{Element, Frame, Header};
use crate::ids::{ContentHash, Incarnation, PeerId};
use crate::limits;
use crate::manifest::example::small;
use crate::net::admission::{Denied, Pass, UnixTime, decoders as admission_examples};
use crate::net::discovery::PeerAddress;

/// The decoders of the transport, and of the addresses that it dials.
pub const DECODERS: &[Decoder] = &[
    Decoder { name: "hello", examples: hellos, check: handshake::<Hello> },
    Decoder { name: "hello_reply", examples: replies, check: handshake::<Reply> },
    Decoder { name: "tensor_message", examples: tensor_messages, check: tensor_message },
    Decoder { name: "file_request", examples: file_requests, check: file_request },
    Decoder { name: "file_piece", examples: file_pieces, check: file_piece },
    Decoder { name: "probe_request", examples: probe_requests, check: probe_request },
    Decoder { name: "probe_answer", examples: probe_answers, check: probe_answer },
    Decoder { name: "probe", examples: probes, check: probe },
    Decoder { name: "relay_datagram", examples: datagrams, check: datagram },
    Decoder { name: "address", examples: addresses, check: address },
];

fn run() -> Option<Run> {
    let manifest = small();
    Some(Run { id: manifest.run_id(), manifest: manifest.to_bytes() })
}

/// Encodes without the length prefix of the control stream.
fn greeting<T: bincode::Encode>(message: &T) -> Vec<u8> {
    let written = handshake::encode(message);
    let (length, written) = written.split_at(PREFIX);
    assert_eq!(length, prefix(written));
    written.to_vec()
}

fn hellos() -> Vec<Vec<u8>> {
    let hello = Hello {
        incarnation: Incarnation(3),
        run: run(),
        number: 1,
        lost: Some(300),
        pass: admission_examples::pass(),
        ticket: None,
    };
    let pass = Pass::default();
    let ticket = Some(admission_examples::ticket().signed().clone());
    let newcomer = Hello { run: None, lost: None, pass, ticket, ..hello.clone() };
    vec![greeting(&hello), greeting(&newcomer)]
}

fn replies() -> Vec<Vec<u8>> {
    let incarnation = Incarnation(1 << 40);
    [
        Reply::Welcome {
            incarnation,
            run: run(),
            pass: admission_examples::pass(),
            certificate: admission_examples::pass().certificate,
            clock: UnixTime(1_800_000_000),
            seen: ([192, 0, 2, 7], 4242).into(),
        },
        Reply::Refused(Refusal::Denied(Denied::Banned)),
        Reply::Refused(Refusal::Displaced { newest: incarnation }),
        Reply::Refused(Refusal::AlreadyConnected),
    ]
    .map(|reply| greeting(&reply))
    .to_vec()
}

fn handshake<T: bincode::Decode<()> + bincode::Encode>(bytes: &[u8]) {
    reads_back_by(bytes, |bytes| handshake::decode::<T>(bytes).ok(), greeting);
}

fn tensor_messages() -> Vec<Vec<u8>> {
    let frame = |bytes: usize| {
        let raw = Bytes::from(vec![1; bytes]);
        Frame::pack(Element::U8, &[bytes as u32], raw, Packing::Zstd).expect("it has its shape")
    };
    [tensor::encode(7, 0, b"tag", &[frame(100), frame(0)]), tensor::encode(0, 0, b"", &[frame(3)])]
        .map(|pieces| pieces.concat())
        .to_vec()
}

/// Checks a whole stream: decoded data encodes to the same bytes. Of a part that is not the first,
/// only the head can be checked here.
fn tensor_message(bytes: &[u8]) {
    let Some((prefix, rest)) = bytes.split_first_chunk() else { return };
    let Ok(prefix) = tensor::Prefix::decode(*prefix) else { return };
    let Some((head, mut rest)) = rest.split_at_checked(prefix.head()) else { return };
    let Ok((tag, headers)) = prefix.split(head) else { return };
    let lengths: Vec<usize> = headers.iter().map(Header::packed_length).collect();
    let parts = tensor::parts(&lengths);
    assert!(tensor::segments(&lengths, parts).next().is_none(), "no segments follow the last part");
    if prefix.part != 0 || parts > 1 {
        return;
    }
    let mut frames = Vec::new();
    for header in headers {
        let Some((body, after)) = rest.split_at_checked(header.packed_length()) else { return };
        let Ok(frame) = Frame::new(header, Bytes::copy_from_slice(body)) else { return };
        frames.push(frame);
        rest = after;
    }
    let written = tensor::encode(prefix.message, 0, &tag, &frames).concat();
    assert_eq!([&written[..], rest].concat(), bytes);
}

/// An empty file, whatever the requested hash.
struct Small(File);

impl FileSource for Small {
    fn open(&self, _hash: &ContentHash) -> Option<OpenFile> {
        Some(OpenFile { file: self.0.try_clone().ok()?, length: 0 })
    }
}

fn file_requests() -> Vec<Vec<u8>> {
    let hash = ContentHash::of(b"a file");
    [(0, 0), (3 << 20, 1 << 20), (0, u32::MAX)]
        .map(|(position, length)| Request { hash, position, length }.encode().to_vec())
        .to_vec()
}

fn file_request(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<REQUEST>() else { return };
    let request = Request::decode(bytes);
    assert_eq!(request.encode(), *bytes, "a request has one form");
    if u64::from(request.length) <= limits::FILE_PIECE.0
        && let Ok(empty) = File::open("/dev/null")
    {
        let Request { hash, position, length } = request;
        let answer = piece_of(&Small(empty), hash, position, length);
        assert!(matches!(answer, Some(Ok((0, piece))) if piece.is_empty()));
    }
}

/// Size of the pieces in the examples.
const WANTED: usize = 1000;

fn file_pieces() -> Vec<Vec<u8>> {
    let mixed: Vec<u8> = (0..WANTED).map(|at| ((at * at) >> 7) as u8).collect();
    let pieces = [(Packing::Raw, mixed), (Packing::Zstd, vec![3; WANTED])];
    let written = pieces.map(|(packing, raw)| {
        let piece = Piece::pack(packing, raw.into());
        assert_eq!(piece.packing, packing);
        [&piece.head().encode()[..], &piece.bytes].concat()
    });
    written.to_vec()
}

/// Checks the data that follows the file's length in an answer.
fn file_piece(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return };
    let Some(head) = Head::decode(*head, WANTED) else { return };
    let Some((bytes, _)) = rest.split_at_checked(head.length()) else { return };
    let piece = Piece::received(head, bytes.to_vec());
    assert_eq!(piece.head(), head, "a head has one form");
    if let Ok(raw) = piece.unpack(WANTED) {
        assert_eq!(raw.len(), WANTED);
    }
}

const NONCE: wire::Nonce = wire::Nonce(*b"sixteen, as said");

fn probe_requests() -> Vec<Vec<u8>> {
    vec![wire::Request { nonce: NONCE, port: 7410 }.encode().to_vec()]
}

fn probe_request(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk() else { return };
    if let Some(request) = wire::Request::decode(bytes) {
        assert_eq!(request.encode(), *bytes, "a request has one form");
        assert_ne!(request.port, 0);
    }
}

fn probe_answers() -> Vec<Vec<u8>> {
    let seen = ["192.0.2.7:4242", "[2001:db8::7]:4242"].map(|at| at.parse().expect("an address"));
    let probes = seen.map(|seen| wire::Answer::Probes { seen }.encode());
    probes.into_iter().chain([wire::Answer::Busy.encode()]).collect()
}

fn probe_answer(bytes: &[u8]) {
    reads_back_by(bytes, wire::Answer::decode, |answer| answer.encode());
}

fn probes() -> Vec<Vec<u8>> {
    vec![wire::Probe { nonce: NONCE, port: 7410 }.encode().to_vec()]
}

/// A datagram that is not a probe is left to QUIC.
fn probe(bytes: &[u8]) {
    if let Some(probe) = wire::Probe::decode(bytes) {
        assert_eq!(probe.encode(), *bytes, "a probe has one form");
        assert_eq!(bytes[0] & 0xc0, 0, "no QUIC packet begins like this");
    }
}

fn datagrams() -> Vec<Vec<u8>> {
    vec![relay::wrap(0, PeerId([4; 32]), b"packet").to_vec()]
}

fn datagram(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    let Some((direction, id, packet)) = relay::unwrap(&bytes) else { return };
    assert_eq!(relay::wrap(direction, id, &packet), bytes);
}

fn addresses() -> Vec<Vec<u8>> {
    let peer = PeerId([8; 32]);
    let listens: SocketAddr = ([192, 0, 2, 7], 4242).into();
    let named = format!("/dns4/seed.example.org/tcp/7410/p2p/{peer}");
    vec![PeerAddress::new(listens, peer).to_string().into_bytes(), named.into_bytes()]
}

fn address(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(address) = text.parse::<PeerAddress>() else { return };
    assert_eq!(address.to_string().parse(), Ok(address));
}
