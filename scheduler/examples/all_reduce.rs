//! The share of fast links that all-reduces use, in virtual time, for links too fast to emulate.
//! Prints the tables of docs/benchmarks/links.md.
//!
//! The decisions are those of a swarm; links are shared fairly and arithmetic takes no time.
//!
//! Arguments: the millions of values to reduce (10 and 100).

use std::time::Duration;

use shoal_protocol::codec::{Block, Codec, SumCodec};
use shoal_protocol::units::Rate;
use shoal_scheduler::sim::{Port, Sites, all_reduces, between_sites};

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

/// The peers of each island.
const ISLANDS: [&[usize]; 4] = [&[4, 4], &[2, 2], &[1, 4], &[2, 3, 4]];
/// The link of each island to the others, that of each peer, and the latency between and within islands.
const BETWEEN: Rate = Rate(100 * MEGABIT);
const WITHIN: Rate = Rate(1000 * MEGABIT);
const FAR: Duration = Duration::from_millis(20);
const NEAR: Duration = Duration::from_micros(200);

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
    for millions in &sizes {
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
    for millions in sizes {
        print_islands(millions);
    }
    Ok(())
}

/// Prints rounds of islands of peers, each with one link to the others, beside those of the same peers alone.
fn print_islands(millions: usize) {
    println!(
        "\n{millions}M values, islands with {} Mbit/s to the others, {} ms away; peers with {} Mbit/s. Least: the time in\n\
         which these links carry each piece once for each island.\n\n\
         peers    mode      crossing, alone  islands       time, alone  islands    least      share  goal",
        BETWEEN.0 / MEGABIT,
        FAR.as_millis(),
        WITHIN.0 / MEGABIT
    );
    let port = |rate| Port { up: rate, down: rate };
    for members in ISLANDS {
        let of: Vec<usize> =
            members.iter().enumerate().flat_map(|(site, count)| vec![site; *count]).collect();
        let ports = vec![port(WITHIN); of.len()];
        let sites = Sites { of, links: vec![port(BETWEEN); members.len()], near: NEAR };
        for mode in [SumCodec::Exact, SumCodec::Integers] {
            let round =
                |islands| between_sites(&ports, &sites, FAR, millions * 1_000_000, mode, islands);
            let (alone, islands) = (round(false), round(true));
            let sizes: Vec<String> = members.iter().map(ToString::to_string).collect();
            println!(
                "{:7}  {:8}  {:>12.1} MB  {:>7.1} MB  {:>9.3} s  {:>7.3} s  {:>7.3} s  {:.3}  {}",
                sizes.join(" + "),
                mode.to_string(),
                alone.crossed.0 as f64 / 1e6,
                islands.crossed.0 as f64 / 1e6,
                alone.time.as_secs_f64(),
                islands.time.as_secs_f64(),
                islands.least.as_secs_f64(),
                islands.share(),
                if islands.share() >= GOAL { "met" } else { "NOT met" },
            );
        }
    }
}
