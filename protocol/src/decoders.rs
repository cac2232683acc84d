//! The decoders of this crate with their checks. See [`crate::decoder`].

use std::fmt::Debug;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::codec::packing::Packing;
use crate::codec::{Block, Codec, SumCodec};
use crate::decoder::{Decoder, reads_back};
use crate::frame::{Element, Frame, HEADER, Header};
use crate::ids::{
    Attempt, ClaimKey, ContentHash, Era, Exchange, Grant, Incarnation, Member, Mend, Microbatch,
    PeerId, Stage, StageSpan, Step, Term, WeightGroup,
};
use crate::limits;
use crate::manifest::example::{mixture, small};
use crate::manifest::{Audit, Data, Guard, Manifest, Start};
use crate::message::{
    AnchorGroup, AuditId, AuditOrder, AuditedInput, AuditedWork, Candidate, CurvePoint, Curves,
    Duties, Envelope, Finding, FromCoordinator, Handed, Handover, HandoverDigest, InputId,
    LinkEstimate, MemberRecord, Mended, Message, Move, MoveReason, PassTimes, PeerMessage,
    Recalled, RoundGroupChange, RoundGroupMember, RoundId, SavedCheckpoint, Seal, StageChoice,
    StageRoom, StoredFile, StoredStage, SumsPrint, TensorHeader, TensorTag, TermProof, TermVote,
    ToCoordinator, ViewChange, WorkDigest,
};
use crate::pieces::{HASH, PieceHashes, pieces};
use crate::units;
use crate::wire;

/// The decoders that need no socket.
pub const DECODERS: &[Decoder] = &[
    Decoder { name: "envelope", examples: envelopes, check: reads_back::<Envelope> },
    Decoder { name: "tensor_header", examples: tensor_headers, check: reads_back::<TensorHeader> },
    Decoder { name: "manifest", examples: manifests, check: manifest },
    Decoder { name: "frame_header", examples: headers, check: header },
    Decoder { name: "frame_body", examples: bodies, check: body },
    Decoder { name: "pieces", examples: piece_lists, check: piece_list },
    Decoder { name: "names", examples: names, check: name },
];

/// Maximum size of a body in the checks: a header may announce far more than the fuzzer has memory
/// for.
const RAW: usize = 1 << 20;

fn encoded(value: &impl wire::Encode) -> Vec<u8> {
    wire::encode(value).expect("an example is small")
}

/// A candidate with a measured link to one member.
fn newcomer(known: PeerId, addresses: &[SocketAddr]) -> (Candidate, LinkEstimate) {
    let estimate =
        LinkEstimate { round_trip: Duration::from_millis(120), rate: Some(units::Rate(1 << 24)) };
    let candidate = Candidate {
        choice: StageChoice::Auto,
        fits: [Stage(0), Stage(2)].into(),
        addresses: addresses.to_vec(),
        fingerprint: Some(ContentHash([5; 32])),
        duties: Duties::default(),
        devices: std::num::NonZeroU16::MIN,
        devices_per_pass: std::num::NonZeroU16::MIN,
        room: StageRoom::in_memory(2),
        longest: 1,
        price: Some(units::Price::MAX),
        island: Some("us-east-1".parse().expect("a name")),
        name: Some("gpu-7".parse().expect("a name")),
        link_estimates: Some(vec![(known, estimate)]),
    };
    (candidate, estimate)
}

/// A checkpoint of one stage with one holder.
fn checkpoint(holder: PeerId, addresses: &[SocketAddr]) -> SavedCheckpoint {
    let file = StoredFile {
        name: "model-00001-of-00002.safetensors".to_owned(),
        hash: ContentHash([3; 32]),
        size: units::Bytes(1 << 33),
    };
    let stored = StoredStage { files: vec![file], holders: vec![holder] };
    let holders = vec![(holder, addresses.to_vec())];
    SavedCheckpoint { version: Step(300), stages: vec![stored], holders }
}

/// The record of a member that migrates.
fn mover(member: Member, addresses: &[SocketAddr]) -> MemberRecord {
    let to = StageSpan::one(Stage(3));
    MemberRecord {
        member,
        span: StageSpan::one(Stage(2)),
        addresses: addresses.to_vec(),
        serving: true,
        duties: Duties::default(),
        devices: std::num::NonZeroU16::MIN,
        devices_per_pass: std::num::NonZeroU16::MIN,
        room: StageRoom::in_memory(2),
        longest: 1,
        price: Some(units::Price::MAX),
        island: Some("us-east-1".parse().expect("a name")),
        name: Some("gpu-7".parse().expect("a name")),
        fingerprint: None,
        moves: Some(Move { to, era: Era(1), at: None, reason: MoveReason::Nearer }),
    }
}

fn envelopes() -> Vec<Vec<u8>> {
    let grant = Grant { term: Term(1), number: 9 };
    let coordinator = Member { peer: PeerId([7; 32]), incarnation: Incarnation(2) };
    let addresses = vec![([192, 0, 2, 1], 7410).into(), ([0; 16], 1).into()];
    let member = Arc::new(mover(coordinator, &addresses));
    let listens = RoundGroupMember { member: coordinator, weight: None, island: None };
    let sums = RoundGroupMember { weight: Some(1 << 16), island: Some(300), ..listens };
    let round = round();
    let newest = checkpoint(coordinator.peer, &addresses);
    let (candidate, estimate) = newcomer(coordinator.peer, &addresses);
    let point = CurvePoint { first: 69_500, last: 70_000, count: 300, mean: 2.5 };
    let targets = vec![(coordinator.peer, addresses.clone())];
    [
        Message::ToCoordinator(ToCoordinator::Register(candidate)),
        Message::ToCoordinator(ToCoordinator::LinkEstimates {
            link_estimates: vec![(coordinator.peer, estimate)],
        }),
        Message::FromCoordinator(FromCoordinator::ProbeLinks { at: targets }),
        Message::FromCoordinator(FromCoordinator::Work {
            step: Step(7),
            grants: vec![(Microbatch(1), grant), (Microbatch(300), grant)],
        }),
        Message::FromCoordinator(FromCoordinator::View(ViewChange {
            since: 3,
            number: 4,
            stops: true,
            gone: [coordinator].into(),
            here: vec![member.clone()],
        })),
        Message::FromCoordinator(FromCoordinator::Members {
            number: 4,
            part: (1, 3),
            members: vec![member],
        }),
        Message::FromCoordinator(FromCoordinator::Close {
            round,
            group: RoundGroupChange {
                since: 8,
                number: 9,
                gone: [coordinator].into(),
                here: vec![listens],
            },
            mended: Mended { mend: Mend(1), changed: [0, 300].into() },
            counted: vec![(Stage(0), Microbatch(2)), (Stage(7), Microbatch(300))],
        }),
        Message::FromCoordinator(FromCoordinator::RoundGroup {
            weights: WeightGroup(1),
            number: 9,
            part: (0, 1),
            here: vec![listens, sums],
        }),
        Message::CheckpointRequest,
        Message::Checkpoint { newest: Some(newest) },
        Message::CoordinatorMoved { coordinator, addresses, proofs: vec![elected()] },
        Message::Elected { proofs: vec![elected(), elected()] },
        Message::CurvesRequest,
        Message::Curves(Curves {
            loss: vec![point; 2],
            held_out_loss: vec![point],
            ..Curves::default()
        }),
    ]
    .into_iter()
    .chain(about_audits(coordinator, grant))
    .map(|message| {
        let (from, to) = (Incarnation(3), Incarnation(400));
        encoded(&Envelope { from, to, era: Era(0), term: Term(1), message })
    })
    .collect()
}

/// What a member states, and what others make of it.
fn about_audits(coordinator: Member, grant: Grant) -> [Message; 5] {
    let key = ClaimKey { step: Step(7), stage: Stage(1), microbatch: Microbatch(300) };
    [
        Message::ToCoordinator(ToCoordinator::Audited {
            id: audit_order(coordinator).id,
            finding: Finding::OtherInput {
                of: InputId { key, input: Recalled::Gradient },
                sent: handed(coordinator),
            },
        }),
        Message::ToCoordinator(ToCoordinator::Done {
            key: ClaimKey { step: Step(7), stage: Stage(1), microbatch: Microbatch(300) },
            grant,
            loss: None,
            pass_times: PassTimes::default(),
            handover: Box::new(Handover {
                activation: Some(handed(coordinator)),
                ..Handover::default()
            }),
        }),
        Message::FromCoordinator(FromCoordinator::Audit(Arc::new(audit_order(coordinator)))),
        Message::ToCoordinator(ToCoordinator::Audited {
            id: audit_order(coordinator).id,
            finding: Finding::Computed { digest: digest(), signature: [5; 64] },
        }),
        Message::PeerMessage(PeerMessage::Recall {
            key: ClaimKey { step: Step(7), stage: Stage(1), microbatch: Microbatch(300) },
            input: Recalled::Gradient,
        }),
    ]
}

fn digest() -> WorkDigest {
    HandoverDigest::default().with(vec![SumsPrint(1 << 60)])
}

fn handed(by: Member) -> Handed {
    Handed { hash: ContentHash([4; 32]), seal: Seal { era: Era(300), by, signature: [9; 64] } }
}

/// An audit of one microbatch in the middle of a pipeline.
fn audit_order(of: Member) -> AuditOrder {
    let (era, term, step) = (Era(1), Term(2), Step(70_000));
    let input = |holder| Some(AuditedInput { holder, hash: ContentHash([7; 32]) });
    let work =
        AuditedWork { microbatch: Microbatch(300), activation: input(0), gradient: input(1) };
    AuditOrder {
        id: AuditId { era, term, step, stage: Stage(1), of },
        rounds: vec![(round(), ContentHash([8; 32]))],
        holders: vec![of, of],
        work: vec![work],
    }
}

/// A term that two of three anchors signed, while one of them is replaced.
fn elected() -> TermProof {
    let set = |numbers: [u8; 3]| numbers.map(|number| PeerId([number; 32])).into();
    let group =
        AnchorGroup { history: 1, number: 300, voters: vec![set([1, 2, 3]), set([2, 3, 4])] };
    let vote = TermVote { term: Term(1 << 32), coordinator: PeerId([2; 32]), group };
    let signatures = [2, 3].map(|number| (PeerId([number; 32]), [number; 64])).into();
    TermProof { vote, signatures }
}

fn round() -> RoundId {
    let (era, term, step) = (Era(1), Term(2), Step(70_000));
    RoundId { era, term, step, weights: WeightGroup(1), attempt: Attempt(3) }
}

fn tensor_headers() -> Vec<Vec<u8>> {
    let by = Member { peer: PeerId([3; 32]), incarnation: Incarnation(8) };
    let round = round();
    let key = ClaimKey { step: Step(70_000), stage: Stage(1), microbatch: Microbatch(3) };
    let exchange = Exchange(300);
    [
        TensorTag::Activation { key, exchange: Exchange(0) },
        TensorTag::ActivationGradient { key, exchange },
        TensorTag::RoundPart { round, mend: Mend(2), piece: 500, proof: u64::MAX },
        TensorTag::RoundResult { round, mend: Mend(0), piece: 0, proof: 1 },
        TensorTag::Recalled { key, input: Recalled::Activation },
    ]
    .map(|tag| encoded(&TensorHeader { tag, seal: tag.input().map(|_| handed(by).seal) }))
    .to_vec()
}

fn manifests() -> Vec<Vec<u8>> {
    let mut coded = small();
    coded.codec.activations = Codec::Int8(Block::DEFAULT);
    coded.codec.activation_gradients = Codec::Fp8(Block::DEFAULT);
    coded.codec.all_reduce = SumCodec::Rounded(Codec::Bf16);
    let checkpoint = ContentHash([6; 32]);
    let start = Start { checkpoint, bytes: 900, step: Step(4), samples: 64 };
    let later = Manifest { start: Some(start), ..small() };
    let mixed = Manifest { data: Data::Mixture(mixture()), ..small() };
    let audited = Manifest { audit: Audit { share: 0.03, probation: 2 }, ..small() };
    let guarded = Manifest { guard: Some(Guard { rate: 0.5, ..Guard::default() }), ..small() };
    [small(), coded, later, mixed, audited, guarded].iter().map(Manifest::to_bytes).collect()
}

fn manifest(bytes: &[u8]) {
    reads_back::<Manifest>(bytes);
    let Ok(manifest) = Manifest::from_bytes(bytes) else { return };
    let layers: u32 = manifest.stages().map(|stage| manifest.layers_of(stage).len() as u32).sum();
    assert_eq!(layers, manifest.model.layers, "every layer has one stage");
    for stage in [Stage(0), manifest.last_stage()] {
        assert!(manifest.output_log_bytes(stage).0 < u64::MAX);
    }
    assert!(manifest.largest_logged() <= units::Bytes(2 * limits::TENSOR.0));
    let count = manifest.text().map_or(0, |tokens| tokens.count);
    assert!(manifest.held_out_tokens() <= count);
    assert!(manifest.tokens_per_step() > 0 && manifest.microbatches_of(0) > 0);
}

/// One frame of every kind of packing.
fn frames() -> Vec<Frame> {
    let sums: Vec<u8> = (0..100i64).flat_map(|sum| (sum * 1000 - 5).to_le_bytes()).collect();
    let flat = |element: Element, packing| {
        let count = sums.len() / element.width();
        let raw = Bytes::from(sums[..count * element.width()].to_vec());
        Frame::pack(element, &[count as u32], raw, packing).expect("it has its shape")
    };
    let blocks = vec![7; 4 * (64 + 4)].into();
    let coded = Element::Number(Codec::Int8(Block::DEFAULT));
    vec![
        flat(Element::I64, Packing::Integers),
        flat(Element::I64, Packing::Bits),
        flat(Element::F32, Packing::Zstd),
        flat(Element::U8, Packing::Raw),
        Frame::pack(coded, &[2, 1, 128], blocks, Packing::Zstd).expect("it has its shape"),
    ]
}

fn headers() -> Vec<Vec<u8>> {
    frames().iter().map(|frame| frame.header().encode().to_vec()).collect()
}

fn header(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<HEADER>() else { return };
    let Ok(header) = Header::decode(bytes) else { return };
    assert_eq!(header.encode(), *bytes, "a header has one form");
    assert!(header.packed_length() <= header.raw_length());
    assert!(header.raw_length() as u64 <= limits::TENSOR.0);
}

fn bodies() -> Vec<Vec<u8>> {
    let whole = |frame: &Frame| [&frame.header().encode()[..], frame.body()].concat();
    frames().iter().map(whole).collect()
}

/// A body under a header that matches it, checksum included, as a malicious peer would send it.
fn body(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else { return };
    let Ok(header) = Header::decode(header) else { return };
    if header.raw_length() > RAW {
        return;
    }
    let (element, packing) = (header.element(), header.packing());
    let body = Bytes::copy_from_slice(body);
    let Ok(frame) = Frame::seal(element, header.shape(), header.raw_length(), (packing, body))
    else {
        return;
    };
    let Ok(raw) = frame.unpack() else { return };
    assert_eq!(raw.len(), header.raw_length(), "as many bytes as were announced");
    let again = Frame::pack(element, header.shape(), raw.clone(), packing).expect("it fits");
    assert_eq!(again.unpack(), Ok(raw.clone()), "what is packed again is the same");
    if let Element::Number(codec) = element {
        let count = header.shape().iter().map(|size| *size as usize).product();
        codec.decode(&raw, &mut vec![0.0; count]).expect("any bytes of that length are numbers");
    }
}

fn piece_lists() -> Vec<Vec<u8>> {
    [0usize, 1, 3].map(|count| (0..8 + 32 + HASH * count).map(|byte| byte as u8).collect()).to_vec()
}

/// The layout is: length of the last piece, hash of the file, hashes of the pieces.
fn piece_list(bytes: &[u8]) {
    let Some((last, rest)) = bytes.split_first_chunk::<8>() else { return };
    let Some((hash, list)) = rest.split_first_chunk::<HASH>() else { return };
    let list = list.as_chunks::<HASH>().0.to_vec();
    let last = u64::from_le_bytes(*last);
    let whole = (list.len() as u64).saturating_sub(1) * limits::FILE_PIECE.0;
    for length in [last, whole.saturating_add(last % (limits::FILE_PIECE.0 + 1))] {
        let known = PieceHashes::checked(ContentHash(*hash), length, list.clone());
        let Some(known) = known else { continue };
        assert_eq!(list.len() as u64, pieces(length));
        assert!(!known.holds(length, pieces(length), &[]), "there is no piece behind the end");
    }
}

fn names() -> Vec<Vec<u8>> {
    let hash = ContentHash::of(b"example").to_string();
    let peer = PeerId([9; 32]).to_string();
    [hash, peer, "int8:128".to_owned(), "exact".to_owned(), "8GiB".to_owned()]
        .map(String::into_bytes)
        .to_vec()
}

/// A text that parses to a value must be its name or a longer form of it.
fn name(bytes: &[u8]) {
    fn named<T: FromStr + ToString + PartialEq + Debug>(text: &str) {
        if let Ok(value) = text.parse::<T>() {
            assert_eq!(value.to_string().parse().ok(), Some(value));
        }
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    named::<ContentHash>(text);
    named::<PeerId>(text);
    named::<Codec>(text);
    named::<SumCodec>(text);
    // Printed amounts are rounded, so they do not read back.
    let _: Result<units::Bytes, _> = text.parse();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Decoder> {
        let all = DECODERS.iter();
        #[cfg(feature = "net")]
        let all = all
            .chain(crate::net::admission::decoders::DECODERS)
            .chain(crate::net::transport::decoders::DECODERS);
        all.copied().collect()
    }

    crate::try_decoders!(all());
}
