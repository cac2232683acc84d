//! Three anchors.

use super::*;

#[tokio::test]
async fn when_a_leader_dies_another_goes_on_with_everything() {
    let mut group = Group::new(3).await;
    for number in 1..=5 {
        group.node(peer(1)).append(record(number, number)).await;
    }
    group.kill(peer(1)).await;
    let next = group.leader(&[]).await;
    let history = group.node(next).told.borrow().offices[0].1.clone();
    assert_eq!(history, made_of(&(1..=5).map(|number| record(number, number)).collect::<Vec<_>>()));
    group.node(next).append(record(6, 6)).await;
    group.open(peer(1), true).await;
    let history = group.agreed(6).await;
    assert_eq!(history.lives.len(), 6);
    assert_eq!(group.node(peer(1)).office(), None);
    let told = "the old leader says who leads";
    group.node(peer(1)).told(told, |told| told.leader.is_some_and(|now| now.0 == Some(next))).await;
}

#[tokio::test]
async fn one_of_three_agrees_on_nothing_and_says_so() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.agreed(1).await;
    let folder = group.folders.path().join(peer(3).short()).join("log");
    group.kill(peer(2)).await;
    let term = group.node(peer(1)).leads().await;
    group.kill(peer(3)).await;
    let leader = group.node(peer(1));
    leader.anchor.append(term, record(2, 2));
    leader.told("it says that nobody answers", |told| told.leader == Some((None, 1, 3))).await;
    assert_eq!((leader.told.borrow().appended.len(), leader.view()), (1, 1));
    group.kill(peer(1)).await;
    // Alone, it does not write down one candidacy after the other.
    group.open(peer(3), true).await;
    let size = std::fs::metadata(&folder).expect("there").len();
    let left = group.node(peer(3));
    left.told("it says that nobody answers", |told| told.leader == Some((None, 1, 3))).await;
    tokio::time::sleep(3 * quick().election.end).await;
    assert_eq!(std::fs::metadata(&folder).expect("there").len(), size);
    assert_eq!(left.office(), None);
    group.open(peer(2), true).await;
    let leader = group.leader(&[]).await;
    let next = group.node(leader).view() + 1;
    group.node(leader).append(record(next, 9)).await;
    group.open(peer(1), true).await;
    // What only the old leader had is in no history.
    let history = group.agreed(next).await;
    assert_eq!(history, made_of(&[record(1, 1), record(2, 9)]));
}

#[tokio::test]
async fn what_a_leader_left_behind_is_known_to_the_next_or_gone() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.agreed(1).await;
    let peers = group.peers();
    group.net.isolate(peer(1), &peers, true);
    let log = group.folders.path().join(peer(1).short()).join("log");
    let size = std::fs::metadata(&log).expect("there").len();
    let term = group.node(peer(1)).leads().await;
    group.node(peer(1)).anchor.append(term, record(2, 2));
    until("it is on one disk", || std::fs::metadata(&log).expect("there").len() > size).await;
    group.kill(peer(1)).await;
    group.net.isolate(peer(1), &peers, false);
    group.open(peer(1), false).await;
    let next = group.leader(&[]).await;
    let (new_term, known) = group.node(next).told.borrow().offices[0].clone();
    assert!(new_term > term);
    // A membership is agreed on after all that could still come from before.
    let pair = BTreeSet::from([next, if next == peer(1) { peer(2) } else { peer(1) }]);
    group.vote(next, &pair).await;
    assert_eq!(group.node(next).anchor.history(), known);
}

#[tokio::test]
async fn a_leader_that_is_cut_off_agrees_on_nothing_and_is_deposed() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.agreed(1).await;
    let peers = group.peers();
    group.net.isolate(peer(1), &peers, true);
    let old_term = group.node(peer(1)).leads().await;
    group.node(peer(1)).anchor.append(old_term, record(2, 100));
    let next = group.leader(&[peer(1)]).await;
    for number in 2..=4 {
        group.node(next).append(record(number, number)).await;
    }
    assert_eq!(group.node(peer(1)).told.borrow().appended.len(), 1);
    group.net.isolate(peer(1), &peers, false);
    group.node(peer(1)).told("it is deposed", |told| told.deposed == 1).await;
    let history = group.agreed(4).await;
    let records: Vec<_> = (1..=4).map(|number| record(number, number)).collect();
    assert_eq!(history, made_of(&records));
    assert_eq!(group.node(peer(1)).told.borrow().appended, [record(1, 1)]);
}

#[tokio::test]
async fn who_was_cut_off_does_not_depose_the_leader() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    let peers = group.peers();
    group.net.isolate(peer(3), &peers, true);
    group.node(peer(3)).told("nobody answers", |told| told.leader == Some((None, 1, 3))).await;
    group.node(peer(1)).append(record(2, 2)).await;
    group.net.isolate(peer(3), &peers, false);
    group.agreed(2).await;
    // Nor does one that hears the others and not the leader.
    for way in [(peer(1), peer(3)), (peer(3), peer(1))] {
        group.net.cut.lock().expect("sound").insert(way);
    }
    group
        .node(peer(3))
        .told("it hears no leader", |told| {
            told.leader.is_some_and(|(leader, answering, _)| leader.is_none() && answering == 2)
        })
        .await;
    group.net.cut.lock().expect("sound").clear();
    group.node(peer(1)).append(record(3, 3)).await;
    group.agreed(3).await;
    let told = group.node(peer(1)).told.borrow();
    assert_eq!((told.offices.len(), told.deposed), (1, 0));
}

#[tokio::test]
async fn voters_come_and_go() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.kill(peer(3)).await;
    group.open(peer(4), false).await;
    // Perhaps one that never comes was wanted first.
    let absent = BTreeSet::from([peer(1), peer(2), peer(9)]);
    group.node(peer(1)).anchor.set_voters(absent);
    until("it is to learn the log", || {
        let inner = &group.nodes[&peer(1)].anchor.inner;
        inner.membership(|now| now.learner_ids().count() == 1)
    })
    .await;
    let voters = BTreeSet::from([peer(1), peer(2), peer(4)]);
    group.vote(peer(1), &voters).await;
    group.node(peer(1)).append(record(2, 2)).await;
    group.agreed(2).await;
    let learners = group.node(peer(1)).anchor.inner.membership(|now| now.learner_ids().count());
    assert_eq!(learners, 0);
    // Wanted again, it is so already.
    group.vote(peer(1), &voters).await;
    group.kill(peer(2)).await;
    group.node(peer(1)).append(record(3, 3)).await;
    // The leader itself goes.
    group.open(peer(2), true).await;
    let voters = BTreeSet::from([peer(2), peer(4)]);
    group.vote(peer(1), &voters).await;
    let next = group.leader(&[peer(1)]).await;
    assert_ne!(next, peer(1));
    group.node(next).append(record(4, 4)).await;
    group.node(peer(1)).told("it is deposed", |told| told.deposed == 1).await;
}

#[tokio::test]
async fn a_late_joiner_gets_the_snapshot_in_pieces_and_the_rest() {
    let mut group = Group::new(1).await;
    let term = group.node(peer(1)).leads().await;
    let count = 5000;
    for from in (1..=count).step_by(50) {
        let node = group.node(peer(1));
        for number in from..from + 50 {
            node.anchor.append(term, record(number, number));
        }
        let done = from as usize + 49;
        node.told("all are appended", |told| told.appended.len() == done).await;
    }
    let pictured = group.node(peer(1)).anchor.inner.machine.pictured().expect("a snapshot");
    assert!(pictured.index > 4000);
    group.open(peer(2), false).await;
    group.open(peer(3), false).await;
    let peers: BTreeSet<PeerId> = group.peers().into_iter().collect();
    group.vote(peer(1), &peers).await;
    group.node(peer(1)).append(record(count + 1, count + 1)).await;
    let history = group.agreed(count + 1).await;
    assert_eq!(history.lives.len() as u64, count + 1);
    let picture = group.folders.path().join(peer(2).short()).join("snapshot");
    assert!(std::fs::metadata(picture).expect("there").len() > 2 * (64 << 10));
    assert!(*group.net.largest.lock().expect("sound") < 80 << 10);
    // It is what a restart begins with.
    group.kill(peer(2)).await;
    group.open(peer(2), false).await;
    group.agreed(count + 1).await;
}

#[tokio::test]
async fn large_records_reach_all_in_messages_that_fit() {
    let mut group = Group::new(3).await;
    let peers = group.peers();
    group.net.isolate(peer(3), &peers, true);
    let term = group.node(peer(1)).leads().await;
    let mut records = Vec::new();
    for (number, kilobytes) in (1..).zip([150, 150, 10, 10, 240, 1, 150, 60]) {
        records.push(large(number, kilobytes << 10));
    }
    for record in &records {
        group.node(peer(1)).anchor.append(term, record.clone());
    }
    let all = records.clone();
    group.node(peer(1)).told("all are appended", |told| told.appended == all).await;
    group.net.isolate(peer(3), &peers, false);
    let history = group.agreed(0).await;
    assert_eq!(history, made_of(&records));
    let largest = *group.net.largest.lock().expect("sound");
    assert!(largest > 240 << 10 && largest <= super::super::rpc::BODY, "{largest}");
}

#[tokio::test]
async fn the_files_stay_small_while_one_is_away() {
    let mut group = Group::new(3).await;
    let term = group.node(peer(1)).leads().await;
    group.kill(peer(3)).await;
    let mut records = Vec::new();
    let logs = [peer(1), peer(2)].map(|peer| group.folders.path().join(peer.short()).join("log"));
    for _ in 0..12 {
        let before = records.len();
        records.extend((0..32).map(|number| large((before + number + 1) as u64, 20 << 10)));
        for record in &records[before..] {
            group.node(peer(1)).anchor.append(term, record.clone());
        }
        let count = records.len();
        group.node(peer(1)).told("all are appended", |told| told.appended.len() == count).await;
        // A picture is taken at the next pulse, and the file is replaced with the next record.
        let size = |log: &std::path::PathBuf| std::fs::metadata(log).expect("there").len();
        let mut patience = 2000;
        while logs.iter().any(|log| size(log) > 4 << 20) {
            assert!(patience > 0, "the logs have {:?} bytes", logs.each_ref().map(size));
            patience -= 1;
            records.push(large((records.len() + 1) as u64, 1));
            group.node(peer(1)).append(records[records.len() - 1].clone()).await;
        }
    }
    group.open(peer(3), false).await;
    let history = group.agreed(0).await;
    assert_eq!(history, made_of(&records));
    assert!(group.node(peer(3)).anchor.inner.machine.pictured().is_some());
}
