//! (era, step), version and term never decrease. There are no two commits of one (era, step), no
//! checkpoint after a newer one, and no expelled incarnation becomes a member again.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Era, Member, PeerId, Step, Term};
use shoal_protocol::message::{LogRecord, ViewChange};

/// The newest known values.
#[derive(Debug, Default)]
pub(in crate::sim) struct Monotone {
    term: Option<Term>,
    view: u64,
    members: BTreeMap<PeerId, Member>,
    expelled: BTreeSet<Member>,
    era: Option<Era>,
    committed: Option<(Era, Step)>,
    checkpoint: Option<Step>,
    applied: BTreeMap<Member, Step>,
}

impl Monotone {
    pub(in crate::sim) fn logged(&mut self, record: &LogRecord) -> Result<(), String> {
        match record {
            LogRecord::Term(term) => {
                if self.term.replace(*term).is_some_and(|old| old >= *term) {
                    return Err(format!("term {term} is not a later one"));
                }
            }
            LogRecord::View(change) => self.changed(change)?,
            LogRecord::Commit(record) => {
                let this = (record.era, record.step);
                if self.committed.replace(this).is_some_and(|old| old >= this) {
                    return Err(format!("{this:?} is committed after a later step or again"));
                }
            }
            LogRecord::Rewind { era, .. } => {
                if self.era.replace(*era).is_some_and(|old| old >= *era) {
                    return Err(format!("era {era} is not a later one"));
                }
                self.checkpoint = None;
            }
            LogRecord::Checkpoint { version, .. } => {
                // A new coordinator may repeat a checkpoint.
                if self.checkpoint.replace(*version).is_some_and(|old| old > *version) {
                    return Err(format!("a checkpoint of version {version} follows a newer one"));
                }
            }
            LogRecord::Completed | LogRecord::Convicted { .. } => {}
            LogRecord::Founded(founding) => {
                self.era = Some(founding.era());
                self.term = Some(founding.term());
            }
        }
        Ok(())
    }

    fn changed(&mut self, change: &ViewChange) -> Result<(), String> {
        if change.number <= self.view {
            return Err(format!("view {} follows view {}", change.number, self.view));
        }
        self.view = change.number;
        for gone in &change.gone {
            if self.members.get(&gone.peer) == Some(gone) {
                self.members.remove(&gone.peer);
                self.expelled.insert(*gone);
            }
        }
        for record in &change.here {
            let life = record.member;
            if self.expelled.contains(&life) {
                return Err(format!("{life} was expelled and is a member again"));
            }
            let before = self.members.insert(life.peer, life);
            self.expelled.extend(before.filter(|before| *before != life));
        }
        Ok(())
    }

    /// A peer returns to a checkpoint with the whole run.
    pub(in crate::sim) fn begins_again(&mut self, member: Member) {
        self.applied.remove(&member);
    }

    /// A peer applied a step.
    pub(in crate::sim) fn applied(&mut self, member: Member, step: Step) -> Result<(), String> {
        // A newcomer may begin at any step.
        let expected = self.applied.get(&member).map_or(step, |last| last.next());
        self.applied.insert(member, step);
        // A peer that fell behind and started over continues further ahead.
        if step >= expected {
            Ok(())
        } else {
            Err(format!("{member} applied step {step} instead of {expected}"))
        }
    }
}
