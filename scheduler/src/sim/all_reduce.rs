//! One all-reduce over modelled links: the share of their capacity that the order of pieces and the
//! choice of parts achieve. Arithmetic takes no time, and links are shared fairly.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{
    Attempt, ContentHash, Era, Incarnation, Member, PeerId, Step, Term, WeightGroup,
};
use shoal_protocol::message::{
    LinkEstimate, Mended, Round, RoundGroup, RoundId, RoundMember, TensorTag,
};
use shoal_protocol::units::{Bytes, Rate};

use super::flows::{Flows, Port, Sites};
use crate::action::{Payload, PayloadId, PeerAction, Task};
use crate::peer::PeerLimits;
use crate::round::RoundCut;
use crate::round::{
    Layout, MemberRates, NumberBytes, Reduction, ahead, averaged, least_time, member_rates,
    most_ahead, packed, piece_bytes, weights,
};

/// Packed sums at the vector's end are larger than the mean by this fraction, and those at its
/// beginning smaller.
const SIZE_SPREAD: f64 = 0.5;

/// The duration of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundTime {
    /// Time until the last member has the result.
    pub time: Duration,
    /// The least time in which these links carry the bytes of the mode with the best parts, plus
    /// one latency.
    pub least: Duration,
    /// Bytes sent by all members.
    pub sent: Bytes,
    /// Bytes of them that were sent from one place to another.
    pub crossed: Bytes,
}

impl RoundTime {
    /// The least time divided by the actual one.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.least.as_secs_f64() / self.time.as_secs_f64()
    }
}

/// All-reduces `values` values in this mode among one member at each of these ports, each `delay`
/// from every other, several times. The first round has equal parts; the parts of each later one
/// follow from earlier measurements, as in a swarm.
///
/// # Panics
/// If there are no ports, more than 256, or one without capacity.
#[must_use]
pub fn all_reduces(
    ports: &[Port],
    delay: Duration,
    values: usize,
    codec: SumCodec,
    rounds: usize,
) -> Vec<RoundTime> {
    assert!((1..=256).contains(&ports.len()), "a round has members, and at most 256 here");
    assert!(ports.iter().all(|port| port.up.0 > 0 && port.down.0 > 0), "every link has a rate");
    let known = |rate: Rate| Some(rate.0 as f64);
    let links = ports.iter().map(|port| MemberRates { up: known(port.up), down: known(port.down) });
    let number = NumberBytes::of(codec);
    let least = least_time(&links.collect::<Vec<_>>(), number) * values as f64;
    let least = Duration::from_secs_f64(least) + delay;
    let mut parts = vec![1; ports.len()];
    let mut measured = BTreeMap::new();
    let round = |_| {
        let flows = Flows::new(ports, delay);
        let group: Vec<(u32, Option<u16>)> = parts.iter().map(|weight| (*weight, None)).collect();
        let mut table = Table::new(ports, flows, values, codec, &group);
        let time = table.run();
        // A link that was not in use keeps its rate.
        for (ends, rate) in table.flows.measured() {
            let known = measured.entry(ends).or_insert(rate);
            *known = averaged(*known, rate);
        }
        let known: Vec<Option<u32>> = parts.iter().copied().map(Some).collect();
        let rate = |from: usize, to: usize| Some(measured.get(&(from, to))?.0 as f64);
        parts = weights(&member_rates(&known, number, rate), number);
        RoundTime { time, least, sent: table.sent, crossed: table.crossed }
    };
    (0..rounds).map(round).collect()
}

/// All-reduces `values` values once among one member at each of these ports, at several places `delay` from each
/// other. The members of a place are an island if `islands`, and otherwise each is alone. Parts are equal. The least
/// time is the one in which the places' links carry each piece once for each place.
///
/// # Panics
/// If there are no ports, more than 256, or one without capacity.
#[must_use]
pub fn between_sites(
    ports: &[Port],
    sites: &Sites,
    delay: Duration,
    values: usize,
    codec: SumCodec,
    islands: bool,
) -> RoundTime {
    assert!((1..=256).contains(&ports.len()), "a round has members, and at most 256 here");
    let group = sites.of.iter().map(|site| (1, islands.then_some(*site as u16)));
    let flows = Flows::between(ports, delay, sites);
    let mut table = Table::new(ports, flows, values, codec, &group.collect::<Vec<_>>());
    let time = table.run();
    let NumberBytes { part, result } = NumberBytes::of(codec);
    let share = |site: usize| {
        let here = sites.of.iter().filter(|of| **of == site).count();
        here as f64 / sites.of.len() as f64
    };
    let others = (sites.links.len() - 1) as f64;
    let seconds = |(site, link): (usize, &Port)| {
        let (own, rest) = (share(site), 1.0 - share(site));
        let out = (rest * part + own * others * result) / link.up.0 as f64;
        let back = (rest * result + own * others * part) / link.down.0 as f64;
        out.max(back) * values as f64
    };
    let least = sites.links.iter().enumerate().map(seconds).fold(0.0, f64::max);
    let least = Duration::from_secs_f64(least) + delay;
    RoundTime { time, least, sent: table.sent, crossed: table.crossed }
}

/// The members of a round, and the data in transit.
#[derive(Debug)]
struct Table {
    members: Vec<Reduction>,
    values: usize,
    codec: SumCodec,
    layout: Layout,
    number: NumberBytes,
    flows: Flows<(TensorTag, Payload)>,
    sent: Bytes,
    crossed: Bytes,
    payloads: u64,
    /// Members that have the result.
    done: usize,
}

impl Table {
    /// `group` has each member's weight and island.
    fn new(
        ports: &[Port],
        flows: Flows<(TensorTag, Payload)>,
        values: usize,
        codec: SumCodec,
        group: &[(u32, Option<u16>)],
    ) -> Self {
        let cut = RoundCut::default();
        let members = group.iter().enumerate().map(|(place, (weight, island))| RoundMember {
            member: member(place),
            weight: *weight,
            island: *island,
        });
        let (era, term, step) = (Era(0), Term(1), Step(0));
        let id = RoundId { era, term, step, weights: WeightGroup(0), attempt: Attempt(0) };
        let round = Round {
            id,
            group: RoundGroup { members: members.collect(), ..RoundGroup::default() }.into(),
            mended: Mended::default(),
        };
        let layout = Layout::new(&round, values, cut, codec);
        let piece = piece_bytes(cut, codec);
        let most = most_ahead(piece, PeerLimits::default().round_bytes, ports.len());
        let reduction = |(place, from): (usize, &Port)| {
            let path = |(other, to): (usize, &Port)| LinkEstimate {
                round_trip: 2 * flows.delay((place, other)),
                rate: Some(from.up.min(to.down)),
            };
            let piece = packed(piece, codec);
            let others = ports.iter().enumerate();
            let ahead = others.map(|to| ahead(piece, most, Some(&path(to)))).collect();
            let (own, whole) = (1, ports.len() as u64);
            Reduction::new(round.clone(), member(place), layout.clone(), ahead, own, whole)
                .expect("it is one of the members")
        };
        Self {
            members: ports.iter().enumerate().map(reduction).collect(),
            values,
            codec,
            layout,
            number: NumberBytes::of(codec),
            flows,
            sent: Bytes(0),
            crossed: Bytes(0),
            payloads: 0,
            done: 0,
        }
    }

    /// Runs until the last member has the result.
    fn run(&mut self) -> Duration {
        for place in 0..self.members.len() {
            let mut out = Vec::new();
            self.members[place].start(&mut out).expect("proofs are right");
            self.act(place, out);
        }
        while let Some(((from, to), (tag, payload))) = self.flows.next() {
            let mut out = Vec::new();
            let (one, sender) = (&mut self.members[to], member(from));
            let taken = match tag {
                TensorTag::RoundPart { mend, piece, proof, .. } => {
                    one.part((sender, mend), piece, proof, payload, &mut out)
                }
                TensorTag::RoundResult { piece, proof, .. } => {
                    one.result(sender, piece, proof, payload, &mut out)
                }
                other => unreachable!("not part of a round: {other:?}"),
            };
            taken.expect("proofs are right");
            self.act(to, out);
            if self.done == self.members.len() {
                break;
            }
        }
        assert_eq!(
            self.done,
            self.members.len(),
            "all data arrived, but a member lacks its result"
        );
        self.flows.now()
    }

    /// Executes a member's actions and those that follow.
    fn act(&mut self, place: usize, mut out: Vec<PeerAction>) {
        while !out.is_empty() {
            for action in std::mem::take(&mut out) {
                match action {
                    PeerAction::Compute(task) => self.compute(place, task, &mut out),
                    PeerAction::SendTensor { to, tag, payload, .. } => {
                        self.send(place, to, tag, payload)
                    }
                    PeerAction::Release(_) => {}
                    other => unreachable!("a round does not request {other:?}"),
                }
            }
        }
    }

    /// Executes an engine task, in no time.
    fn compute(&mut self, place: usize, task: Task, out: &mut Vec<PeerAction>) {
        self.payloads += 1;
        let id = PayloadId(self.payloads);
        let member = &mut self.members[place];
        match task {
            Task::Export { to, piece, range, .. } => {
                let size = self.layout.part_bytes(&range);
                member.exported(to, piece, Payload { id, size, hash: None, seal: None }, out);
            }
            Task::Reduce { piece, range, .. } => {
                let size = self.layout.result_bytes(&range);
                member.reduced(piece, Payload { id, size, hash: None, seal: None }, out);
            }
            Task::Install { range, .. } => member.installed(&range, out),
            Task::Summarise { .. } => {
                member.summarised((ContentHash([0; 32]), 0.0), Vec::new(), Vec::new());
                self.done += 1;
            }
            other => unreachable!("not a task of a round: {other:?}"),
        }
    }

    /// Relative size of the sums of these values: packed sums of some layers are larger than
    /// others'.
    fn relative_size(&self, range: &Range<usize>) -> f64 {
        if self.codec != SumCodec::Exact {
            return 1.0;
        }
        let middle = (range.start + range.end) as f64 / 2.0 / self.values as f64;
        1.0 + SIZE_SPREAD * (2.0 * middle - 1.0)
    }

    fn send(&mut self, from: usize, to: Member, tag: TensorTag, id: PayloadId) {
        let to = usize::from(to.peer.0[0]);
        let (piece, bytes, is_part) = match tag {
            TensorTag::RoundPart { piece, .. } => (piece, self.number.part, true),
            TensorTag::RoundResult { piece, .. } => (piece, self.number.result, false),
            other => unreachable!("not part of a round: {other:?}"),
        };
        let range = self.layout.range(piece).expect("it is sent");
        let (size, relative_size) = if is_part {
            (self.layout.part_bytes(&range), self.relative_size(&range))
        } else {
            (self.layout.result_bytes(&range), 1.0)
        };
        let weight = Bytes((range.len() as f64 * bytes * relative_size).ceil() as u64);
        self.sent += weight;
        if self.flows.crosses((from, to)) {
            self.crossed += weight;
        }
        self.flows.send((from, to), weight, (tag, Payload { id, size, hash: None, seal: None }));
    }
}

fn member(place: usize) -> Member {
    let place = u8::try_from(place).expect("at most 256 members");
    Member { peer: PeerId([place; 32]), incarnation: Incarnation(1) }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::codec::{Block, Codec};

    use super::*;

    /// 1 Mbit/s in bytes.
    const MEGABIT: u64 = 125_000;

    fn even_ports(megabits: &[u64]) -> Vec<Port> {
        let port = |rate: &u64| Port { up: Rate(rate * MEGABIT), down: Rate(rate * MEGABIT) };
        megabits.iter().map(port).collect()
    }

    /// The goal for every mode and all links: 0.9 of what the best parts allow.
    #[test]
    fn rounds_use_most_of_the_link_capacity() {
        let cases: [&[u64]; 6] = [
            &[1000, 1000],
            &[10_000; 4],
            &[1000; 8],
            &[1000, 2000, 4000],
            &[1000, 1000, 2000, 4000],
            &[10_000, 1000, 10_000, 1000, 10_000, 4000, 10_000, 2000],
        ];
        let modes = [
            SumCodec::Exact,
            SumCodec::Integers,
            SumCodec::Rounded(Codec::F32),
            SumCodec::Rounded(Codec::Bf16),
            SumCodec::Rounded(Codec::Int8(Block::DEFAULT)),
        ];
        for rates in cases {
            for codec in modes {
                let delay = Duration::from_millis(5);
                let rounds = all_reduces(&even_ports(rates), delay, 100_000_000, codec, 5);
                let shares: Vec<f64> = rounds.iter().map(RoundTime::share).collect();
                println!("{rates:?} {codec}: {shares:.3?}");
                assert!(shares.iter().all(|share| *share <= 1.0 + 1e-6), "faster than links are");
                assert!(shares[2..].iter().all(|share| *share >= 0.9), "{shares:?}");
            }
        }
    }

    /// Places with links of 100 Mbit/s to each other, whose members have a gigabit.
    fn sites(members: &[usize]) -> (Vec<Port>, Sites) {
        let of: Vec<usize> =
            members.iter().enumerate().flat_map(|(site, count)| vec![site; *count]).collect();
        let links = even_ports(&vec![100; members.len()]);
        (even_ports(&vec![1000; of.len()]), Sites { of, links, near: Duration::from_micros(200) })
    }

    /// The goals: two islands of four send a quarter of the bytes between them, in 0.9 of the speed of their link.
    #[test]
    fn islands_send_each_piece_once_and_use_their_link() {
        let delay = Duration::from_millis(20);
        for members in [&[4, 4][..], &[1, 4], &[2, 3, 4], &[2, 2]] {
            let (ports, sites) = sites(members);
            for codec in [SumCodec::Exact, SumCodec::Integers] {
                let round =
                    |islands| between_sites(&ports, &sites, delay, 20_000_000, codec, islands);
                let (flat, levels) = (round(false), round(true));
                let fewer = levels.crossed.0 as f64 / flat.crossed.0 as f64;
                println!(
                    "{members:?} {codec}: {fewer:.3} of the bytes, {:.3} and {:.3} s, {:.3} of the link",
                    flat.time.as_secs_f64(),
                    levels.time.as_secs_f64(),
                    levels.share()
                );
                assert!(levels.share() >= 0.9 && levels.share() <= 1.0 + 1e-2, "{levels:?}");
                assert!(members != [4, 4] || fewer < 0.26, "{fewer}");
                assert_eq!(levels.sent, flat.sent, "every member sends and receives as much");
            }
        }
    }
}
