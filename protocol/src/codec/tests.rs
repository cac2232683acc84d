use proptest::prelude::*;

use super::*;
use crate::ids::{ClaimKey, Microbatch, Stage, Step};
use crate::wire;

const ALL: [Codec; 8] = [
    Codec::F32,
    Codec::Bf16,
    Codec::F16,
    Codec::Int8(Block::DEFAULT),
    Codec::Int8(Block(4)),
    Codec::Int4(Block::DEFAULT),
    Codec::Int4(Block(12)),
    Codec::Fp8(Block::DEFAULT),
];

fn encoded(codec: Codec, numbers: &[f32], rounding: Rounding) -> Vec<u8> {
    let length = codec.bytes_of(numbers.len() as u64).expect("it fits");
    let mut bytes = vec![0xa5; length as usize];
    codec.encode(numbers, rounding, &mut bytes);
    bytes
}

fn decoded(codec: Codec, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut numbers = vec![f32::MAX; count];
    codec.decode(bytes, &mut numbers).expect("the right length");
    numbers
}

fn round_trip(codec: Codec, numbers: &[f32]) -> Vec<f32> {
    decoded(codec, &encoded(codec, numbers, Rounding::Nearest), numbers.len())
}

fn dither(microbatch: u32) -> Rounding {
    let microbatch = Microbatch(microbatch);
    let key = ClaimKey { step: Step(3), stage: Stage(1), microbatch };
    Rounding::Stochastic(Dither::of(7, key))
}

#[test]
fn a_codec_reads_back_its_own_text() {
    for codec in ALL {
        assert_eq!(codec.to_string().parse(), Ok(codec));
    }
    assert_eq!("int8".parse(), Ok(Codec::Int8(Block(6))));
    assert_eq!("int8:1024".parse(), Ok(Codec::Int8(Block(10))));
    for wrong in ["", "f64", "f32:64", "int8:", "int8:100", "int8:8", "int8:8192", "INT8"] {
        assert_eq!(wrong.parse::<Codec>(), Err(UnknownCodec(wrong.to_owned())));
    }
}

#[test]
fn the_layout_is_fixed() {
    // Two blocks, the second of three numbers.
    let mut numbers = [0.0; 19];
    numbers[..3].copy_from_slice(&[127.0, -1.0, 0.5]);
    numbers[16..].copy_from_slice(&[-3.5, 7.0, 1.0]);
    let int8 = encoded(Codec::Int8(Block(4)), &numbers, Rounding::Nearest);
    let scales = [1.0f32.to_le_bytes(), (7.0f32 / 127.0).to_le_bytes()].concat();
    assert_eq!(int8[..8], scales);
    // Ties go to even: 0.5 to 0, 63.5 to 64.
    assert_eq!(int8[8..11], [127, 255, 0]);
    assert_eq!(int8[8 + 16..], [(-64i8) as u8, 127, 18]);
    let int4 = encoded(Codec::Int4(Block(4)), &numbers, Rounding::Nearest);
    assert_eq!(int4[4..8], 1.0f32.to_le_bytes());
    assert_eq!(int4[8..10], [15 | 8 << 4, 8 | 8 << 4]);
    // -3.5 is rounded to -4; an odd block ends with a zero.
    assert_eq!(int4[8 + 8..], [4 | 9 << 4, 15 | 8 << 4]);
    let fp8 = encoded(Codec::Fp8(Block(4)), &[448.0, -1.0, 0.0019], Rounding::Nearest);
    assert_eq!(fp8, [&1.0f32.to_le_bytes()[..], &[0x7e, 0xb8, 1]].concat());
}

/// The expected values are those of PyTorch 2.11.
#[test]
fn sixteen_and_eight_bit_floats_match_pytorch() {
    let numbers = [0.1, -2.5, 1e-40, 65519.0, 65520.0, 3.000_000_2, -0.0, 1e-8];
    let codes = |codec| -> Vec<u16> {
        let bytes = encoded(codec, &numbers, Rounding::Nearest);
        bytes.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    };
    let f16 = [0x2e66, 0xc100, 0x0, 0x7bff, 0x7c00, 0x4200, 0x8000, 0x0];
    assert_eq!(codes(Codec::F16), f16);
    let bf16 = [0x3dcd, 0xc020, 0x1, 0x4780, 0x4780, 0x4040, 0x8000, 0x322c];
    assert_eq!(codes(Codec::Bf16), bf16);

    // Magnitudes from 2^-10 to 2^8, including ties, and one that makes the scale 1.
    let number = |i: i32| {
        let mantissa =
            1.0 + (i * 37 % 64) as f32 / 64.0 + if i % 3 == 0 { 1.0 / 16.0 } else { 0.0 };
        let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
        sign * mantissa * ((i % 19 - 10) as f32).exp2()
    };
    let numbers: Vec<f32> = (0..48).map(number).chain([448.0]).collect();
    let codes = [
        1, 130, 2, 135, 10, 151, 28, 160, 45, 178, 62, 195, 80, 212, 89, 230, 106, 247, 124, 129,
        2, 130, 7, 138, 24, 156, 32, 173, 50, 190, 67, 207, 84, 217, 101, 234, 119, 251, 1, 130, 2,
        135, 11, 151, 28, 161, 45, 177, 126,
    ];
    let coded = encoded(Codec::Fp8(Block::DEFAULT), &numbers, Rounding::Nearest);
    assert_eq!(coded[..4], 1.0f32.to_le_bytes());
    assert_eq!(coded[4..], codes);
    // All values of a byte, with a scale of 1.
    let all: Vec<u8> = 1.0f32.to_le_bytes().into_iter().chain(0..=255).collect();
    let values = decoded(Codec::Fp8(Block(8)), &all, 256);
    assert_eq!(values[..127].iter().map(|value| f64::from(*value)).sum::<f64>(), 5407.875);
    assert_eq!(values[120..127], [256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0]);
    assert!(values[127].is_nan() && values[255].is_nan());
    assert_eq!(values[129..135], [1, 2, 3, 4, 5, 6].map(|code| code as f32 / -512.0));
}

#[test]
fn a_non_finite_number_affects_only_its_block() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for codec in ALL {
            let mut numbers = vec![1.0; 9000];
            numbers[5000] = bad;
            let back = round_trip(codec, &numbers);
            let block = codec.block().map_or(1, Block::numbers);
            for (index, number) in back.iter().enumerate() {
                let affected = index / block == 5000 / block;
                assert_eq!(number.is_finite(), !affected, "{codec} {bad} {index}");
            }
        }
    }
}

#[test]
fn blocks_of_tiny_numbers_are_zeros() {
    for codec in ALL.into_iter().filter(|codec| codec.block().is_some()) {
        let tiny = [f32::MIN_POSITIVE / 8.0, -1e-31, 0.0, -0.0];
        assert_eq!(round_trip(codec, &tiny).map_bits(), [0; 4]);
        let least = [(-100f32).exp2(), 0.0];
        assert_eq!(round_trip(codec, &least)[1], 0.0);
        assert!(round_trip(codec, &least)[0] > 0.0);
        assert_eq!(round_trip(codec, &[f32::MAX / 2.0])[0].log2().round(), 127.0);
    }
}

trait Bits {
    fn map_bits(self) -> Vec<u32>;
}

impl Bits for Vec<f32> {
    fn map_bits(self) -> Vec<u32> {
        self.into_iter().map(f32::to_bits).collect()
    }
}

#[test]
fn stochastic_rounding_is_unbiased_and_depends_only_on_the_position() {
    // Each number lies 0.3 of the way from one code to the next.
    let numbers: Vec<f32> = std::iter::once(127.0).chain([10.3; 4095]).collect();
    let codec = Codec::Int8(Block(12));
    let bytes = encoded(codec, &numbers, dither(1));
    assert_eq!(bytes, encoded(codec, &numbers, dither(1)));
    assert_ne!(bytes, encoded(codec, &numbers, dither(2)));
    let up = bytes[5..].iter().filter(|code| **code == 11).count();
    assert!(bytes[5..].iter().all(|code| (10..=11).contains(code)));
    // Four standard deviations of a binomial around 1228.
    assert!((1110..=1346).contains(&up), "{up}");
    let mean = |codec: Codec, at: f32| {
        let numbers: Vec<f32> = std::iter::once(448.0).chain([at; 4095]).collect();
        let back = decoded(codec, &encoded(codec, &numbers, dither(1)), numbers.len());
        back[1..].iter().map(|number| f64::from(*number)).sum::<f64>() / 4095.0
    };
    for at in [300.0, -300.0, 10.1, -0.7, 0.0141] {
        let mean = mean(Codec::Fp8(Block(12)), at);
        // Adjacent codes differ by at most an eighth of the number; small ones by 2^-9.
        let apart = f64::from(at.abs() / 8.0).max(1.0 / 512.0);
        assert!((mean - f64::from(at)).abs() < apart * 4.0 * 0.5 / 64.0, "{at}: {mean}");
    }
    let first = Dither { key: 1 };
    assert_eq!([0, 1, 2].map(|index| first.bits(index)), [0x6889_90c0, 0x9f50_5634, 0x43c5_316a]);
}

#[test]
fn a_wrong_length_is_rejected() {
    for codec in ALL {
        let mut numbers = [0.0; 100];
        let bytes = encoded(codec, &numbers, Rounding::Nearest);
        for given in [0, bytes.len() - 1] {
            let error = codec.decode(&bytes[..given], &mut numbers).expect_err("too short");
            assert_eq!((error.given, error.expected), (given, bytes.len() as u64));
        }
    }
    assert_eq!(Codec::F32.bytes_of(u64::MAX), None);
    assert_eq!(Codec::Int8(Block(4)).bytes_of(u64::MAX), None);
}

/// Numbers of many magnitudes.
fn numbers() -> impl Strategy<Value = Vec<f32>> {
    let number =
        (-1.0f32..1.0, -40i32..40).prop_map(|(part, exponent)| part * (exponent as f32).exp2());
    prop::collection::vec(number, 0..400)
}

proptest! {
    #[test]
    fn rounding_errors_are_within_a_code_step(numbers in numbers(), stochastic in any::<bool>()) {
        for codec in ALL {
            let rounding = if stochastic { dither(0) } else { Rounding::Nearest };
            let bytes = encoded(codec, &numbers, rounding);
            let back = decoded(codec, &bytes, numbers.len());
            let block = codec.block().map_or(1, Block::numbers);
            for (numbers, back) in numbers.chunks(block).zip(back.chunks(block)) {
                let largest = numbers.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
                for (number, back) in numbers.iter().zip(back) {
                    // The step between codes; half of it when rounding to nearest.
                    let step = match codec {
                        Codec::F32 => 0.0,
                        Codec::Bf16 => number.abs() / 128.0,
                        Codec::F16 => (number.abs() / 1024.0).max(1.0 / 16_777_216.0),
                        Codec::Int8(_) => largest / 127.0,
                        Codec::Int4(_) => largest / 7.0,
                        Codec::Fp8(_) => (number.abs() / 8.0).max(largest / 448.0 / 512.0),
                    };
                    let share = if stochastic && codec.block().is_some() { 1.001 } else { 0.5001 };
                    let overflows = codec == Codec::F16 && number.abs() >= 65504.0;
                    let close = (number - back).abs() <= step * share + 1e-30;
                    prop_assert!(close || overflows, "{codec}: {number} became {back}");
                }
            }
        }
    }

    #[test]
    fn codecs_without_scales_are_idempotent(numbers in numbers()) {
        for codec in [Codec::F32, Codec::Bf16, Codec::F16] {
            let once = round_trip(codec, &numbers);
            prop_assert_eq!(round_trip(codec, &once).map_bits(), once.map_bits());
        }
    }

    #[test]
    fn any_bytes_of_the_right_length_decode(
        noise in prop::collection::vec(any::<u8>(), 0..600),
        count in 0usize..600,
    ) {
        for codec in ALL {
            let mut numbers = vec![0.0; count];
            let fits = codec.bytes_of(count as u64) == Some(noise.len() as u64);
            prop_assert_eq!(codec.decode(&noise, &mut numbers).is_ok(), fits);
        }
    }
}

#[test]
fn an_invalid_block_size_is_rejected() {
    let named = |exponent: u8| wire::decode::<Block>(&[exponent]).ok();
    for exponent in 0..=u8::MAX {
        assert_eq!(named(exponent), Block::of_exponent(exponent), "{exponent}");
    }
}
