//! A member's computations in the all-reduce of one stage.

use std::ops::Range;

use bytes::Bytes;
use shoal_protocol::codec::{Codec, Rounding, SumCodec};
use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::limits::ROUND_BLOCK_ELEMENTS as BLOCK;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Challenge, RoundCheck};
use tch::{Device, Kind, Tensor};

use crate::device::kernel::widest;
use crate::device::tensor::{bytes_of, elements, elements_mut};
use crate::error::{EngineError, Result};
use crate::numeric::fixed_point::{FixedPoint, add_words};
use crate::numeric::projection::Projected;
use crate::optimizer::carried_elements;
use crate::train::token_counts::square_norm_without;

/// Elements that are projected at a time: whole blocks of every codec.
const PROJECTED: usize = BLOCK;

/// The mean gradient of one stage, assembled round by round.
///
/// If sums are rounded, this member keeps the rounding error of its numbers until the round is
/// committed, separately from the error of earlier rounds: a failed attempt changes nothing. The
/// member that reduces a range keeps the rounding error of its result. So, over all members, the
/// applied and the kept amounts always add up to the accumulated ones.
///
/// In a round that continues without lost members, the errors that those kept are lost too. A range
/// may be received again from another member and be sent again; then the error of the last rounding
/// is kept.
#[derive(Debug)]
pub struct AllReduce {
    fixed_point: FixedPoint,
    codec: SumCodec,
    /// f32, flat, on the processor.
    mean: Tensor,
    /// The elements of weights' gradients, which come first; the norm is that of these.
    weights: usize,
    /// The ranges among these that count tokens, and are not part of the norm.
    pub(crate) counts: Vec<Range<usize>>,
    /// Hash and norm of each block of the mean, computed as blocks become complete, while others
    /// are in transit.
    blocks: Vec<Block>,
    /// Errors kept from earlier rounds, for this one; empty if the codec is lossless.
    kept: Vec<f32>,
    /// Errors of this round, for the next; complete once all of the vector was sent or reduced.
    keeps: Vec<f32>,
    /// Number of elements of this round whose errors may be kept.
    given: usize,
    /// Buffers for a piece: the numbers to encode, and their decoded values.
    numbers: Vec<f32>,
    rounded: Vec<f32>,
}

/// A block of elements of the mean; the last one may be shorter.
#[derive(Debug, Clone)]
struct Block {
    /// Number of elements that have not arrived.
    missing: usize,
    hash: ContentHash,
    square_norm: f64,
}

impl AllReduce {
    /// Creates the state for a stage of `elements` elements, without kept errors.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn new(manifest: &Manifest, elements: usize) -> Result<Self> {
        let codec = manifest.codec.all_reduce;
        let kept = if codec.loses() { elements } else { 0 };
        Ok(Self {
            fixed_point: FixedPoint::of(manifest),
            codec,
            mean: Tensor::f_zeros([elements as i64], (Kind::Float, Device::Cpu))?,
            // A run that carries moments has one stage.
            weights: elements - carried_elements(manifest, Stage(0)),
            counts: Vec::new(),
            blocks: empty(elements),
            kept: vec![0.0; kept],
            keeps: vec![0.0; kept],
            given: 0,
            numbers: Vec::new(),
            rounded: Vec::new(),
        })
    }

    /// A handle of the mean, whose memory may be elsewhere while nothing is reduced or installed.
    pub(crate) fn mean_tensor(&self) -> Tensor {
        self.mean.shallow_clone()
    }

    /// Begins another attempt or step: no piece has arrived.
    pub fn begin(&mut self) {
        self.given = 0;
        self.blocks = empty(self.mean.numel());
    }

    /// Encodes this member's sums of a range (i64, little-endian) for the member that adds them, with the
    /// results of [`AllReduce::part`] of others of its island.
    ///
    /// # Errors
    /// If one differs in length from the range.
    ///
    /// # Panics
    /// If there are others' in a codec that rounds: rounds have no islands then.
    pub fn part(&mut self, range: Range<usize>, sums: &[u8], others: &[Bytes]) -> Result<Bytes> {
        let SumCodec::Rounded(codec) = self.codec else {
            if others.is_empty() {
                return Ok(Bytes::copy_from_slice(sums));
            }
            let all = std::iter::once(sums).chain(others.iter().map(Bytes::as_ref));
            return add_parts(&all.collect::<Vec<_>>(), range.len());
        };
        assert!(others.is_empty(), "a round's layout has no islands in a codec that rounds");
        self.own(range.clone(), sums)?;
        let bytes = encode(codec, &self.numbers);
        self.given += range.len();
        if let Some(keeps) = self.keeps.get_mut(range) {
            self.rounded.resize(self.numbers.len(), 0.0);
            decode(codec, &bytes, &mut self.rounded)?;
            difference(keeps, &self.numbers, &self.rounded);
        }
        Ok(bytes)
    }

    /// Reduces a range of all members: adds this member's sums (i64, little-endian) and the other
    /// members' results of [`AllReduce::part`], in the same order in every attempt. Returns the
    /// result for the others to install.
    ///
    /// # Errors
    /// If one differs in length from the range.
    pub fn reduce(&mut self, range: Range<usize>, sums: &[u8], others: &[Bytes]) -> Result<Bytes> {
        let all = || std::iter::once(sums).chain(others.iter().map(Bytes::as_ref));
        let codec = match self.codec {
            SumCodec::Exact => {
                let mean = self.fixed_point.reduce(&all().collect::<Vec<_>>())?;
                self.install(range, &mean)?;
                return Ok(mean);
            }
            SumCodec::Integers => {
                let whole = add_parts(&all().collect::<Vec<_>>(), range.len())?;
                self.install(range, &whole)?;
                return Ok(whole);
            }
            SumCodec::Rounded(codec) => codec,
        };
        self.own(range.clone(), sums)?;
        self.rounded.resize(self.numbers.len(), 0.0);
        for other in others {
            decode(codec, other, &mut self.rounded)?;
            add(&mut self.numbers, &self.rounded);
        }
        let bytes = encode(codec, &self.numbers);
        self.given += range.len();
        let mean = &mut elements_mut(&mut self.mean)[range.clone()];
        decode(codec, &bytes, mean)?;
        if let Some(keeps) = self.keeps.get_mut(range.clone()) {
            difference(keeps, &self.numbers, mean);
        }
        self.measure(range);
        Ok(bytes)
    }

    /// Installs a range that another member reduced.
    ///
    /// # Errors
    /// If its length is wrong.
    pub fn install(&mut self, range: Range<usize>, result: &[u8]) -> Result<()> {
        let mean = &mut elements_mut(&mut self.mean)[range.clone()];
        match self.codec {
            SumCodec::Exact => decode(Codec::F32, result, mean)?,
            SumCodec::Integers => self.fixed_point.means(&[result], mean)?,
            SumCodec::Rounded(codec) => decode(codec, result, mean)?,
        }
        self.measure(range);
        Ok(())
    }

    /// Notes the arrival of elements and measures the blocks that they complete. Complete blocks
    /// may arrive again.
    fn measure(&mut self, range: Range<usize>) {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        for (index, block) in blocks.clone().zip(&mut self.blocks[blocks]) {
            let whole = index * BLOCK..self.mean.numel().min((index + 1) * BLOCK);
            let (start, end) = (whole.start.max(range.start), whole.end.min(range.end));
            if block.missing == 0 {
                block.missing = whole.len();
            }
            assert!(block.missing >= end - start, "a block's elements arrive once, or all again");
            block.missing -= end - start;
            if block.missing == 0 {
                let of_weights = self.weights.clamp(whole.start, whole.end) - whole.start;
                let first = whole.start;
                let bytes: &[u8] = bytemuck::cast_slice(&elements::<f32>(&self.mean)[whole]);
                let of_weights = &bytes[..of_weights * size_of::<f32>()];
                block.hash = ContentHash::of(bytes);
                block.square_norm = square_norm_without(of_weights, first, &self.counts);
            }
        }
    }

    /// The mean gradient, once all of it was reduced or installed: f32, little-endian.
    #[must_use]
    pub fn mean(&self) -> &[u8] {
        bytes_of(&self.mean)
    }

    /// The hash of the hashes of the mean gradient's blocks, and its contribution to the global
    /// norm: see [`square_norm`], which uses the same blocks.
    ///
    /// # Panics
    /// If a part of it was neither reduced nor installed.
    #[must_use]
    pub fn outcome(&self) -> (ContentHash, f64) {
        assert!(self.blocks.iter().all(|block| block.missing == 0), "the mean is whole");
        let hashes: Vec<u8> = self.blocks.iter().flat_map(|block| block.hash.0).collect();
        let norm = self.blocks.iter().fold(0.0, |sum, block| sum + block.square_norm);
        (ContentHash::of(&hashes), norm)
    }

    /// Adds to the projections of a group of owners what the result's challenge makes of a range: this member's
    /// contribution, as it gave it to the owner or, if it is the owner, added it itself; and the result.
    ///
    /// # Errors
    /// If the sums differ in length from the range.
    pub fn project(
        &mut self,
        challenge: &Challenge,
        (range, is_owner): (Range<usize>, bool),
        sums: &[u8],
        group: &mut Projected,
    ) -> Result<()> {
        let mut numbers = [0f64; PROJECTED];
        let parts = sums.chunks(PROJECTED * size_of::<i64>());
        for (start, sums) in range.clone().step_by(PROJECTED).zip(parts) {
            let part = start..range.end.min(start + PROJECTED);
            let numbers = &mut numbers[..part.len()];
            match self.codec {
                SumCodec::Exact | SumCodec::Integers => {
                    self.fixed_point.contributions(sums, numbers)?;
                }
                SumCodec::Rounded(codec) => {
                    self.own(part.clone(), sums)?;
                    if !is_owner {
                        let bytes = encode(codec, &self.numbers);
                        decode(codec, &bytes, &mut self.numbers)?;
                    }
                    let given = numbers.iter_mut().zip(&self.numbers);
                    given.for_each(|(number, given)| *number = f64::from(*given));
                }
            }
            let result = &elements::<f32>(&self.mean)[part];
            group.add(challenge, start, numbers, result);
        }
        Ok(())
    }

    /// The check of a group of owners.
    #[must_use]
    pub fn check(&self, group: &Projected) -> RoundCheck {
        group.check(self.codec)
    }

    /// The round is committed: replaces the kept errors of earlier rounds, which have been added.
    pub fn commit(&mut self) {
        // A listener sent nothing.
        if self.given > 0 && !self.kept.is_empty() {
            assert!(self.given >= self.kept.len(), "a result is whole when all gave their parts");
            std::mem::swap(&mut self.kept, &mut self.keeps);
        }
        self.given = 0;
    }

    /// The round is committed, and its result not used: the errors of earlier rounds stay, which were added to it.
    pub fn forgo(&mut self) {
        self.given = 0;
    }

    /// Computes this member's contribution to the mean, including its kept errors.
    fn own(&mut self, range: Range<usize>, sums: &[u8]) -> Result<()> {
        let (expected, found) = (size_of::<i64>() * range.len(), sums.len());
        if found != expected {
            let what = "sums for an all-reduce";
            return Err(EngineError::WrongLength { what, expected, found });
        }
        self.numbers.resize(range.len(), 0.0);
        self.fixed_point.means(&[sums], &mut self.numbers)?;
        if let Some(kept) = self.kept.get(range) {
            add(&mut self.numbers, kept);
        }
        Ok(())
    }
}

/// The sums of all members' sums.
fn add_parts(parts: &[&[u8]], elements: usize) -> Result<Bytes> {
    let mut whole = vec![0i64; elements];
    for part in parts {
        if part.len() != size_of_val(&whole[..]) {
            let (what, expected) = ("sums for an all-reduce", size_of_val(&whole[..]));
            return Err(EngineError::WrongLength { what, expected, found: part.len() });
        }
        add_words(&mut whole, part);
    }
    Ok(bytemuck::cast_slice(&whole).to_vec().into())
}

widest! {
    /// Adds numbers element by element.
    fn add(to: &mut [f32], numbers: &[f32]) {
        for (to, number) in to.iter_mut().zip(numbers) {
            *to += number;
        }
    }
}

widest! {
    /// The rounding errors of numbers.
    fn difference(keeps: &mut [f32], numbers: &[f32], rounded: &[f32]) {
        for ((keeps, number), rounded) in keeps.iter_mut().zip(numbers).zip(rounded) {
            *keeps = number - rounded;
        }
    }
}

/// The blocks of `elements` elements, none of which has arrived.
fn empty(elements: usize) -> Vec<Block> {
    let missing = |start: usize| BLOCK.min(elements - start);
    let block = |missing| Block { missing, hash: ContentHash([0; 32]), square_norm: 0.0 };
    (0..elements).step_by(BLOCK).map(|start| block(missing(start))).collect()
}

fn encode(codec: Codec, numbers: &[f32]) -> Bytes {
    let length = codec.bytes_of(numbers.len() as u64).expect("numbers in memory");
    let mut bytes = vec![0; length as usize];
    codec.encode(numbers, Rounding::Nearest, &mut bytes);
    bytes.into()
}

fn decode(codec: Codec, bytes: &[u8], numbers: &mut [f32]) -> Result<()> {
    codec.decode(bytes, numbers).map_err(|wrong| EngineError::WrongLength {
        what: "a piece of an all-reduce",
        expected: wrong.expected as usize,
        found: wrong.given,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::numeric::square_norm::square_norm;
    use crate::testing::manifest;

    const ELEMENTS: usize = 2 * BLOCK + 600;

    /// Sums that represent these contributions to the mean.
    fn sums(numbers: &[f32]) -> Bytes {
        let whole = 44f64.exp2() * f64::from(manifest().training.microbatches);
        numbers
            .iter()
            .flat_map(|number| ((f64::from(*number) * whole) as i64).to_le_bytes())
            .collect()
    }

    fn members(codec: &str, count: usize) -> Vec<AllReduce> {
        let mut manifest = manifest();
        manifest.codec.all_reduce = codec.parse().expect("a codec");
        (0..count).map(|_| AllReduce::new(&manifest, ELEMENTS).expect("memory")).collect()
    }

    /// One round in which each member reduces an equal range, the last one first.
    fn round(members: &mut [AllReduce], contributions: &[Vec<f32>]) {
        let count = members.len();
        let range = |owner: usize| owner * ELEMENTS / count..(owner + 1) * ELEMENTS / count;
        members.iter_mut().for_each(AllReduce::begin);
        for owner in (0..count).rev() {
            let range = range(owner);
            let own = |member: usize| sums(&contributions[member][range.clone()]);
            let others = (0..count).filter(|member| *member != owner);
            let parts: Vec<Bytes> = others
                .map(|member| {
                    members[member].part(range.clone(), &own(member), &[]).expect("whole")
                })
                .collect();
            let sums = own(owner);
            let result = members[owner].reduce(range.clone(), &sums, &parts).expect("whole");
            for member in (0..count).filter(|member| *member != owner) {
                members[member].install(range.clone(), &result).expect("whole");
            }
        }
    }

    fn mean(member: &AllReduce) -> &[f32] {
        elements(&member.mean)
    }

    fn wave(phase: f32) -> Vec<f32> {
        (0..ELEMENTS).map(|index| (index as f32 * 0.7 + phase).sin()).collect()
    }

    #[test]
    fn all_members_hold_the_same_in_every_codec() {
        let contributions = [wave(0.0), wave(1.0), wave(2.0)];
        for (codec, error) in
            [("exact", 1e-6), ("integers", 1e-6), ("f32", 1e-6), ("bf16", 0.03), ("int8", 0.05)]
        {
            let mut members = members(codec, 3);
            round(&mut members, &contributions);
            let outcome = members[0].outcome();
            assert!(members.iter().all(|member| member.outcome() == outcome), "{codec}");
            assert_eq!(outcome.1.to_bits(), square_norm(members[0].mean()).to_bits());
            let blocks = members[0].mean().chunks(size_of::<f32>() * BLOCK).map(ContentHash::of);
            let hashes: Vec<u8> = blocks.flat_map(|hash| hash.0).collect();
            assert_eq!(outcome.0, ContentHash::of(&hashes));
            for (index, mean) in mean(&members[0]).iter().enumerate() {
                let exact: f32 = contributions.iter().map(|all| all[index]).sum();
                assert!((mean - exact).abs() < error, "{codec} {index}: {mean} {exact}");
            }
        }
    }

    /// For each owner after a round in which each member reduced an equal range: how far the projected sums of all members
    /// are from the projected result, and how far they may be.
    fn differences(all: &mut [AllReduce], contributions: &[Vec<f32>]) -> Vec<(f64, f64)> {
        let count = all.len();
        let (hash, _) = all[0].outcome();
        let id = shoal_protocol::message::RoundId {
            era: shoal_protocol::ids::Era(0),
            term: shoal_protocol::ids::Term(1),
            step: shoal_protocol::ids::Step(0),
            weights: shoal_protocol::ids::WeightGroup(0),
            attempt: shoal_protocol::ids::Attempt(0),
        };
        let challenge = Challenge::of(id, hash);
        let mut of_owner = |owner: usize| {
            let range = owner * ELEMENTS / count..(owner + 1) * ELEMENTS / count;
            let check = |(member, numbers): (usize, &Vec<f32>)| {
                let mut group = Projected::default();
                let sums = sums(&numbers[range.clone()]);
                let part = (range.clone(), member == owner);
                all[member].project(&challenge, part, &sums, &mut group).expect("whole");
                all[member].check(&group)
            };
            let checks: Vec<RoundCheck> = contributions.iter().enumerate().map(check).collect();
            let given: f64 = checks.iter().map(|check| check.own[0]).sum();
            let slack: f64 = checks.iter().map(|check| check.slack).sum();
            ((given - checks[0].result[0]).abs(), slack)
        };
        (0..count).map(&mut of_owner).collect()
    }

    #[test]
    fn projections_add_up_if_one_member_gave_all() {
        let contributions = [wave(0.0), vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]];
        for codec in ["exact", "integers", "f32", "f16", "bf16", "int8:32", "int4:16", "fp8:32"] {
            let mut members = members(codec, 3);
            round(&mut members, &contributions);
            for (difference, slack) in differences(&mut members, &contributions) {
                assert!(difference <= slack, "{codec}: {difference} of {slack}");
            }
        }
    }

    #[test]
    fn projections_of_sums_add_up_to_those_of_the_result_unless_it_is_forged() {
        let contributions = [wave(0.0), wave(1.0), wave(2.0)];
        for codec in ["exact", "integers", "f32", "bf16", "int8", "int4:16"] {
            let mut members = members(codec, 3);
            round(&mut members, &contributions);
            for (difference, slack) in differences(&mut members, &contributions) {
                assert!(difference <= slack, "{codec}: {difference} of {slack}");
            }
            // One number of the second owner's piece, and something that is no number.
            let forged = ELEMENTS / 2;
            for by in [1.0, 1e30, f32::NAN] {
                for member in &mut members {
                    elements_mut::<f32>(&mut member.mean)[forged] += by;
                }
                let found: Vec<bool> = differences(&mut members, &contributions)
                    .iter()
                    .map(|(difference, slack)| difference > slack)
                    .collect();
                let coarse = codec.starts_with("int4") || codec == "int8" || codec == "bf16";
                if !coarse || by == 1e30 {
                    assert_eq!(found, [false, true, false], "{codec} {by}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn applied_and_kept_amounts_equal_the_added_ones(
            codec in prop::sample::select(vec!["bf16", "int8", "int4:16"]),
            rounds in 1usize..8,
            phase in 0f32..6.0,
        ) {
            let mut members = members(codec, 2);
            let (mut applied, mut added) = (vec![0f64; ELEMENTS], vec![0f64; ELEMENTS]);
            for step in 0..rounds {
                let contributions = [wave(phase + step as f32), wave(phase * 3.0)];
                // A failed attempt.
                round(&mut members, &contributions);
                round(&mut members, &contributions);
                for index in 0..ELEMENTS {
                    applied[index] += f64::from(mean(&members[0])[index]);
                    added[index] += contributions.iter().map(|all| f64::from(all[index])).sum::<f64>();
                }
                members.iter_mut().for_each(AllReduce::commit);
            }
            for index in 0..ELEMENTS {
                let kept: f64 = members.iter().map(|member| f64::from(member.kept[index])).sum();
                prop_assert!((applied[index] + kept - added[index]).abs() < 1e-5 * rounds as f64);
            }
        }
    }

    #[test]
    fn an_islands_sum_gives_the_same_mean() {
        let contributions = [wave(0.0), wave(1.0), wave(2.0)];
        for codec in ["exact", "integers"] {
            let mut flat = members(codec, 3);
            round(&mut flat, &contributions);
            let [mut owner, mut collector, mut mate] =
                <[AllReduce; 3]>::try_from(members(codec, 3)).expect("three");
            let range = 0..ELEMENTS;
            let part = mate.part(range.clone(), &sums(&contributions[2]), &[]).expect("whole");
            let own = sums(&contributions[1]);
            let part = collector.part(range.clone(), &own, &[part]).expect("whole");
            owner.reduce(range.clone(), &sums(&contributions[0]), &[part]).expect("whole");
            assert_eq!(owner.outcome(), flat[0].outcome(), "{codec}");
            let short = collector.part(range, &own, &[Bytes::from_static(&[0; 8])]);
            assert!(matches!(short, Err(EngineError::WrongLength { .. })));
        }
    }

    #[test]
    fn a_round_is_measured_anew_after_a_failed_one() {
        let mut members = members("exact", 2);
        round(&mut members, &[wave(0.0), wave(1.0)]);
        let first = members[0].outcome();
        // Half of another attempt.
        members[0].begin();
        let half = 0..ELEMENTS / 2;
        let zeros = Bytes::from(vec![0; size_of::<f32>() * half.len()]);
        members[0].install(half, &zeros).expect("whole");
        round(&mut members, &[wave(0.0), wave(2.0)]);
        let second = members[0].outcome();
        assert!(first.0 != second.0 && members[1].outcome() == second);
        round(&mut members, &[wave(0.0), wave(1.0)]);
        assert_eq!(members[0].outcome(), first);
    }

    #[test]
    fn repeated_pieces_are_measured_again() {
        let contributions = [wave(0.0), wave(1.0)];
        let mut members = members("exact", 2);
        round(&mut members, &contributions);
        let outcome = members[0].outcome();
        // The reducer of these ranges is lost, and another member replaces it.
        let others = 0..2 * BLOCK;
        let zeros = Bytes::from(vec![0; size_of::<f32>() * others.len()]);
        members[0].install(others.clone(), &zeros).expect("whole");
        assert!(members[0].outcome().0 != outcome.0);
        let own = sums(&contributions[1][others.clone()]);
        let part = members[1].part(others.clone(), &own, &[]);
        let own = sums(&contributions[0][others.clone()]);
        members[0].reduce(others, &own, &[part.expect("whole")]).expect("whole");
        assert_eq!(members[0].outcome(), outcome);
    }

    #[test]
    fn a_listener_keeps_no_errors() {
        let mut both = members("int8", 2);
        let mut listener = members("int8", 1).remove(0);
        round(&mut both, &[wave(0.0), wave(1.0)]);
        let range = 0..ELEMENTS;
        listener.begin();
        let bytes = {
            let mut alone = members("int8", 1).remove(0);
            alone.reduce(range.clone(), &sums(&wave(0.0)), &[]).expect("whole")
        };
        listener.install(range, &bytes).expect("whole");
        listener.commit();
        assert!(listener.kept.iter().all(|kept| *kept == 0.0));
        both[0].commit();
        assert!(both[0].kept.iter().any(|kept| *kept != 0.0));
    }

    #[test]
    fn pieces_of_another_length_are_refused() {
        let mut member = members("int8", 1).remove(0);
        let wrong = |result: Result<()>| matches!(result, Err(EngineError::WrongLength { .. }));
        assert!(wrong(member.install(0..10, &[0; 10])));
        assert!(wrong(member.part(0..10, &sums(&[0.0; 9]), &[]).map(|_| ())));
        assert!(wrong(member.reduce(0..10, &sums(&[0.0; 10]), &[Bytes::new()]).map(|_| ())));
    }
}
