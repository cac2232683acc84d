//! Bytes from a peer make nobody allocate more than their cap, whatever they announce.

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

/// The system's, which counts what one thread asks for.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|held| held.saturating_add(layout.size()));
        // SAFETY: what holds for this call holds for that.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // What another thread allocated may be more than this one holds.
        count(|held| held.saturating_sub(layout.size()));
        // SAFETY: what holds for this call holds for that.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn count(change: impl Fn(usize) -> usize) {
    // A thread that ends has no count any more.
    let _ = HELD.try_with(|held| {
        held.set(change(held.get()));
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes held at once while this ran, beyond those held before.
fn most(work: impl FnOnce()) -> usize {
    let before = HELD.get();
    MOST.set(before);
    work();
    MOST.get() - before
}

/// What errors say, and what growing vectors have too much, is beside what is capped.
const BESIDE: usize = 4 << 10;

fn refused_cheaply<T: bincode::Decode<()>>(bytes: &[u8]) {
    let cap = limits::CONTROL_MESSAGE.0 as usize + BESIDE;
    let most = most(|| drop(wire::decode::<T>(bytes)));
    assert!(most <= cap, "{most} bytes for a message of {}", bytes.len());
}

/// Bytes that look like lengths: bincode's varints of two, four and eight bytes, and small ones.
fn lengths() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => 0u8..12, 2 => 251u8..=253, 1 => any::<u8>()];
    prop::collection::vec(byte, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn a_message_is_capped_whatever_it_announces(bytes in lengths()) {
        refused_cheaply::<Envelope>(&bytes);
        refused_cheaply::<TensorTag>(&bytes);
        refused_cheaply::<Manifest>(&bytes);
    }

    #[test]
    fn a_body_is_unpacked_into_what_its_header_announced(
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
        let most = most(|| drop(frame.unpack()));
        prop_assert!(most <= 2 * raw + BESIDE, "{most} bytes for {raw}");
    }
}

#[test]
fn a_header_that_is_refused_costs_nothing() {
    let raw = Bytes::from(vec![0; 64]);
    let frame = Frame::pack(Element::U8, &[64], raw, Packing::Raw).expect("it has its shape");
    let right = frame.header().encode();
    let most = most(|| {
        for place in 0..HEADER {
            let mut wrong = right;
            wrong[place] = 0xff;
            let _ = Header::decode(&wrong);
        }
    });
    assert_eq!(most, 0);
}
