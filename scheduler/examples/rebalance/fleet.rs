//! What a fleet could have got through, and where what it did not went.

use std::collections::BTreeSet;
use std::ops::AddAssign;
use std::time::Duration;

use shoal_protocol::ids::{Era, Stage, Step};
use shoal_protocol::message::{LogRecord, MemberRecord, View};
use shoal_protocol::units::Moment;
use shoal_scheduler::sim::{Seen, Watch, place_of};

const HOUR: Duration = Duration::from_secs(3600);

/// Microbatches, of some time.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Account {
    /// What the best placement of those who lived would have got through without ever waiting.
    pub(crate) optimum: f64,
    /// What the members would have where they were placed, those on their way to their weights too.
    pub(crate) placed: f64,
    /// What those of them would have that had their weights.
    pub(crate) serving: f64,
    /// What was computed, on average of the stages.
    pub(crate) counted: f64,
    /// What was committed, and not undone.
    pub(crate) committed: f64,
    /// What those who served did not compute, in steps that nobody died in, and in others.
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

/// A fleet of equal peers, watched.
#[derive(Debug)]
pub(crate) struct Fleet {
    stages: u16,
    /// Of a step.
    microbatches: u32,
    /// Steps that are worked on before the one before is committed.
    staleness: u64,
    /// Both passes at one stage.
    pass: Duration,
    alive: BTreeSet<usize>,
    view: View,
    now: (Era, Step),
    until: Moment,
    /// What the rates are since then: the optimum's, the placed members' and the serving ones'.
    rates: [f64; 3],
    /// The hours of the run.
    pub(crate) hours: Vec<Account>,
    /// What those who serve could do since the last commit and what they did, and whether somebody
    /// died meanwhile.
    step: (f64, f64, bool),
    /// How many died.
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

    /// All of it.
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

    /// Nothing changed until now.
    pub(crate) fn lasts(&mut self, now: Moment) {
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

    fn changes(&mut self) {
        let pass = self.pass.as_secs_f64();
        // The newest step that is worked on: who moves has let go of it at the stage that it leaves.
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
        // The first one keeps the run and computes nothing.
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
                self.lasts(now);
                self.alive.insert(peer);
                self.changes();
            }
            Seen::Died { peer } => {
                self.lasts(now);
                self.alive.remove(&peer);
                self.deaths += u64::from(peer > 0);
                self.step.2 = true;
                self.changes();
            }
            Seen::Logged(record) => {
                self.lasts(now);
                self.logged(now, record);
                self.changes();
            }
            Seen::Counted { .. } => {
                let part = 1.0 / f64::from(self.stages);
                self.lasts(now);
                self.hour(now).counted += part;
                self.step.1 += part;
            }
            _ => {}
        }
    }
}
