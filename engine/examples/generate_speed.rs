//! Generates on request and reports the duration: Shoal's side of `make bench-generate`.
//!
//! The arguments are the folder of a model in Hugging Face's format, and threads. Each line on stdin
//! requests a text as JSON, each line on stdout answers.
//!
//! ```text
//! generate_speed model 1
//! {"prompt":[1,2,3],"tokens":128}
//! ```

use std::io::{BufRead, Write};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shoal_engine::{Device, DeviceChoice, Generator, Sampling, base};

#[derive(Deserialize)]
struct Order {
    prompt: Vec<u32>,
    /// Tokens to add.
    tokens: usize,
}

#[derive(Serialize)]
struct Answer {
    tokens: Vec<u32>,
    /// Until the first token, which is the time of the prompt.
    first_seconds: f64,
    /// Of all tokens.
    seconds: f64,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().expect("the folder of a model");
    let threads = arguments.next().and_then(|text| text.parse().ok()).expect("threads");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let base = folder.path().join("base");
    base::import(model.as_ref(), &base, false).expect("a model of a known family");
    let device = Device::open(DeviceChoice::Cpu, threads).expect("a CPU");
    let mut generator = Generator::open(&base, device).expect("room for the model");
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line.expect("text")).expect("an order as JSON");
        let answer = serde_json::to_string(&answer(&mut generator, &order)).expect("plain data");
        println!("{answer}");
        std::io::stdout().flush().expect("the output is read");
    }
}

fn answer(generator: &mut Generator, order: &Order) -> Answer {
    // Another text takes the prompt out of the cache.
    let other = (order.prompt[0] + 1) % 2;
    generator.next_logits(&[other]).expect("a token");
    let sampling = Sampling {
        tokens: order.tokens,
        seed: 0,
        temperature: 0.0,
        top_p: 1.0,
        vocabulary: u32::MAX,
        ends: Vec::new(),
    };
    let start = Instant::now();
    let mut generation = generator.generate(&order.prompt, sampling).expect("a short prompt");
    let first = generation.next().expect("room for a token").expect("a token");
    let first_seconds = start.elapsed().as_secs_f64();
    let rest = generation.map(|token| token.expect("a token"));
    let tokens = std::iter::once(first).chain(rest).collect();
    Answer { tokens, first_seconds, seconds: start.elapsed().as_secs_f64() }
}
