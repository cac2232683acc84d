//! Whatever number of newcomers arrives and whichever peers die meanwhile, no stage receives more
//! than its share.

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;
use crate::paging;
use crate::rng::Rng;
use shoal_protocol::ids::{Member, Stage};
use shoal_protocol::message::{LogRecord, StageChoice, View};
use shoal_protocol::units::{Bytes, Moment};

const SEEDS: u64 = 6;

/// Passes of equal peers, and the measurements of them, differ by at most this many thousandths.
const JITTER_PER_MILLE: u64 = 50;

/// A newcomer joins the stage with the least throughput. With it, that stage has at most one host
/// more than any other stage, plus as many as measurement errors account for. A peer that died
/// after the newest logged view still counts at its stage.
#[derive(Debug)]
struct Shares {
    stages: u16,
    logged: View,
    /// The newest view that was judged.
    newest: View,
    arrived: u64,
    /// The largest excess of a stage over the smallest one, and the first excess that was too
    /// large.
    above: usize,
    broken: Option<String>,
}

impl Shares {
    fn hosts(&self, view: &View) -> Vec<usize> {
        let of = |stage| view.members.iter().filter(|one| one.span.contains(Stage(stage))).count();
        (0..self.stages).map(of).collect()
    }

    fn view(&mut self, view: &View) {
        let listed = |view: &View| -> BTreeSet<Member> {
            view.members.iter().map(|record| record.member).collect()
        };
        let (before, now) = (listed(&self.newest), listed(view));
        let (gone, arrived) = (before.difference(&now).count(), now.difference(&before).count());
        let (old, new) = (self.hosts(&self.newest), self.hosts(view));
        let least = *new.iter().min().expect("there are stages");
        let counted = (least + gone) as f64 * (1.0 + JITTER_PER_MILLE as f64 / 1000.0);
        for (stage, (old, new)) in old.iter().zip(&new).enumerate() {
            if new > old && arrived > 0 {
                self.above = self.above.max(new - least);
                if *new as f64 > counted + 1.0 {
                    let hosts = self.hosts(view);
                    self.broken
                        .get_or_insert(format!("stage {stage} received too many: {hosts:?}"));
                }
            }
        }
        self.arrived += arrived as u64;
        self.newest = view.clone();
    }
}

impl Watch for Shares {
    fn sees(&mut self, _: Moment, seen: Seen<'_>) {
        if let Seen::Logged(LogRecord::View(change)) = seen {
            self.logged.take(change).expect("changes follow each other in the log");
            // A large view arrives in pages.
            if change.len() < paging::CHANGED {
                self.view(&self.logged.clone());
            }
        }
    }
}

/// Equal peers that train, many newcomers at random moments within ten seconds, and deaths.
fn with_newcomers(seed: u64) -> (Scenario, u64) {
    let mut rng = Rng::new(seed);
    let stages = rng.within(2..=5) as u16;
    let (before, count) =
        (rng.within(2..=4) as usize * usize::from(stages), rng.within(5..=60) as usize);
    let compute = ComputeScenario::passes(
        Duration::from_millis(20),
        Duration::from_millis(40),
        JITTER_PER_MILLE,
    );
    let auto = PeerScenario::plain(StageChoice::Auto, stages, compute.clone());
    let mut peers = vec![PeerScenario::plain(StageChoice::None, stages, compute)];
    peers.extend(vec![auto.clone(); before]);
    peers.extend(vec![PeerScenario { start: None, ..auto }; count]);
    let mut manifest = Scenario::small_manifest(stages, 48, 60);
    manifest.checkpoint.every = 5;
    let network = NetworkScenario {
        uplink: Some(20_000_000),
        ..NetworkScenario::even(Duration::from_millis(2), Duration::from_millis(2), None)
    };
    let mut scenario = Scenario::plain(manifest, peers, network);
    scenario.seed = seed;
    scenario.snapshot.size = Bytes(rng.pick(&[10_000, 1_000_000, 5_000_000]));
    let mut happen: Vec<(Duration, Fault)> = (0..count)
        .map(|index| {
            (rng.microseconds(2_000_000..=12_000_000), Fault::Join { peer: 1 + before + index })
        })
        .collect();
    for _ in 0..rng.within(0..=6) {
        let peer = rng.within(1..=before as u64) as usize;
        happen.push((rng.microseconds(2_000_000..=12_000_000), Fault::Leave { peer }));
    }
    happen.sort_by_key(|(at, _)| *at);
    scenario.faults.happen = happen;
    (scenario, (before + count) as u64)
}

#[test]
fn no_stage_receives_more_than_its_share_of_newcomers() {
    let mut above = 0;
    for seed in 0..SEEDS {
        let (scenario, all) = with_newcomers(seed);
        let stages = scenario.manifest.training.stages;
        let [logged, newest] = [View::default(), View::default()];
        let mut shares = Shares { stages, logged, newest, arrived: 0, above: 0, broken: None };
        let report = run_watched(&scenario, &mut shares);
        let report = report.unwrap_or_else(|violation| panic!("seed {seed}: {violation:?}"));
        assert!(report.finished, "seed {seed}");
        assert_eq!(shares.broken, None, "seed {seed}");
        // The coordinator is a member too.
        assert!(shares.arrived > all, "seed {seed}: {} of {all} arrived", shares.arrived);
        above = above.max(shares.above);
    }
    println!("at most {above} above the smallest stage");
}
