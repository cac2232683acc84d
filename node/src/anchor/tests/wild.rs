//! Anchors that die, come back, and are cut off, while whoever leads appends.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;

/// A run in which things go wrong.
struct Wild {
    group: Group,
    random: ChaCha8Rng,
    /// The number of the next record by whoever leads in a term.
    next: BTreeMap<Term, u64>,
    traces: u64,
    /// Who led when.
    offices: BTreeMap<Term, PeerId>,
    /// Records that somebody was told are agreed on.
    agreed: Vec<LogRecord>,
}

impl Wild {
    fn below(&mut self, bound: u32) -> u32 {
        self.random.next_u32() % bound
    }

    /// Takes in what the owner of one was told.
    fn note(&mut self, of: PeerId) {
        let told = self.group.nodes[&of].told.borrow();
        assert!(told.failed.is_none(), "{:?}", told.failed);
        for (term, _) in &told.offices {
            let leader = *self.offices.entry(*term).or_insert(of);
            assert_eq!(leader, of, "two lead in term {term}");
        }
        self.agreed.extend(told.appended.iter().cloned());
    }

    fn append(&mut self, by: PeerId) {
        let node = &self.group.nodes[&by];
        let told = node.told.borrow();
        let Some(term) = told.office else { return };
        let (_, history) = told.offices.last().expect("it has an office");
        let first = history.view.number + 1;
        let next = self.next.entry(term).or_insert(first);
        if *next - first < told.appended.len() as u64 + 16 {
            self.traces += 1;
            node.anchor.append(term, record(*next, self.traces));
            *next += 1;
        }
    }

    /// Kills one at whatever it does, and opens it again, perhaps later.
    async fn restart(&mut self, one: PeerId) {
        let peers: Vec<_> = (1..=3).map(peer).collect();
        self.group.net.isolate(one, &peers, true);
        let folder = self.group.folders.path().join(one.short());
        let left = copied(&folder);
        self.note(one);
        self.group.kill(one).await;
        for name in ["log", "snapshot"] {
            let left = left.path().join(name);
            if left.exists() {
                std::fs::copy(left, folder.join(name)).expect("copied");
            }
        }
        self.group.net.isolate(one, &peers, false);
        self.group.open(one, false).await;
    }

    async fn step(&mut self) {
        let one = peer(self.below(3) as u8 + 1);
        let peers = self.group.peers();
        match self.below(40) {
            0 => self.restart(one).await,
            1..=2 => self.group.net.isolate(one, &peers, true),
            3..=5 => self.group.net.isolate(one, &peers, false),
            6 => {
                let other = peer(self.below(3) as u8 + 1);
                self.group.net.cut.lock().expect("sound").insert((one, other));
            }
            7 => self.group.net.cut.lock().expect("sound").clear(),
            _ => self.append(one),
        }
        let pause = Duration::from_millis(u64::from(self.below(12)));
        tokio::time::sleep(pause).await;
    }

    /// When nothing goes wrong any more all agree, on all that was ever said.
    async fn end(mut self) {
        self.group.net.cut.lock().expect("sound").clear();
        *self.group.net.weather.lock().expect("sound") = None;
        // A leader that was cut off still thinks it leads for a moment.
        let trace = 1 << 40;
        let mut last = 0;
        while !self.group.nodes.values().any(|node| {
            let told = node.told.borrow();
            told.appended.last().is_some_and(|appended| *appended == record(last, trace))
        }) {
            let leader = self.group.leader(&[]).await;
            let node = self.group.node(leader);
            let pending = node.told.borrow().office;
            let Some(term) = pending else { continue };
            let history = node.anchor.history().view.number;
            let next = self.next.get(&term).copied().unwrap_or(history + 1);
            self.next.insert(term, next + 1);
            last = next;
            node.anchor.append(term, record(last, trace));
            let wait = node.told.wait_for(|told| {
                told.office != Some(term)
                    || told.appended.last().is_some_and(|now| *now == record(next, trace))
            });
            drop(soon("it is appended or deposed", wait).await.expect("it is told of all"));
        }
        let history = self.group.agreed(last).await;
        for one in self.group.peers() {
            self.note(one);
        }
        for record in &self.agreed {
            let LogRecord::View(change) = record else { continue };
            let kept = history.lives.contains_key(&change.here[0].member.peer);
            assert!(kept, "record {} is lost", change.number);
        }
        assert!(self.agreed.contains(&record(last, trace)));
    }
}

async fn wild(seed: u64) {
    let group = Group::new(3).await;
    *group.net.weather.lock().expect("sound") = Some(ChaCha8Rng::seed_from_u64(!seed));
    let random = ChaCha8Rng::seed_from_u64(seed);
    let (next, offices, agreed) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let mut wild = Wild { group, random, next, traces: 0, offices, agreed };
    for _ in 0..400 {
        wild.step().await;
    }
    wild.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_was_agreed_on_is_lost_whatever_happens() {
    let seed = std::env::var("ANCHOR_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    wild(seed).await;
}
