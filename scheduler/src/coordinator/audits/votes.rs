//! What became of an audit: who is asked, and whose word differs from most.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::WorkDigest;

/// Replicas that compute work again beside the one that did it, at most.
const JURY: usize = 4;

/// How often replicas that could not compute the work are asked again where no majority came to one thing.
const TRIES: u32 = 5;

/// What a member stated about its work, and what others found.
#[derive(Debug)]
pub(super) struct Votes {
    of: Member,
    statement: WorkDigest,
    /// Replicas that compute the same bits, in the order in which they are asked.
    auditors: Vec<Member>,
    /// What they found; `None` of those that could not compute it from the same inputs.
    found: BTreeMap<Member, Option<WorkDigest>>,
    /// How often those were asked again.
    tries: u32,
}

/// What follows from the votes so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ruling {
    /// These replicas' findings are needed.
    Ask(Vec<Member>),
    /// These could not compute it, and no majority came to one thing: they are asked again.
    AskAgain(Vec<Member>),
    /// Another replica came to what was stated.
    Sound,
    /// Nobody could compute it again.
    NotAudited,
    /// Most came to one thing, and these members stated or found another.
    Wrong(BTreeSet<Member>),
    /// The members differ, and none of them has a majority.
    Unclear,
}

impl Votes {
    pub(super) fn new(of: Member, statement: WorkDigest, auditors: Vec<Member>) -> Self {
        Self { of, statement, auditors, found: BTreeMap::new(), tries: 0 }
    }

    pub(super) fn statement(&self) -> &WorkDigest {
        &self.statement
    }

    /// Whether a replica's finding is lacking.
    pub(super) fn lacks(&self, auditor: Member) -> bool {
        self.auditors.contains(&auditor) && !self.found.contains_key(&auditor)
    }

    /// A replica's finding; `None` if it could not compute the work, or has not for too long. The first one counts.
    pub(super) fn find(&mut self, auditor: Member, digest: Option<WorkDigest>) {
        if self.lacks(auditor) {
            // From other inputs other things follow: that says nothing of the work.
            let same = digest.filter(|digest| digest.taken == self.statement.taken);
            self.found.insert(auditor, same);
        }
    }

    /// A peer's word counts no more.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.auditors.retain(|auditor| auditor.peer != peer);
        self.found.retain(|auditor, _| auditor.peer != peer);
    }

    /// Replicas that could not compute the work are asked again.
    pub(super) fn forgive(&mut self) {
        self.found.retain(|_, found| found.is_some());
    }

    /// What follows. The word of `home`, which keeps the log, decides where there is no majority.
    pub(super) fn ruling(&mut self, home: Member) -> Ruling {
        let found = self.found.iter().filter_map(|(by, found)| Some((*by, found.as_ref()?)));
        let votes: Vec<(Member, &WorkDigest)> = found.chain([(self.of, &self.statement)]).collect();
        let able = self.auditors.iter().filter(|one| self.found.get(one) != Some(&None));
        let lacking = |one: &&Member| !self.found.contains_key(one);
        if votes.iter().all(|(_, vote)| **vote == self.statement) {
            let next = able.clone().find(lacking);
            return match next {
                _ if votes.len() > 1 => Ruling::Sound,
                Some(next) => Ruling::Ask(vec![*next]),
                None => Ruling::NotAudited,
            };
        }
        let needed: Vec<Member> = able.take(JURY).filter(lacking).copied().collect();
        if !needed.is_empty() {
            return Ruling::Ask(needed);
        }
        let with = |one: &WorkDigest| votes.iter().filter(|(_, vote)| *vote == one).count();
        let most = votes.iter().find(|(_, vote)| 2 * with(vote) > votes.len());
        let unable = self.found.iter().filter(|(_, found)| found.is_none());
        let unable: Vec<Member> = unable.map(|(by, _)| *by).collect();
        if most.is_none() && !unable.is_empty() && self.tries < TRIES {
            self.tries += 1;
            self.forgive();
            return Ruling::AskAgain(unable);
        }
        let decides = votes.iter().find(|(by, _)| *by == home);
        match most.or(decides) {
            Some((_, right)) => {
                let wrong = votes.iter().filter(|(_, vote)| vote != right);
                Ruling::Wrong(wrong.map(|(by, _)| *by).collect())
            }
            None => Ruling::Unclear,
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{ContentHash, Incarnation};
    use shoal_protocol::message::SumsPrint;

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn digest(taken: u8, sums: u64) -> WorkDigest {
        let [taken, made] = [taken, 0].map(|byte| ContentHash([byte; 32]));
        WorkDigest { taken, made, sums: vec![SumsPrint(sums)] }
    }

    fn home() -> Member {
        member(9)
    }

    /// Member 0 states 1; members 1 to `count` may audit it.
    fn votes(count: u8) -> Votes {
        Votes::new(member(0), digest(0, 1), (1..=count).map(member).collect())
    }

    #[test]
    fn one_equal_finding_suffices() {
        let mut votes = votes(3);
        assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(1)]));
        votes.find(member(1), Some(digest(0, 1)));
        assert_eq!(votes.ruling(home()), Ruling::Sound);
    }

    #[test]
    fn the_next_is_asked_where_one_could_not_or_had_other_inputs() {
        let mut votes = votes(3);
        votes.find(member(1), None);
        assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(2)]));
        votes.find(member(2), Some(digest(5, 2)));
        assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(3)]));
        votes.find(member(3), None);
        assert_eq!(votes.ruling(home()), Ruling::NotAudited);
        votes.forgive();
        assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(1)]));
    }

    #[test]
    fn a_difference_is_decided_by_most() {
        for (second, wrong) in [(1, member(1)), (2, member(0))] {
            let mut votes = votes(2);
            votes.find(member(1), Some(digest(0, 2)));
            assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(2)]));
            votes.find(member(2), Some(digest(0, second)));
            assert_eq!(votes.ruling(home()), Ruling::Wrong([wrong].into()));
        }
    }

    #[test]
    fn no_more_than_a_few_are_asked_and_the_first_word_counts() {
        let mut votes = votes(9);
        votes.find(member(1), Some(digest(0, 2)));
        votes.find(member(1), Some(digest(0, 1)));
        assert_eq!(votes.ruling(home()), Ruling::Ask((2..=4).map(member).collect()));
        votes.find(member(7), Some(digest(0, 7)));
        for number in 2..=4 {
            votes.find(member(number), Some(digest(0, 1)));
        }
        assert_eq!(votes.ruling(home()), Ruling::Wrong([member(1), member(7)].into()));
    }

    #[test]
    fn where_most_agree_on_nothing_those_that_could_not_are_asked_again() {
        let mut votes = votes(3);
        votes.find(member(1), Some(digest(0, 2)));
        votes.find(member(2), Some(digest(5, 2)));
        for _ in 0..TRIES {
            votes.find(member(3), None);
            votes.find(member(2), None);
            let again = Ruling::AskAgain(vec![member(2), member(3)]);
            assert_eq!(votes.ruling(home()), again);
        }
        votes.find(member(3), None);
        assert_eq!(votes.ruling(home()), Ruling::Ask(vec![member(2)]));
        votes.find(member(2), Some(digest(0, 2)));
        assert_eq!(votes.ruling(home()), Ruling::Wrong([member(0)].into()));
    }

    #[test]
    fn of_two_nobody_is_believed_but_the_keeper_of_the_log() {
        let mut votes = votes(1);
        votes.find(member(1), Some(digest(0, 2)));
        assert_eq!(votes.ruling(home()), Ruling::Unclear);
        assert_eq!(votes.ruling(member(0)), Ruling::Wrong([member(1)].into()));
        assert_eq!(votes.ruling(member(1)), Ruling::Wrong([member(0)].into()));
    }
}
