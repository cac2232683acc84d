//! Bytes from a peer never cause allocations beyond their limit, whatever lengths they announce.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bytes::Bytes;
use proptest::prelude::*;
use shoal_protocol::codec::Codec;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame, HEADER, Header};
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Envelope, TensorTag};
use shoal_protocol::wire;

/// The system allocator, with a count of this thread's bytes.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|allocated| allocated.saturating_add(layout.size()));
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // Memory that another thread allocated may exceed the count of this one.
        count(|allocated| allocated.saturating_sub(layout.size()));
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn count(change: impl Fn(usize) -> usize) {
    // A thread that ends has no count.
    let _ = ALLOCATED.try_with(|allocated| {
        allocated.set(change(allocated.get()));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(allocated.get())));
    });
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The peak of allocated bytes during `work`, beyond those allocated before.
fn peak(work: impl FnOnce()) -> usize {
    let before = ALLOCATED.get();
    PEAK.set(before);
    work();
    PEAK.get() - before
}

/// Allowance for error messages and spare capacity of growing vectors.
const ALLOWANCE: usize = 4 << 10;

fn assert_limited<T: bincode::Decode<()>>(bytes: &[u8]) {
    let cap = limits::CONTROL_MESSAGE.0 as usize + ALLOWANCE;
    let peak = peak(|| drop(wire::decode::<T>(bytes)));
    assert!(peak <= cap, "{peak} bytes for a message of {}", bytes.len());
}

/// Bytes that resemble lengths: bincode's varints of two, four and eight bytes, and small ones.
fn lengths() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => 0u8..12, 2 => 251u8..=253, 1 => any::<u8>()];
    prop::collection::vec(byte, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn allocations_for_a_message_are_limited(bytes in lengths()) {
        assert_limited::<Envelope>(&bytes);
        assert_limited::<TensorTag>(&bytes);
        assert_limited::<Manifest>(&bytes);
    }

    #[test]
    fn allocations_for_a_body_follow_its_header(
        count in 0u32..1 << 18,
        integers in any::<bool>(),
        body in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let (element, packing) = if integers {
            (Element::I64, Packing::Integers)
        } else {
            (Element::Number(Codec::Bf16), Packing::Zstd)
        };
        let raw = count as usize * element.width();
        let Ok(frame) = Frame::seal(element, &[count], raw, (packing, body.into())) else {
            return Ok(());
        };
        let peak = peak(|| drop(frame.unpack()));
        prop_assert!(peak <= 2 * raw + ALLOWANCE, "{peak} bytes for {raw}");
    }
}

#[test]
fn a_rejected_header_allocates_nothing() {
    let raw = Bytes::from(vec![0; 64]);
    let frame = Frame::pack(Element::U8, &[64], raw, Packing::Raw).expect("it has its shape");
    let right = frame.header().encode();
    let peak = peak(|| {
        for place in 0..HEADER {
            let mut wrong = right;
            wrong[place] = 0xff;
            let _ = Header::decode(&wrong);
        }
    });
    assert_eq!(peak, 0);
}
