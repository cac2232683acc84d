//! Measures the codecs on one thread, compared with copying: speed of encoding and decoding, size
//! and error; and the speed of lossless packing. Prints a line of JSON for each codec and each
//! packing.
//!
//!     cargo run --release -p shoal-protocol --example codec_speed -- [NUMBERS] [ROUNDS]
//!
//! All memory is allocated and touched first. Speeds count the bytes of the f32 side, and are
//! medians over rounds in which every codec has its turn.

use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use shoal_protocol::codec::packing::{Packing, pack, unpack};
use shoal_protocol::codec::{Codec, Dither, Rounding};
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};

const CODECS: [&str; 9] =
    ["f32", "bf16", "f16", "int8", "int8:1024", "fp8", "fp8:1024", "int4", "int4:1024"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let numbers: usize = arguments.next().map_or(Ok(1 << 24), |count| count.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(9), |rounds| rounds.parse())?;
    let input = gaussian(numbers);
    let mut copy = vec![0.0f32; numbers];
    let mut bytes = vec![0u8; 4 * numbers];
    let mut lines: Vec<Line> = Vec::new();
    for name in CODECS {
        let codec: Codec = name.parse()?;
        lines.push(Line::new(codec, Rounding::Nearest));
        if codec.block().is_some() {
            lines.push(Line::new(codec, Rounding::Stochastic(dither())));
        }
    }
    let mut copied = Vec::new();
    for _ in 0..rounds {
        copied.push(seconds(|| black_box(&mut copy).copy_from_slice(black_box(&input))));
        for line in &mut lines {
            let length = line.codec.bytes_of(numbers as u64).ok_or("too many numbers")? as usize;
            let coded = &mut bytes[..length];
            let (codec, rounding) = (line.codec, line.rounding);
            line.encode.push(seconds(|| codec.encode(black_box(&input), rounding, coded)));
            let mut read = Ok(());
            line.decode.push(seconds(|| read = codec.decode(black_box(coded), &mut copy)));
            read?;
            line.error = relative_error(&input, &copy);
        }
    }
    let speed = |times: &mut Vec<f64>| 4e-9 * numbers as f64 / median(times);
    let copied = speed(&mut copied);
    for mut line in lines {
        let rounding = if line.rounding == Rounding::Nearest { "nearest" } else { "stochastic" };
        let length = line.codec.bytes_of(numbers as u64).ok_or("too many numbers")?;
        println!(
            r#"{{"codec":"{}","rounding":"{rounding}","encode":{:.2},"decode":{:.2},"copy":{copied:.2},"ratio":{:.4},"error":{:.6}}}"#,
            line.codec,
            speed(&mut line.encode),
            speed(&mut line.decode),
            4.0 * numbers as f64 / length as f64,
            line.error,
        );
    }
    packings(&input, rounds)
}

/// Measures the packing of these numbers in some codecs, and of sums of them.
fn packings(input: &[f32], rounds: usize) -> Result<(), Box<dyn std::error::Error>> {
    for name in ["f32", "bf16", "int8", "int4"] {
        let codec: Codec = name.parse()?;
        let length = codec.bytes_of(input.len() as u64).ok_or("too many numbers")? as usize;
        let mut coded = vec![0; length];
        codec.encode(input, Rounding::Nearest, &mut coded);
        let width = if codec.block().is_some() { 1 } else { length / input.len() };
        packing(name, Packing::Zstd, width, coded.into(), rounds)?;
    }
    let sum = |number: &f32| (f64::from(*number) * SUM_SCALE) as i64;
    let sums: Vec<u8> = input.iter().flat_map(|number| sum(number).to_le_bytes()).collect();
    packing("sums", Packing::Integers, 8, sums.into(), rounds)
}

/// Fixed-point sums of gradients have about this many steps per standard deviation.
const SUM_SCALE: f64 = 34_359_738_368.0;

/// Bytes packed at a time: those of a piece of an all-reduce.
const PIECE: usize = 1 << 19;

fn packing(
    name: &str,
    packing: Packing,
    width: usize,
    raw: Bytes,
    rounds: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let pieces: Vec<Bytes> =
        (0..raw.len()).step_by(PIECE).map(|at| raw.slice(at..raw.len().min(at + PIECE))).collect();
    let (mut packs, mut unpacks) = (Vec::new(), Vec::new());
    let mut length = 0;
    for _ in 0..rounds {
        let (mut packing_took, mut unpacking_took) = (0.0, 0.0);
        length = 0;
        for piece in &pieces {
            let mut packed = (packing, Bytes::new());
            packing_took += seconds(|| packed = pack(packing, width, black_box(piece.clone())));
            let (done, packed) = packed;
            length += packed.len();
            let mut back = Ok(Bytes::new());
            unpacking_took +=
                seconds(|| back = unpack(done, width, black_box(packed), piece.len()));
            if back? != *piece {
                return Err("unpacking returned other bytes".into());
            }
        }
        packs.push(packing_took);
        unpacks.push(unpacking_took);
    }
    let speed = |times: &mut Vec<f64>| 1e-9 * raw.len() as f64 / median(times);
    println!(
        r#"{{"packing":"{}","of":"{name}","pack":{:.2},"unpack":{:.2},"ratio":{:.4}}}"#,
        if packing == Packing::Integers { "integers" } else { "planes, zstd" },
        speed(&mut packs),
        speed(&mut unpacks),
        raw.len() as f64 / length as f64,
    );
    Ok(())
}

/// The measurements of a codec.
struct Line {
    codec: Codec,
    rounding: Rounding,
    encode: Vec<f64>,
    decode: Vec<f64>,
    error: f64,
}

impl Line {
    fn new(codec: Codec, rounding: Rounding) -> Self {
        Self { codec, rounding, encode: Vec::new(), decode: Vec::new(), error: 0.0 }
    }
}

fn dither() -> Dither {
    Dither::of(1, ClaimKey { step: Step(0), stage: Stage(1), microbatch: Microbatch(0) })
}

/// Normally distributed numbers by Box and Muller, from the dither's bits.
fn gaussian(count: usize) -> Vec<f32> {
    let uniform = |index: usize| (f64::from(dither().bits(index as u32)) + 0.5) / 4_294_967_296.0;
    let number = |index: usize| {
        let (radius, angle) = (uniform(2 * index), uniform(2 * index + 1));
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    };
    (0..count).map(number).collect()
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Root mean square of the error over that of the numbers, in f64.
fn relative_error(numbers: &[f32], back: &[f32]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (number, back) in numbers.iter().zip(back) {
        error += (f64::from(*number) - f64::from(*back)).powi(2);
        size += f64::from(*number).powi(2);
    }
    (error / size).sqrt()
}
