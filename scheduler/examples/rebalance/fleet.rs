//! The possible throughput of a fleet, and the causes of its losses.

use std::collections::BTreeSet;
use std::ops::AddAssign;
use std::time::Duration;

use shoal_protocol::ids::{Era, Stage, Step};
use shoal_protocol::message::{LogRecord, MemberRecord, View};
use shoal_protocol::units::Moment;
use shoal_scheduler::sim::{Seen, Watch, place_of};

const HOUR: Duration = Duration::from_secs(3600);

/// Numbers of microbatches in some time.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Account {
    /// Throughput of the best placement of the live peers without any waits.
    pub(crate) optimum: f64,
    /// Throughput of the members at their stages, including those that still fetch their weights.
    pub(crate) placed: f64,
    /// Throughput of the members that have their weights.
    pub(crate) serving: f64,
    /// Microbatches computed, averaged over the stages.
    pub(crate) counted: f64,
    /// Microbatches committed and not undone.
    pub(crate) committed: f64,
    /// Microbatches that serving members could have computed and did not, in steps without deaths,
    /// and in others.
    pub(crate) quiet: f64,
    /// See `quiet`.
    pub(crate) troubled: f64,
}

impl AddAssign<&Self> for Account {
    fn add_assign(&mut self, other: &Self) {
        self.optimum += other.optimum;
        self.placed += other.placed;
        self.serving += other.serving;
        self.counted += other.counted;
        self.committed += other.committed;
        self.quiet += other.quiet;
        self.troubled += other.troubled;
    }
}

/// An observer of a fleet of equal peers.
#[derive(Debug)]
pub(crate) struct Fleet {
    stages: u16,
    /// Microbatches per step.
    microbatches: u32,
    /// Steps that are computed before the previous one is committed.
    staleness: u64,
    /// Duration of both passes at one stage.
    pass: Duration,
    alive: BTreeSet<usize>,
    view: View,
    now: (Era, Step),
    until: Moment,
    /// Current rates since `until`: the optimum's, the placed members' and the serving ones'.
    rates: [f64; 3],
    /// The hours of the run.
    pub(crate) hours: Vec<Account>,
    /// Possible and actual microbatches of the serving members since the last commit, and whether a
    /// peer died meanwhile.
    step: (f64, f64, bool),
    /// Number of deaths.
    pub(crate) deaths: u64,
}

impl Fleet {
    pub(crate) fn new(stages: u16, microbatches: u32, staleness: u8, pass: Duration) -> Self {
        Self {
            stages,
            microbatches,
            staleness: u64::from(staleness),
            pass,
            alive: BTreeSet::new(),
            view: View::default(),
            now: (Era(0), Step(0)),
            until: Moment::default(),
            rates: [0.0; 3],
            hours: Vec::new(),
            step: (0.0, 0.0, false),
            deaths: 0,
        }
    }

    /// The whole run.
    pub(crate) fn whole(&self) -> Account {
        self.hours.iter().fold(Account::default(), |mut sum, hour| {
            sum += hour;
            sum
        })
    }

    fn hour(&mut self, at: Moment) -> &mut Account {
        let hour = (at.0.as_secs() / HOUR.as_secs()) as usize;
        if self.hours.len() <= hour {
            self.hours.resize(hour + 1, Account::default());
        }
        &mut self.hours[hour]
    }

    /// Advances the time to `now` without a change before it.
    pub(crate) fn advance(&mut self, now: Moment) {
        let [optimum, placed, serving] = self.rates;
        while self.until < now {
            let next = Moment(HOUR * (self.until.0.as_secs() / HOUR.as_secs() + 1) as u32).min(now);
            let time = next.since(self.until).as_secs_f64();
            let hour = self.hour(self.until);
            hour.optimum += time * optimum;
            hour.placed += time * placed;
            hour.serving += time * serving;
            self.step.0 += time * serving;
            self.until = next;
        }
    }

    fn update_rates(&mut self) {
        let pass = self.pass.as_secs_f64();
        // The newest step in work: a moving member has left it at its old stage.
        let (era, step) = (self.now.0, Step(self.now.1.0 + self.staleness));
        let living = |record: &&MemberRecord| self.alive.contains(&place_of(record.member));
        let least = |counts: &dyn Fn(&MemberRecord, Stage) -> bool| {
            let count = |stage: u16| {
                let members = self.view.members.iter().map(AsRef::as_ref);
                let living = members.filter(living);
                living.filter(|record| counts(record, Stage(stage))).count()
            };
            (0..self.stages).map(count).min().unwrap_or(0) as f64
        };
        // The first peer is the coordinator and computes nothing.
        let computing = self.alive.iter().filter(|peer| **peer > 0).count();
        let optimum = (computing / usize::from(self.stages)) as f64;
        let placed = least(&|record, stage| record.span_at(era, step).contains(stage));
        let serving = least(&|record, stage| record.hosts(stage, era, step));
        self.rates = [optimum / pass, placed / pass, serving / pass];
    }

    fn logged(&mut self, now: Moment, record: &LogRecord) {
        let all = f64::from(self.microbatches);
        match record {
            LogRecord::View(change) => {
                let _gone = self.view.take(change);
            }
            LogRecord::Commit(record) => {
                self.now.1 = record.step.next();
                let (could, did, troubled) = std::mem::take(&mut self.step);
                let hour = self.hour(now);
                hour.committed += all;
                let waited = could - did;
                *(if troubled { &mut hour.troubled } else { &mut hour.quiet }) += waited;
            }
            LogRecord::Rewind { era, version } => {
                let undone = self.now.1.0.saturating_sub(version.0);
                self.now = (*era, *version);
                self.hour(now).committed -= undone as f64 * all;
                self.step.2 = true;
            }
            _ => {}
        }
    }
}

impl Watch for Fleet {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        match seen {
            Seen::Born { peer } => {
                self.advance(now);
                self.alive.insert(peer);
                self.update_rates();
            }
            Seen::Died { peer } => {
                self.advance(now);
                self.alive.remove(&peer);
                self.deaths += u64::from(peer > 0);
                self.step.2 = true;
                self.update_rates();
            }
            Seen::Logged(record) => {
                self.advance(now);
                self.logged(now, record);
                self.update_rates();
            }
            Seen::Counted { .. } => {
                let part = 1.0 / f64::from(self.stages);
                self.advance(now);
                self.hour(now).counted += part;
                self.step.1 += part;
            }
            _ => {}
        }
    }
}
