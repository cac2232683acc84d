//! Packed matrices against bitsandbytes.

use serde_json::Value;
use tch::{Kind, Tensor};

use super::*;
use crate::device::shim::gradients;
use crate::device::tensor::{bytes_of, elements};
use crate::model::factor::Factor;

/// Made by `engine/tests/python/nf4.py`.
const GOLDEN: &str = include_str!("golden.json");

fn golden() -> Value {
    serde_json::from_str(GOLDEN).expect("JSON")
}

/// The numbers of the generator in that file.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let high = (state >> 40) as f64;
        let scale = 0.01 + (state >> 33 & 7) as f64 / 64.0;
        ((high - 8_388_608.0) / 8_388_608.0 * scale) as f32
    };
    (0..count).map(next).collect()
}

/// FNV-1a of 64 bits.
pub(crate) fn fingerprint(bytes: &[u8]) -> String {
    let digest = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{digest:016x}")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn section_of(values: &[f32]) -> Vec<u8> {
    packed(values, 1)
}

fn numbers_of<N: Number>(section: &[u8], weights: usize) -> Vec<N> {
    let mut out = vec![N::store(0.0); weights];
    unpack(section, weights, 0, &mut out);
    out
}

#[test]
fn values_are_those_of_bitsandbytes() {
    let golden = golden();
    let levels: Vec<u64> = SCALE_LEVELS.map(|level| u64::from(level.to_bits())).to_vec();
    assert_eq!(serde_json::json!(levels), golden["scale_levels"]);
    for case in golden["cases"].as_array().expect("cases") {
        let name = format!("{} {}", case["shape"], case["dtype"]);
        let number = |value: &Value| value.as_u64().expect("a number");
        let count = case["shape"].as_array().expect("extents").iter().map(number).product::<u64>();
        let mut weights = values(number(&case["seed"]), count as usize);
        let dtype = if case["dtype"] == "f32" { Dtype::F32 } else { Dtype::Bf16 };
        if dtype == Dtype::Bf16 {
            weights.iter_mut().for_each(|one| *one = Bf16::store(*one).load());
        }
        // Theirs is summed in f32.
        let mean = f32::from_bits(number(&case["mean"]) as u32);
        let own = section_of(&weights);
        let own = u32::from_le_bytes(own[..4].try_into().expect("four"));
        assert!(own.abs_diff(mean.to_bits()) <= 1, "{name}: {own:x} instead of {mean}");
        let mut section = vec![0; section_bytes(weights.len())];
        pack_with(&weights, &mut section, 3, |_| mean);
        let places = Places::of(weights.len());
        let bits = |at: usize| {
            u64::from(u32::from_le_bytes(section[at..at + 4].try_into().expect("four")))
        };
        let magnitudes: Vec<u64> = (4..places.scales).step_by(4).map(bits).collect();
        assert_eq!(serde_json::json!(magnitudes), case["magnitudes"], "{name}");
        assert_eq!(hex(&section[places.scales..places.codes]), case["scales"], "{name}");
        let codes = &section[places.codes..places.codes + weights.len().div_ceil(2)];
        assert_eq!(fingerprint(codes), case["codes"], "{name}");
        let bytes: Vec<u8> = match dtype {
            Dtype::F32 => {
                numbers_of(&section, weights.len()).into_iter().flat_map(f32::to_le_bytes).collect()
            }
            Dtype::Bf16 => {
                let unpacked: Vec<Bf16> = numbers_of(&section, weights.len());
                let upper = |one: Bf16| one.load().to_le_bytes()[2..].to_vec();
                unpacked.into_iter().flat_map(upper).collect()
            }
        };
        assert_eq!(fingerprint(&bytes), case["unpacked"], "{name}");
    }
}

#[test]
fn a_weight_takes_little_more_than_half_a_byte() {
    let bytes = section_bytes(4096 * 4096) as f64 / (4096.0 * 4096.0);
    assert!((0.515..0.52).contains(&bytes), "{bytes} bytes");
}

#[test]
fn threads_change_no_byte() {
    for count in [1, 64, 65, 500, 20_000] {
        let weights = values(4, count);
        let expected = section_of(&weights);
        for threads in [2, 3, 64] {
            assert!(packed(&weights, threads) == expected, "{count} weights, {threads} threads");
        }
    }
}

#[test]
fn parts_are_those_of_the_whole_wherever_they_begin() {
    let weights = values(5, 7 * 300);
    let section = section_of(&weights);
    let all = rounded_in(Dtype::F32, &weights);
    for first in [0, 1, 63, 64, 65, 130, 1999] {
        for count in [0, 1, 64, 65, 101] {
            let mut found = vec![f32::NAN; count];
            unpack(&section, weights.len(), first, &mut found);
            assert_eq!(found, all[first..first + count], "{count} from {first}");
            let narrow: Vec<Bf16> = found.iter().map(|value| Bf16::store(*value)).collect();
            let mut found = vec![Bf16::store(0.0); count];
            unpack(&section, weights.len(), first, &mut found);
            assert_eq!(found, narrow, "{count} from {first}");
        }
    }
}

#[test]
fn extreme_values_are_packed_without_a_panic() {
    for value in [0.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN] {
        let found = rounded_in(Dtype::F32, &[value; 65]);
        if value == 0.0 {
            assert_eq!(found, [0.0; 65]);
        }
    }
}

/// A tensor of such numbers.
fn tensor(seed: u64, shape: &[i64], kind: Kind) -> Tensor {
    let count: i64 = shape.iter().product();
    Tensor::from_slice(&values(seed, count as usize)).view(shape).to_kind(kind)
}

#[test]
fn products_with_packed_matrices_are_those_with_their_values() {
    // Two matrices below each other, columns of one, and rows of one.
    let (rows, width) = (24i64, 40i64);
    for kind in [Kind::Float, Kind::BFloat16] {
        let both: Vec<Tensor> = [1, 2].map(|seed| tensor(seed, &[rows, width], kind)).into();
        let packed = |matrix: &Tensor| section_of(elements(&matrix.to_kind(Kind::Float)));
        let sections: Vec<Tensor> =
            both.iter().map(|one| Tensor::from_slice(&packed(one))).collect();
        let dtype = if kind == Kind::Float { Dtype::F32 } else { Dtype::Bf16 };
        let unpacked: Vec<Tensor> = both
            .iter()
            .map(|one| {
                let values = rounded_in(dtype, elements(&one.to_kind(Kind::Float)));
                Tensor::from_slice(&values).view([rows, width]).to_kind(kind)
            })
            .collect();
        let weights = rows * width;
        let whole = Window { weights, first: 0, rows, width, stride: width };
        let columns = Window { weights, first: 7, rows, width: 11, stride: width };
        let middle = Window { weights, first: 5 * width, rows: 9, width, stride: width };
        let aliases = |count: usize| sections[..count].iter().map(Tensor::shallow_clone).collect();
        for (windows, plain) in [
            (vec![whole, whole], Tensor::cat(&unpacked, 0)),
            (vec![columns], unpacked[0].narrow(1, 7, 11)),
            (vec![middle], unpacked[0].narrow(0, 5, 9)),
        ] {
            let inputs = plain.size()[1];
            let bias = tensor(9, &[plain.size()[0]], kind);
            let factor = Factor { matrices: aliases(windows.len()), windows };
            let of = |factor: &Factor| {
                let x = tensor(3, &[2, 5, inputs], kind).set_requires_grad(true);
                let y = factor.linear(&x, Some(&bias)).expect("memory");
                let given = tensor(4, &y.size(), kind);
                let of_x = gradients(&y, Some(&given), &[&x]).expect("a graph").remove(0);
                [y, of_x].map(|one| bytes_of(&one.detach().contiguous()).to_vec())
            };
            assert!(of(&factor) == of(&Factor::plain(plain.contiguous())), "{kind:?}");
        }
    }
}

#[test]
fn a_kernel_for_gpus_has_the_values_of_the_processor() {
    use crate::device::cuda::Argument;
    use crate::device::cuda::tests::{of, of_mut, on_processor};

    let weights = values(8, 70 * 300);
    let section = section_of(&weights);
    let (rows, width, first, stride) = (60, 33, 17, 300);
    let mut expected = Vec::new();
    for row in 0..rows {
        let mut part = vec![0f32; width];
        unpack(&section, weights.len(), first + row * stride, &mut part);
        expected.extend(part);
    }
    let mut found = vec![0f32; rows * width];
    let count = |count: usize| Argument::Count(count as u64);
    let arguments = [
        of(&section),
        count(rows),
        count(width),
        count(weights.len()),
        count(first),
        count(stride),
        of_mut(&mut found),
    ];
    on_processor("shoal_nf4_f32", arguments);
    assert_eq!(found, expected);
}
