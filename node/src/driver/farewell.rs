//! The end of a run, for those who keep its log and were not there: one that was killed shortly before
//! comes back, finds nobody, and waits for a majority that never gathers again. So the others wait a
//! little for it, to tell it that the run is over.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::{FromCoordinator, Message, View};

use super::Driver;
use crate::progress;

/// How long it is waited for those who were not there. A process that is started again at once, as
/// supervisors do, is back sooner.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whom the end of the run is still to be told.
#[derive(Debug)]
pub(super) struct Farewell {
    untold: BTreeSet<PeerId>,
    until: Instant,
}

impl Farewell {
    /// The members of the last view know already. Who is none of them was told by others, and does
    /// not wait.
    pub(super) fn begin(voters: BTreeSet<PeerId>, view: &View, me: Member, now: Instant) -> Self {
        let mut untold = voters;
        if !view.lists(me) {
            untold.clear();
        }
        for record in &view.members {
            untold.remove(&record.member.peer);
        }
        Self { untold, until: now + PATIENCE }
    }

    /// Whether all know, or it was waited for long enough.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.untold.is_empty() || now >= self.until
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Somebody came. Returns whether it is to be told.
    pub(super) fn meets(&mut self, peer: PeerId) -> bool {
        self.untold.remove(&peer)
    }
}

impl Driver<'_> {
    /// The run is over for this peer.
    pub(super) fn begin_farewell(&mut self) {
        let voters = self.post.voters();
        let farewell = Farewell::begin(voters, &self.view, self.me, Instant::now());
        if !farewell.is_over(Instant::now()) {
            progress::say(&format!(
                "the run is over; waits at most {} s for {} of those who keep its log, to tell them",
                PATIENCE.as_secs(),
                farewell.untold.len(),
            ));
        }
        self.farewell = Some(farewell);
    }

    /// Tells who comes when the run is over, if it waits for that.
    pub(super) fn tell_latecomer(&mut self, member: Member) {
        if self.farewell.as_mut().is_some_and(|farewell| farewell.meets(member.peer)) {
            self.send(member, Message::FromCoordinator(FromCoordinator::Finished));
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, Stage, StageSpan};
    use shoal_protocol::message::{Duties, MemberRecord};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn view(members: &[u8]) -> View {
        let record = |number: &u8| MemberRecord {
            member: member(*number),
            span: StageSpan::one(Stage(0)),
            serving: true,
            addresses: Vec::new(),
            duties: Duties::default(),
            mobile: false,
            moves: None,
        };
        let members = members.iter().map(record).map(Into::into).collect();
        View { members, ..View::default() }
    }

    fn voters() -> BTreeSet<PeerId> {
        [1, 2, 3].map(|number| PeerId([number; 32])).into()
    }

    #[test]
    fn who_was_not_there_is_waited_for_and_told_once() {
        let now = Instant::now();
        let mut farewell = Farewell::begin(voters(), &view(&[1, 2, 4]), member(1), now);
        assert!(!farewell.is_over(now));
        assert!(!farewell.meets(member(2).peer), "it was told as a member");
        assert!(!farewell.meets(member(4).peer), "it keeps no log");
        assert!(farewell.meets(member(3).peer));
        assert!(!farewell.meets(member(3).peer));
        assert!(farewell.is_over(now));
    }

    #[test]
    fn nobody_waits_for_ever_nor_for_nobody() {
        let now = Instant::now();
        let waits = |members: &[u8], me: u8| {
            let farewell = Farewell::begin(voters(), &view(members), member(me), now);
            assert!(farewell.is_over(now + PATIENCE));
            !farewell.is_over(now)
        };
        assert!(waits(&[1, 2], 1));
        assert!(!waits(&[1, 2, 3], 1), "all were there");
        assert!(!waits(&[2, 3], 1), "a latecomer itself");
    }
}
