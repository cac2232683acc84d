//! Three anchors.

use super::*;

#[tokio::test]
async fn after_a_leader_dies_another_continues_with_every_record() {
    let mut group = Group::new(3).await;
    for number in 1..=5 {
        group.node(peer(1)).append(record(number, number)).await;
    }
    group.kill(peer(1)).await;
    let next = group.leader(&[]).await;
    let history = group.node(next).reported.borrow().terms[0].1.clone();
    assert_eq!(history, made_of(&(1..=5).map(|number| record(number, number)).collect::<Vec<_>>()));
    group.node(next).append(record(6, 6)).await;
    group.open(peer(1), true).await;
    let history = group.agreed(6).await;
    assert_eq!(history.lives.len(), 6);
    assert_eq!(group.node(peer(1)).term_led(), None);
    let reported = "the old leader reports the new one";
    group
        .node(peer(1))
        .reported(reported, |reported| reported.leader.is_some_and(|now| now.0 == Some(next)))
        .await;
}

#[tokio::test]
async fn one_of_three_commits_nothing_and_reports_it() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.agreed(1).await;
    let folder = group.folders.path().join(peer(3).short()).join("log");
    group.kill(peer(2)).await;
    let term = group.node(peer(1)).leads().await;
    group.kill(peer(3)).await;
    let leader = group.node(peer(1));
    leader.anchor.append(term, record(2, 2));
    leader
        .reported("it reports that no voter answers", |reported| {
            reported.leader == Some((None, 1, 3))
        })
        .await;
    assert_eq!((leader.reported.borrow().appended.len(), leader.view()), (1, 1));
    group.kill(peer(1)).await;
    // Alone, it writes no repeated candidacies.
    group.open(peer(3), true).await;
    let size = std::fs::metadata(&folder).expect("there").len();
    let left = group.node(peer(3));
    left.reported("it reports that no voter answers", |reported| {
        reported.leader == Some((None, 1, 3))
    })
    .await;
    tokio::time::sleep(3 * quick().election.end).await;
    assert_eq!(std::fs::metadata(&folder).expect("there").len(), size);
    assert_eq!(left.term_led(), None);
    group.open(peer(2), true).await;
    let leader = group.leader(&[]).await;
    let next = group.node(leader).view() + 1;
    group.node(leader).append(record(next, 9)).await;
    group.open(peer(1), true).await;
    // Records that only the old leader had are in no history.
    let history = group.agreed(next).await;
    assert_eq!(history, made_of(&[record(1, 1), record(2, 9)]));
}

/// Whether the removed ones died with the only copy of a record or not, the issuer's word is final.
#[tokio::test]
async fn where_a_majority_is_gone_for_good_the_issuer_keeps_the_log_alone() {
    let mut group = Group::new(3).await;
    for number in 1..=3 {
        group.node(peer(1)).append(record(number, number)).await;
    }
    group.agreed(3).await;
    group.kill(peer(1)).await;
    group.kill(peer(2)).await;
    group.kill(peer(3)).await;
    let folder = group.folders.path().join(peer(1).short());
    let reopened = async |removed: &[u8]| {
        let removed = removed.iter().copied().map(peer).collect();
        let config = AnchorConfig { removed, ..config_of(peer(1), &folder) };
        Node::open_with(&group.net, config, true).await.expect("opened")
    };
    // One of three may be replaced as ever: the two others are a majority.
    let node = reopened(&[2]).await;
    assert_eq!(node.anchor.voters(), [1, 2, 3].map(peer).into());
    node.close().await;
    // Twice, as a crash right after the first one would have it.
    for view in [4, 5] {
        let mut node = reopened(&[2, 3]).await;
        node.leads().await;
        let history = node.reported.borrow().terms[0].1.clone();
        assert_eq!(history.view.number, view - 1, "nothing is lost");
        assert_eq!(node.anchor.voters(), [peer(1)].into());
        node.append(record(view, view)).await;
        node.close().await;
    }
    group.open(peer(1), true).await;
    group.open(peer(4), false).await;
    group.open(peer(5), false).await;
    group.node(peer(1)).leads().await;
    group.vote(peer(1), &[1, 4, 5].map(peer).into()).await;
    group.node(peer(1)).append(record(6, 6)).await;
    assert_eq!(group.agreed(6).await.lives.len(), 6);
}

#[tokio::test]
async fn records_of_an_old_leader_are_committed_or_lost_for_good() {
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
    let (new_term, known) = group.node(next).reported.borrow().terms[0].clone();
    assert!(new_term > term);
    // A membership commits after everything that could still come from before.
    let pair = BTreeSet::from([next, if next == peer(1) { peer(2) } else { peer(1) }]);
    group.vote(next, &pair).await;
    assert_eq!(group.node(next).anchor.history(), known);
}

#[tokio::test]
async fn a_leader_that_is_cut_off_commits_nothing_and_is_deposed() {
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
    assert_eq!(group.node(peer(1)).reported.borrow().appended.len(), 1);
    group.net.isolate(peer(1), &peers, false);
    group.node(peer(1)).reported("it is deposed", |reported| reported.deposed == 1).await;
    let history = group.agreed(4).await;
    let records: Vec<_> = (1..=4).map(|number| record(number, number)).collect();
    assert_eq!(history, made_of(&records));
    assert_eq!(group.node(peer(1)).reported.borrow().appended, [record(1, 1)]);
}

#[tokio::test]
async fn an_anchor_that_was_cut_off_does_not_depose_the_leader() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    let peers = group.peers();
    group.net.isolate(peer(3), &peers, true);
    group
        .node(peer(3))
        .reported("no voter answers", |reported| reported.leader == Some((None, 1, 3)))
        .await;
    group.node(peer(1)).append(record(2, 2)).await;
    group.net.isolate(peer(3), &peers, false);
    group.agreed(2).await;
    // Neither does an anchor that reaches the others but not the leader.
    for link in [(peer(1), peer(3)), (peer(3), peer(1))] {
        group.net.cut.lock().expect("valid").insert(link);
    }
    group
        .node(peer(3))
        .reported("it knows no leader", |reported| {
            reported.leader.is_some_and(|(leader, answering, _)| leader.is_none() && answering == 2)
        })
        .await;
    group.net.cut.lock().expect("valid").clear();
    group.node(peer(1)).append(record(3, 3)).await;
    group.agreed(3).await;
    let reported = group.node(peer(1)).reported.borrow();
    assert_eq!((reported.terms.len(), reported.deposed), (1, 0));
}

#[tokio::test]
async fn voters_can_be_added_and_removed() {
    let mut group = Group::new(3).await;
    group.node(peer(1)).append(record(1, 1)).await;
    group.kill(peer(3)).await;
    group.open(peer(4), false).await;
    // A voter that never starts was requested first.
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
    // Requesting the same voters again changes nothing.
    group.vote(peer(1), &voters).await;
    group.kill(peer(2)).await;
    group.node(peer(1)).append(record(3, 3)).await;
    // The leader itself is removed.
    group.open(peer(2), true).await;
    let voters = BTreeSet::from([peer(2), peer(4)]);
    group.vote(peer(1), &voters).await;
    let next = group.leader(&[peer(1)]).await;
    assert_ne!(next, peer(1));
    group.node(next).append(record(4, 4)).await;
    group.node(peer(1)).reported("it is deposed", |reported| reported.deposed == 1).await;
}

#[tokio::test]
async fn a_late_anchor_receives_the_snapshot_in_pieces_and_later_entries() {
    let mut group = Group::new(1).await;
    let term = group.node(peer(1)).leads().await;
    let count = 5000;
    for from in (1..=count).step_by(50) {
        let node = group.node(peer(1));
        for number in from..from + 50 {
            node.anchor.append(term, record(number, number));
        }
        let done = from as usize + 49;
        node.reported("all are appended", |reported| reported.appended.len() == done).await;
    }
    let snapshot_end = group.node(peer(1)).anchor.inner.machine.snapshot_end().expect("a snapshot");
    assert!(snapshot_end.index > 4000);
    group.open(peer(2), false).await;
    group.open(peer(3), false).await;
    let peers: BTreeSet<PeerId> = group.peers().into_iter().collect();
    group.vote(peer(1), &peers).await;
    group.node(peer(1)).append(record(count + 1, count + 1)).await;
    let history = group.agreed(count + 1).await;
    assert_eq!(history.lives.len() as u64, count + 1);
    let stored = group.folders.path().join(peer(2).short()).join("snapshot");
    assert!(std::fs::metadata(stored).expect("there").len() > 2 * (64 << 10));
    assert!(*group.net.largest.lock().expect("valid") < 80 << 10);
    // A restart begins with the snapshot.
    group.kill(peer(2)).await;
    group.open(peer(2), false).await;
    group.agreed(count + 1).await;
}

#[tokio::test]
async fn large_records_arrive_in_messages_within_the_limit() {
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
    group.node(peer(1)).reported("all are appended", |reported| reported.appended == all).await;
    group.net.isolate(peer(3), &peers, false);
    let history = group.agreed(0).await;
    assert_eq!(history, made_of(&records));
    let largest = *group.net.largest.lock().expect("valid");
    assert!(largest > 240 << 10 && largest <= shoal_formats::anchor::rpc::BODY, "{largest}");
}

#[tokio::test]
async fn the_files_stay_small_while_one_anchor_is_down() {
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
        group
            .node(peer(1))
            .reported("all are appended", |reported| reported.appended.len() == count)
            .await;
        // The next tick takes a snapshot, and the next record replaces the file.
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
    assert!(group.node(peer(3)).anchor.inner.machine.snapshot_end().is_some());
}
