//! Duration of the arithmetic of an all-reduce: all computations of its members, one after the
//! other on one thread, without links. `make bench-all-reduce` compares rounds with it.
//!
//! `cargo run --release --example round_speed MODE VALUES MEMBERS` prints the median seconds of a
//! round, for all members together.

use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;
use shoal_engine::AllReduce;
use shoal_protocol::codec::SumCodec;
use shoal_protocol::codec::packing::{Packing, pack, unpack};
use shoal_protocol::limits::ROUND_BLOCK_ELEMENTS;
use shoal_protocol::manifest::example;

const ROUNDS: usize = 7;

/// Bytes of a sum.
const WIDTH: usize = size_of::<i64>();

struct Member {
    sums: Vec<u8>,
    stage: AllReduce,
}

impl Member {
    /// The part as decoded by its reducer.
    fn part(&mut self, range: &Range<usize>, codec: SumCodec) -> Bytes {
        let sums = &self.sums[WIDTH * range.start..WIDTH * range.end];
        let part = self.stage.part(range.clone(), sums, &[]).expect("whole sums");
        if codec != SumCodec::Exact {
            return part;
        }
        let length = part.len();
        let (packing, packed) = pack(Packing::Integers, WIDTH, part);
        unpack(packing, WIDTH, packed, length).expect("what was packed")
    }
}

/// Sums of gradients, most of which are small: about 5 bytes each.
fn sums(seed: u64, values: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        // Knuth's MMIX generator.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state as i64 >> 28
    };
    (0..values).flat_map(|_| next().to_le_bytes()).collect()
}

fn round(members: &mut [Member], values: usize, codec: SumCodec) {
    members.iter_mut().for_each(|member| member.stage.begin());
    let blocks = values.div_ceil(ROUND_BLOCK_ELEMENTS);
    for block in 0..blocks {
        let range = block * ROUND_BLOCK_ELEMENTS..values.min((block + 1) * ROUND_BLOCK_ELEMENTS);
        let owner = block * members.len() / blocks;
        let mut parts = Vec::new();
        for place in (0..members.len()).filter(|place| *place != owner) {
            parts.push(members[place].part(&range, codec));
        }
        let Member { sums, stage } = &mut members[owner];
        let own = &sums[WIDTH * range.start..WIDTH * range.end];
        let result = stage.reduce(range.clone(), own, &parts).expect("whole parts");
        for place in (0..members.len()).filter(|place| *place != owner) {
            members[place].stage.install(range.clone(), &result).expect("a whole result");
        }
    }
    let outcome = members[0].stage.outcome();
    for member in members {
        assert_eq!(member.stage.outcome(), outcome, "all hold the same");
        member.stage.commit();
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, values, members] = &arguments[..] else { panic!("MODE VALUES MEMBERS") };
    let (values, members): (usize, u64) =
        (values.parse().expect("values"), members.parse().expect("members"));
    let mut manifest = example::small();
    manifest.codec.all_reduce = mode.parse().expect("a mode of the all-reduce");
    let codec = manifest.codec.all_reduce;
    let member = |seed| Member {
        sums: sums(seed, values),
        stage: AllReduce::new(&manifest, values).expect("memory"),
    };
    let mut members: Vec<Member> = (1..=members).map(member).collect();
    let mut seconds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round(&mut members, values, codec);
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!("{:.4}", seconds[ROUNDS / 2]);
}
