//! The share of fast links that all-reduces use, in virtual time, for links too fast to emulate.
//! Prints the table of docs/compression.md.
//!
//! The decisions are those of a swarm; links are shared fairly and arithmetic takes no time.
//!
//! Arguments: the millions of values to reduce (10 and 100).

use std::time::Duration;

use shoal_protocol::codec::{Block, Codec, SumCodec};
use shoal_protocol::units::Rate;
use shoal_scheduler::sim::{Port, all_reduces};

/// 1 Mbit/s in bytes.
const MEGABIT: u64 = 125_000;
const DELAY: Duration = Duration::from_millis(5);
/// Parts follow from measurements of earlier rounds: the last of this many rounds counts.
const ROUNDS: usize = 6;
/// The minimum share of the rate with the best parts.
const GOAL: f64 = 0.9;

const MODES: [SumCodec; 4] = [
    SumCodec::Exact,
    SumCodec::Rounded(Codec::F32),
    SumCodec::Rounded(Codec::Bf16),
    SumCodec::Rounded(Codec::Int8(Block::DEFAULT)),
];

/// Up and down rate of each member, in Mbit/s.
const LINKS: [(&str, &[(u64, u64)]); 7] = [
    ("1000, 2 peers", &[(1000, 1000); 2]),
    ("1000, 8 peers", &[(1000, 1000); 8]),
    ("10000, 4 peers", &[(10_000, 10_000); 4]),
    ("1000, 2000, 4000", &[(1000, 1000), (2000, 2000), (4000, 4000)]),
    ("1000, 1000, 2000, 4000", &[(1000, 1000), (1000, 1000), (2000, 2000), (4000, 4000)]),
    (
        "4 of 1000, 4 of 10000",
        &[
            (1000, 1000),
            (1000, 1000),
            (1000, 1000),
            (1000, 1000),
            (10_000, 10_000),
            (10_000, 10_000),
            (10_000, 10_000),
            (10_000, 10_000),
        ],
    ),
    ("up 500, down 2000, 4 peers", &[(500, 2000); 4]),
];

fn main() -> Result<(), std::num::ParseIntError> {
    let sizes: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() { vec![10, 100] } else { sizes };
    println!(
        "All-reduce in virtual time, {} ms each way; rates in Mbit/s up and down. Least: the time that the best parts\n\
         need for the bytes of the mode, plus one latency. Goal: {GOAL} of it.\n",
        DELAY.as_millis()
    );
    println!("values  links                       mode   least      time       share  goal");
    for millions in sizes {
        for (name, links) in LINKS {
            let port = |(up, down): &(u64, u64)| Port {
                up: Rate(up * MEGABIT),
                down: Rate(down * MEGABIT),
            };
            let ports: Vec<Port> = links.iter().map(port).collect();
            for mode in MODES {
                let rounds = all_reduces(&ports, DELAY, millions * 1_000_000, mode, ROUNDS);
                let Some(round) = rounds.last() else { continue };
                println!(
                    "{:>5}M  {name:26}  {:5}  {:7.3} s  {:7.3} s  {:.3}  {}",
                    millions,
                    mode.to_string(),
                    round.least.as_secs_f64(),
                    round.time.as_secs_f64(),
                    round.share(),
                    if round.share() >= GOAL { "met" } else { "NOT met" },
                );
            }
        }
    }
    Ok(())
}
