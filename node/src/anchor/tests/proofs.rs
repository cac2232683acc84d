//! Proofs of terms, as other peers check them.

use shoal_scheduler::office::Office;

use super::*;

fn believes(office: &mut Office, proof: &TermProof, asked: bool) -> bool {
    office.learn((run(), &HashKeys(peer(9))), vec![proof.clone()], asked).is_ok()
        && office.elected() == Some(proof.vote.coordinator)
}

impl Group {
    /// The proof of a leader once these voters are its group and so many of them signed.
    async fn proof(
        &mut self,
        leader: PeerId,
        voters: &BTreeSet<PeerId>,
        signers: usize,
    ) -> TermProof {
        let is_so = |reported: &Reported| {
            let proof = reported.proof.as_ref();
            proof.is_some_and(|proof| {
                proof.vote.group.voters == [voters.clone()] && proof.signatures.len() >= signers
            })
        };
        self.node(leader).reported("the anchors sign", is_so).await;
        self.node(leader).reported.borrow().proof.clone().expect("it was just seen")
    }

    /// All anchors see the proof of their leader, as members do.
    fn follow(&self, proof: &TermProof) {
        for node in self.nodes.values() {
            node.anchor.follow(proof.vote.term, proof.vote.coordinator);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_is_proved_by_its_voters_before_it_leads_and_after_each_change() {
    let mut group = Group::new(1).await;
    let alone = BTreeSet::from([peer(1)]);
    let first = group.proof(peer(1), &alone, 1).await;
    let mut office = Office::default();
    assert!(believes(&mut office, &first, true));
    for number in [2, 3] {
        group.open(peer(number), false).await;
    }
    let all: BTreeSet<PeerId> = [1, 2, 3].map(peer).into();
    group.vote(peer(1), &all).await;
    // New voters sign once they have seen that the leader was elected.
    group.follow(&first);
    let grown = group.proof(peer(1), &all, 3).await;
    assert!(believes(&mut office, &grown, false));
    group.kill(peer(1)).await;
    let leader = group.leader(&[]).await;
    let next = group.proof(leader, &all, 2).await;
    assert!(next.vote.term > grown.vote.term);
    assert!(believes(&mut office, &next, false), "two of three are a majority");
    assert_eq!(office.proofs().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_anchor_signs_for_the_leader_that_it_voted_for_and_no_other() {
    let mut group = Group::new(3).await;
    let all: BTreeSet<PeerId> = group.peers().into_iter().collect();
    let leader = group.leader(&[]).await;
    let vote = group.node(leader).reported.borrow().proof.clone().expect("it leads").vote;
    let voters = group.node(leader).anchor.group().expect("the log has begun");
    assert_eq!(voters.voters, std::slice::from_ref(&all));
    let vote = shoal_protocol::message::TermVote { group: voters, ..vote };
    let follower = all.into_iter().find(|peer| *peer != leader).expect("there are three");
    let inner = |group: &Group| Arc::clone(&group.nodes[&follower].anchor.inner);
    let signs = |group: &Group, from, vote: &_| inner(group).sign(from, vote).is_some();
    group.nodes[&follower].anchor.follow(vote.term, leader);
    assert!(signs(&group, leader, &vote));
    // Another anchor, another term, other voters.
    let mut other = vote.clone();
    other.coordinator = follower;
    assert!(!signs(&group, follower, &other) && !signs(&group, follower, &vote));
    let mut other = vote.clone();
    other.term = other.term.next();
    assert!(!signs(&group, leader, &other));
    let mut other = vote.clone();
    other.group.voters[0].remove(&follower);
    assert!(!signs(&group, leader, &other));
    // What it follows only grows.
    group.nodes[&follower].anchor.follow(vote.term, follower);
    assert!(signs(&group, leader, &vote));
}
