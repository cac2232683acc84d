//! One tensor on the wire: a header of fixed size, then the packed elements.
//!
//! The receiver reads and checks the header alone. It allocates memory for the body only if the
//! header's element type, shape and lengths agree and are within the limits. A body becomes a
//! [`Frame`] only if its checksum is the announced one.

mod error;

use std::fmt;

use bytes::Bytes;
pub use error::FrameError;
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::codec::packing::{self, Packing};
use crate::codec::{Block, Codec};
use crate::limits;

/// Number format of a tensor on the wire. Numbers are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// Numbers in a codec: activations, activation gradients, reduced weight gradients.
    Number(Codec),
    /// Fixed-point weight-gradient sums.
    I64,
    /// Token ids.
    U32,
    /// Any other data, as bytes.
    U8,
}

impl Element {
    /// 32-bit IEEE.
    pub const F32: Self = Self::Number(Codec::F32);

    /// Bytes of `count` elements; `None` if they do not fit a u64.
    #[must_use]
    pub fn bytes_of(self, count: u64) -> Option<u64> {
        match self {
            Self::Number(codec) => codec.bytes_of(count),
            Self::I64 | Self::U32 | Self::U8 => count.checked_mul(self.width() as u64),
        }
    }

    /// Bytes of one element if each has its own bytes; else 1.
    #[must_use]
    pub const fn width(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::Number(Codec::F32) | Self::U32 => 4,
            Self::Number(Codec::Bf16 | Codec::F16) => 2,
            Self::Number(Codec::Int8(_) | Codec::Int4(_) | Codec::Fp8(_)) | Self::U8 => 1,
        }
    }

    /// The format in the lower four bits; the exponent of its block, or zero, in the upper ones.
    fn code(self) -> u8 {
        let (kind, block) = match self {
            Self::Number(codec) => {
                let kind = match codec {
                    Codec::F32 => 0,
                    Codec::Bf16 => 1,
                    Codec::F16 => 5,
                    Codec::Int8(_) => 6,
                    Codec::Int4(_) => 7,
                    Codec::Fp8(_) => 8,
                };
                (kind, codec.block())
            }
            Self::I64 => (2, None),
            Self::U32 => (3, None),
            Self::U8 => (4, None),
        };
        kind | block.map_or(0, Block::exponent) << 4
    }

    fn from_code(code: u8) -> Result<Self, FrameError> {
        let element = match (code & 15, Block::of_exponent(code >> 4)) {
            (6, Some(block)) => Self::Number(Codec::Int8(block)),
            (7, Some(block)) => Self::Number(Codec::Int4(block)),
            (8, Some(block)) => Self::Number(Codec::Fp8(block)),
            (0, _) => Self::Number(Codec::F32),
            (1, _) => Self::Number(Codec::Bf16),
            (2, _) => Self::I64,
            (3, _) => Self::U32,
            (4, _) => Self::U8,
            (5, _) => Self::Number(Codec::F16),
            _ => return Err(FrameError::UnknownElement { code }),
        };
        // A format without blocks must have no exponent.
        if element.code() == code { Ok(element) } else { Err(FrameError::UnknownElement { code }) }
    }
}

impl From<Codec> for Element {
    fn from(codec: Codec) -> Self {
        Self::Number(codec)
    }
}

/// Sizes of a tensor's dimensions, outermost first; a scalar has none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dimensions: [u32; limits::TENSOR_RANK],
    rank: usize,
}

impl Shape {
    /// A shape of these dimensions.
    ///
    /// # Errors
    /// If there are more than [`limits::TENSOR_RANK`].
    pub fn new(dimensions: &[u32]) -> Result<Self, FrameError> {
        let rank = dimensions.len();
        let mut all = [0; limits::TENSOR_RANK];
        all.get_mut(..rank).ok_or(FrameError::Rank { rank })?.copy_from_slice(dimensions);
        Ok(Self { dimensions: all, rank })
    }

    /// The dimensions, outermost first.
    #[must_use]
    pub fn dimensions(&self) -> &[u32] {
        &self.dimensions[..self.rank]
    }

    /// Bytes of a tensor of this shape; `None` if they do not fit a u64.
    fn bytes(&self, element: Element) -> Option<u64> {
        let sizes = self.dimensions().iter();
        let count = sizes.copied().try_fold(1u64, |count, size| count.checked_mul(size.into()))?;
        element.bytes_of(count)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dimensions().fmt(f)
    }
}

/// Bytes of an encoded [`Header`].
pub const HEADER: usize = 52;

const DIMENSIONS_AT: usize = 4;
const RAW_LENGTH_AT: usize = DIMENSIONS_AT + 4 * limits::TENSOR_RANK;
const PACKED_LENGTH_AT: usize = RAW_LENGTH_AT + 8;
const CHECKSUM_AT: usize = PACKED_LENGTH_AT + 8;
const _: () = assert!(CHECKSUM_AT + 16 == HEADER);

const VERSION: u8 = 2;

/// The description of a tensor that precedes its elements. Its parts agree and are within the
/// limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    element: Element,
    shape: Shape,
    packing: Packing,
    raw_length: u64,
    packed_length: u64,
    checksum: [u8; 16],
}

impl Header {
    /// Number format of the elements.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// Sizes of the dimensions.
    #[must_use]
    pub fn shape(&self) -> &[u32] {
        self.shape.dimensions()
    }

    /// Packing of the elements.
    #[must_use]
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Bytes of the unpacked elements.
    #[must_use]
    pub fn raw_length(&self) -> usize {
        self.raw_length as usize
    }

    /// Bytes of the packed elements, which follow on the wire.
    #[must_use]
    pub fn packed_length(&self) -> usize {
        self.packed_length as usize
    }

    /// Encodes version, element, packing and rank, a byte each; then the dimensions as u32, unused
    /// ones zero; then raw length and packed length as u64; then the checksum. All numbers are
    /// little-endian.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = self.encode_without_checksum();
        bytes[CHECKSUM_AT..].copy_from_slice(&self.checksum);
        bytes
    }

    fn encode_without_checksum(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let packing = match self.packing {
            Packing::Raw => 0,
            Packing::Zstd => 1,
            Packing::Integers => 2,
            Packing::Bits => 3,
        };
        bytes[..DIMENSIONS_AT].copy_from_slice(&[
            VERSION,
            self.element.code(),
            packing,
            self.shape.rank as u8,
        ]);
        let dimensions = bytes[DIMENSIONS_AT..RAW_LENGTH_AT].chunks_exact_mut(4);
        for (to, size) in dimensions.zip(self.shape.dimensions) {
            to.copy_from_slice(&size.to_le_bytes());
        }
        bytes[RAW_LENGTH_AT..PACKED_LENGTH_AT].copy_from_slice(&self.raw_length.to_le_bytes());
        bytes[PACKED_LENGTH_AT..CHECKSUM_AT].copy_from_slice(&self.packed_length.to_le_bytes());
        bytes
    }

    /// Decodes and checks a header; allocates nothing.
    ///
    /// # Errors
    /// The first part that is unknown, exceeds a limit, or disagrees with another.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, FrameError> {
        if bytes[0] != VERSION {
            return Err(FrameError::Version { version: bytes[0] });
        }
        let element = Element::from_code(bytes[1])?;
        let packing = match bytes[2] {
            0 => Packing::Raw,
            1 => Packing::Zstd,
            2 => Packing::Integers,
            3 => Packing::Bits,
            code => return Err(FrameError::UnknownPacking { code }),
        };
        let rank = usize::from(bytes[3]);
        let mut dimensions = [0; limits::TENSOR_RANK];
        let encoded = bytes[DIMENSIONS_AT..RAW_LENGTH_AT].chunks_exact(4);
        for (size, encoded) in dimensions.iter_mut().zip(encoded) {
            *size = u32::from_le_bytes(encoded.try_into().expect("chunks of four"));
        }
        let unused = dimensions.get(rank..).ok_or(FrameError::Rank { rank })?;
        if unused.iter().any(|&size| size != 0) {
            return Err(FrameError::UnusedDimension { rank });
        }
        let length =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of eight"));
        let header = Self {
            element,
            shape: Shape { dimensions, rank },
            packing,
            raw_length: length(RAW_LENGTH_AT),
            packed_length: length(PACKED_LENGTH_AT),
            checksum: bytes[CHECKSUM_AT..].try_into().expect("the last sixteen"),
        };
        header.check()?;
        Ok(header)
    }

    /// A header whose parts agree, without its checksum.
    fn checked(
        element: Element,
        shape: &[u32],
        packing: Packing,
        (raw, packed): (usize, usize),
    ) -> Result<Self, FrameError> {
        let shape = Shape::new(shape)?;
        let (raw_length, packed_length) = (raw as u64, packed as u64);
        let checksum = [0; 16];
        let header = Self { element, shape, packing, raw_length, packed_length, checksum };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), FrameError> {
        let Self { raw_length, packed_length, .. } = *self;
        let expected =
            self.shape.bytes(self.element).ok_or(FrameError::TooLarge { bytes: None })?;
        if expected != raw_length {
            return Err(FrameError::RawLength { announced: raw_length, expected });
        }
        if raw_length > limits::TENSOR.0 {
            return Err(FrameError::TooLarge { bytes: Some(raw_length) });
        }
        let fits = match self.packing {
            Packing::Raw => packed_length == raw_length,
            Packing::Zstd | Packing::Integers | Packing::Bits => packed_length < raw_length,
        };
        if !fits {
            return Err(FrameError::PackedLength { announced: packed_length, raw: raw_length });
        }
        Ok(())
    }

    /// XXH3 with 128 bits over the packed bytes; its seed is the 64-bit XXH3 of the rest of the
    /// header. The checksum detects accidental changes; the connection authenticates the sender.
    fn checksum_of(&self, body: &[u8]) -> [u8; 16] {
        let header = XxHash3_64::oneshot(&self.encode_without_checksum()[..CHECKSUM_AT]);
        XxHash3_128::oneshot_with_seed(header, body).to_le_bytes()
    }
}

/// A tensor in transit: a checked header and the packed body that it describes.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    header: Header,
    body: Bytes,
}

impl Frame {
    /// Packs a local tensor, given as the bytes of its elements. [`Packing::Raw`] copies nothing.
    /// With any other packing, the tensor still travels raw unless the packing makes it smaller.
    ///
    /// # Errors
    /// If the bytes do not have this shape, or exceed the limit.
    pub fn pack(
        element: Element,
        shape: &[u32],
        raw: Bytes,
        packing: Packing,
    ) -> Result<Self, FrameError> {
        let length = raw.len();
        Header::checked(element, shape, Packing::Raw, (length, length))?;
        let packed = packing::pack(packing, element.width(), raw);
        Self::seal(element, shape, length, packed)
    }

    /// Like [`Frame::pack`], for a body that is already packed; `raw_length` is its unpacked size.
    ///
    /// # Errors
    /// If the bytes do not have this shape, or exceed the limit.
    pub fn seal(
        element: Element,
        shape: &[u32],
        raw_length: usize,
        (packing, body): (Packing, Bytes),
    ) -> Result<Self, FrameError> {
        let mut header = Header::checked(element, shape, packing, (raw_length, body.len()))?;
        header.checksum = header.checksum_of(&body);
        Ok(Self { header, body })
    }

    /// Joins a header with its body.
    ///
    /// # Errors
    /// If the body has another length or checksum.
    pub fn new(header: Header, body: Bytes) -> Result<Self, FrameError> {
        if body.len() as u64 != header.packed_length {
            return Err(FrameError::BodyLength {
                announced: header.packed_length,
                given: body.len() as u64,
            });
        }
        if header.checksum_of(&body) != header.checksum {
            return Err(FrameError::Checksum);
        }
        Ok(Self { header, body })
    }

    /// The bytes of the elements; not copied if they travelled raw.
    ///
    /// # Errors
    /// If the packed bytes are damaged or unpack to another length than announced.
    pub fn unpack(&self) -> Result<Bytes, FrameError> {
        let Header { packing, element, .. } = self.header;
        let raw_length = self.header.raw_length();
        Ok(packing::unpack(packing, element.width(), self.body.clone(), raw_length)?)
    }

    /// The header of the frame.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Number format of the elements.
    #[must_use]
    pub fn element(&self) -> Element {
        self.header.element
    }

    /// Sizes of the dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u32] {
        self.header.shape.dimensions()
    }

    /// The packed bytes.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Bytes on the wire, header included.
    #[must_use]
    pub fn wire_length(&self) -> usize {
        HEADER + self.body.len()
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({:?} {:?})", self.header.element, self.header.shape)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(packing: Packing) -> Frame {
        Frame::pack(Element::Number(Codec::Bf16), &[2, 3], Bytes::from_static(&[7; 12]), packing)
            .expect("agrees")
    }

    fn header_with(change: impl FnOnce(&mut [u8; HEADER])) -> Result<Header, FrameError> {
        let mut bytes = frame(Packing::Raw).header().encode();
        change(&mut bytes);
        Header::decode(&bytes)
    }

    #[test]
    fn the_layout_is_fixed() {
        let bytes = frame(Packing::Raw).header().encode();
        let mut expected = vec![2, 1, 0, 2, 2, 0, 0, 0, 3, 0, 0, 0];
        expected.extend([0; 8]);
        expected.extend([12, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[..CHECKSUM_AT], expected);
        let checksum = XxHash3_128::oneshot_with_seed(XxHash3_64::oneshot(&expected), &[7; 12]);
        assert_eq!(bytes[CHECKSUM_AT..], checksum.to_le_bytes());
    }

    #[test]
    fn every_defect_has_its_own_error() {
        let error = |change: fn(&mut [u8; HEADER])| header_with(change).expect_err("a defect");
        assert_eq!(error(|b| b[0] = 1), FrameError::Version { version: 1 });
        assert_eq!(error(|b| b[1] = 9), FrameError::UnknownElement { code: 9 });
        assert_eq!(error(|b| b[2] = 9), FrameError::UnknownPacking { code: 9 });
        assert_eq!(error(|b| b[3] = 5), FrameError::Rank { rank: 5 });
        assert_eq!(error(|b| b[3] = 1), FrameError::UnusedDimension { rank: 1 });
        let shape = error(|b| b[DIMENSIONS_AT] = 4);
        assert_eq!(shape, FrameError::RawLength { announced: 12, expected: 24 });
        let packed = error(|b| b[PACKED_LENGTH_AT] = 13);
        assert_eq!(packed, FrameError::PackedLength { announced: 13, raw: 12 });
        // Zstd is valid only if it makes a tensor smaller.
        assert_eq!(error(|b| b[2] = 1), FrameError::PackedLength { announced: 12, raw: 12 });
    }

    #[test]
    fn a_header_over_the_size_limit_is_rejected() {
        let huge = header_with(|b| {
            b[3] = 4;
            b[DIMENSIONS_AT..RAW_LENGTH_AT].fill(0xff);
        });
        assert_eq!(huge, Err(FrameError::TooLarge { bytes: None }));
        let bytes = limits::TENSOR.0 + 8;
        let over = header_with(|b| {
            b[1] = Element::I64.code();
            b[3] = 1;
            b[DIMENSIONS_AT..RAW_LENGTH_AT].fill(0);
            b[DIMENSIONS_AT..][..4].copy_from_slice(&((bytes / 8) as u32).to_le_bytes());
            b[RAW_LENGTH_AT..][..8].copy_from_slice(&bytes.to_le_bytes());
            b[PACKED_LENGTH_AT..][..8].copy_from_slice(&bytes.to_le_bytes());
        });
        assert_eq!(over, Err(FrameError::TooLarge { bytes: Some(bytes) }));
    }

    #[test]
    fn raw_bytes_are_not_copied() {
        let raw = Bytes::from(vec![1; 64]);
        let frame = Frame::pack(Element::F32, &[16], raw.clone(), Packing::Raw).expect("agrees");
        assert_eq!(frame.unpack().expect("raw").as_ptr(), raw.as_ptr());
    }

    #[test]
    fn a_local_tensor_must_match_its_shape() {
        let error = Frame::pack(Element::F32, &[3], Bytes::from_static(&[0; 16]), Packing::Raw);
        assert_eq!(error, Err(FrameError::RawLength { announced: 16, expected: 12 }));
        let error = Frame::pack(Element::U8, &[1; 5], Bytes::from_static(&[0]), Packing::Raw);
        assert_eq!(error, Err(FrameError::Rank { rank: 5 }));
    }

    fn elements() -> impl Strategy<Value = (Element, Vec<u32>, Bytes)> {
        let element = prop::sample::select(vec![
            Element::F32,
            Element::Number(Codec::Bf16),
            Element::Number(Codec::Int8(Block::DEFAULT)),
            Element::Number(Codec::Int4(Block::DEFAULT)),
            Element::I64,
            Element::U32,
            Element::U8,
        ]);
        (element, prop::collection::vec(0u32..6, 0..=limits::TENSOR_RANK)).prop_flat_map(
            |(element, shape)| {
                let count = shape.iter().product::<u32>();
                let bytes = element.bytes_of(count.into()).expect("few") as usize;
                (Just(element), Just(shape), prop::collection::vec(0u8..3, bytes))
                    .prop_map(|(element, shape, raw)| (element, shape, raw.into()))
            },
        )
    }

    proptest! {
        #[test]
        fn a_frame_reads_back(
            (element, shape, raw) in elements(),
            packing in prop::sample::select(vec![Packing::Raw, Packing::Zstd, Packing::Integers, Packing::Bits]),
        ) {
            let sent = Frame::pack(element, &shape, raw.clone(), packing).expect("agrees");
            let header = Header::decode(&sent.header().encode()).expect("valid");
            let received = Frame::new(header, sent.body().clone()).expect("unchanged");
            prop_assert_eq!(received.element(), element);
            prop_assert_eq!(received.shape(), &shape[..]);
            prop_assert_eq!(received.unpack(), Ok(raw));
        }

        #[test]
        fn a_flipped_bit_is_always_detected(
            (element, shape, raw) in elements(),
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let sent = Frame::pack(element, &shape, raw, Packing::Zstd).expect("agrees");
            let mut wire = [&sent.header().encode()[..], sent.body()].concat();
            wire[at.index(sent.wire_length())] ^= 1 << bit;
            let (header, body) = wire.split_first_chunk::<HEADER>().expect("long enough");
            let body = Bytes::copy_from_slice(body);
            prop_assert!(Header::decode(header).and_then(|h| Frame::new(h, body)).is_err());
        }

        #[test]
        fn a_truncated_body_is_rejected((element, shape, raw) in elements()) {
            let sent = Frame::pack(element, &shape, raw, Packing::Zstd).expect("agrees");
            let length = sent.body().len();
            if length > 0 {
                let torn = sent.body().slice(..length - 1);
                prop_assert!(Frame::new(*sent.header(), torn).is_err());
            }
        }

        #[test]
        fn random_headers_are_rejected_or_within_the_limits(
            bytes in any::<[u8; 32]>(),
            rest in any::<[u8; 20]>(),
        ) {
            let noise: Vec<u8> = bytes.into_iter().chain(rest).collect();
            let noise: [u8; HEADER] = noise.try_into().expect("52 bytes");
            if let Ok(header) = Header::decode(&noise) {
                prop_assert!(header.raw_length() as u64 <= limits::TENSOR.0);
                prop_assert!(header.packed_length() <= header.raw_length());
            }
        }
    }
}
