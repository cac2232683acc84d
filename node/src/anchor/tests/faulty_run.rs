//! Anchors that die, restart and are cut off while the leader appends.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;

/// A run with random faults.
struct FaultyRun {
    group: Group,
    random: ChaCha8Rng,
    /// The number of the next record, by the leader's term.
    next: BTreeMap<Term, u64>,
    traces: u64,
    /// The leader of each term.
    terms: BTreeMap<Term, PeerId>,
    /// Records that were reported as committed.
    agreed: Vec<LogRecord>,
}

impl FaultyRun {
    fn below(&mut self, bound: u32) -> u32 {
        self.random.next_u32() % bound
    }

    /// Checks the events of one anchor.
    fn note(&mut self, of: PeerId) {
        let reported = self.group.nodes[&of].reported.borrow();
        assert!(reported.failed.is_none(), "{:?}", reported.failed);
        for (term, _) in &reported.terms {
            let leader = *self.terms.entry(*term).or_insert(of);
            assert_eq!(leader, of, "two lead in term {term}");
        }
        self.agreed.extend(reported.appended.iter().cloned());
    }

    fn append(&mut self, by: PeerId) {
        let node = &self.group.nodes[&by];
        let reported = node.reported.borrow();
        let Some(term) = reported.term_led else { return };
        let (_, history) = reported.terms.last().expect("it leads a term");
        let first = history.view.number + 1;
        let next = self.next.entry(term).or_insert(first);
        if *next - first < reported.appended.len() as u64 + 16 {
            self.traces += 1;
            node.anchor.append(term, record(*next, self.traces));
            *next += 1;
        }
    }

    /// Kills an anchor at a random moment and opens it again, now or later.
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
                self.group.net.cut.lock().expect("valid").insert((one, other));
            }
            7 => self.group.net.cut.lock().expect("valid").clear(),
            _ => self.append(one),
        }
        let pause = Duration::from_millis(u64::from(self.below(12)));
        tokio::time::sleep(pause).await;
    }

    /// Ends the faults and checks that all anchors agree on everything that was reported.
    async fn end(mut self) {
        self.group.net.cut.lock().expect("valid").clear();
        *self.group.net.random_faults.lock().expect("valid") = None;
        // A leader that was cut off may still believe that it leads.
        let trace = 1 << 40;
        let mut last = 0;
        while !self.group.nodes.values().any(|node| {
            let reported = node.reported.borrow();
            reported.appended.last().is_some_and(|appended| *appended == record(last, trace))
        }) {
            let leader = self.group.leader(&[]).await;
            let node = self.group.node(leader);
            let pending = node.reported.borrow().term_led;
            let Some(term) = pending else { continue };
            let history = node.anchor.history().view.number;
            let next = self.next.get(&term).copied().unwrap_or(history + 1);
            self.next.insert(term, next + 1);
            last = next;
            node.anchor.append(term, record(last, trace));
            let wait = node.reported.wait_for(|reported| {
                reported.term_led != Some(term)
                    || reported.appended.last().is_some_and(|now| *now == record(next, trace))
            });
            drop(soon("it is appended or deposed", wait).await.expect("every event is reported"));
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

async fn faulty_run(seed: u64) {
    let group = Group::new(3).await;
    *group.net.random_faults.lock().expect("valid") = Some(ChaCha8Rng::seed_from_u64(!seed));
    let random = ChaCha8Rng::seed_from_u64(seed);
    let (next, terms, agreed) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let mut faulty_run = FaultyRun { group, random, next, traces: 0, terms, agreed };
    for _ in 0..400 {
        faulty_run.step().await;
    }
    faulty_run.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_committed_record_is_lost_under_random_faults() {
    let seed = std::env::var("ANCHOR_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    faulty_run(seed).await;
}
