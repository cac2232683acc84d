//! Projections of a member's sums and of a round's result, by which its members check each other (see
//! [`Challenge`]).

use shoal_protocol::codec::{Block, Codec, SumCodec};
use shoal_protocol::message::{Challenge, PROJECTIONS, RoundCheck};

use crate::device::kernel::widest;

/// Standard deviations of rounding errors that a projection may be off: by Hoeffding's inequality honest members exceed
/// it once in `e^72` rounds.
const DEVIATIONS: f64 = 13.0;

/// Relative error of a sum of products in f64, of the sum of their magnitudes.
const ADDING: f64 = 1.0 / (1u64 << 42) as f64;

/// Numbers of one group of owners, as far as they were projected.
#[derive(Debug, Clone, Copy, Default)]
pub struct Projected {
    own: [f64; PROJECTIONS],
    result: [f64; PROJECTIONS],
    /// Sum of the magnitudes of both.
    magnitudes: f64,
    /// Sums of the squares of either.
    own_squares: f64,
    result_squares: f64,
}

impl Projected {
    /// Adds numbers that this member gave and numbers of the result, both of the elements from `start` on.
    pub(crate) fn add(&mut self, challenge: &Challenge, start: usize, own: &[f64], result: &[f32]) {
        project(self, challenge, start as u64, own, result);
    }

    /// The check, given the relative error of a number of the result.
    pub(crate) fn check(&self, codec: SumCodec) -> RoundCheck {
        // A forged number must not excuse itself by its size, so coarse codecs go by what was given: a block of the
        // result is no longer than the members' blocks together, so the members' slacks together suffice.
        let squares = if codec.is_exact() { self.result_squares } else { self.own_squares };
        let rounding = DEVIATIONS * relative_error(codec) * squares.sqrt();
        // The last is for numbers too small to have a relative error.
        let slack = rounding + ADDING * self.magnitudes + f64::from(f32::MIN_POSITIVE);
        RoundCheck { own: self.own, result: self.result, slack }
    }
}

/// How long the rounding errors of a result are, at most, relative to the numbers.
fn relative_error(codec: SumCodec) -> f64 {
    match codec {
        // Half a unit in the last place, after one rounding to f64 and one in the division.
        SumCodec::Exact | SumCodec::Integers => 1.0 / (1 << 24) as f64,
        // f32 is also added in.
        SumCodec::Rounded(Codec::F32) => 1.0 / (1 << 20) as f64,
        SumCodec::Rounded(Codec::F16) => 1.0 / (1 << 10) as f64,
        SumCodec::Rounded(Codec::Bf16) => 1.0 / (1 << 8) as f64,
        SumCodec::Rounded(Codec::Int8(block)) => of_block(block, 254.0),
        SumCodec::Rounded(Codec::Int4(block)) => of_block(block, 14.0),
        SumCodec::Rounded(Codec::Fp8(block)) => of_block(block, 254.0) + 1.0 / 16.0,
    }
}

/// The same where a block's numbers are off by half a step, of so many between its largest numbers, and one of them may
/// be all that it has.
fn of_block(block: Block, steps: f64) -> f64 {
    (block.numbers() as f64).sqrt() / steps
}

widest! {
    fn project(
        to: &mut Projected,
        challenge: &Challenge,
        start: u64,
        own: &[f64],
        result: &[f32],
    ) {
        const LANES: usize = 8;
        let mut sums = [[0f64; LANES]; 2 * PROJECTIONS];
        let mut magnitudes = [0f64; LANES];
        let (mut own_squares, mut result_squares) = ([0f64; LANES], [0f64; LANES]);
        let rows = own.chunks(LANES).zip(result.chunks(LANES));
        for ((own, result), start) in rows.zip((start..).step_by(LANES)) {
            for (lane, (own, result)) in own.iter().zip(result).enumerate() {
                // What is no number is not the sum of anything.
                let result = if result.is_finite() { f64::from(*result) } else { 0.0 };
                let own = *own;
                let factors = challenge.factors(start + lane as u64);
                for direction in 0..PROJECTIONS {
                    sums[direction][lane] += factors[direction] * own;
                    sums[PROJECTIONS + direction][lane] += factors[direction] * result;
                }
                magnitudes[lane] += own.abs() + result.abs();
                own_squares[lane] += own * own;
                result_squares[lane] += result * result;
            }
        }
        let total = |lanes: &[f64; LANES]| lanes.iter().sum::<f64>();
        for direction in 0..PROJECTIONS {
            to.own[direction] += total(&sums[direction]);
            to.result[direction] += total(&sums[PROJECTIONS + direction]);
        }
        to.magnitudes += total(&magnitudes);
        to.own_squares += total(&own_squares);
        to.result_squares += total(&result_squares);
    }
}
