//! A single anchor.

use super::*;
use crate::anchor::kept_history;

async fn alone(folder: &Path) -> Node {
    Node::open(&Arc::default(), peer(1), folder, true).await
}

#[tokio::test]
async fn one_anchor_leads_and_appends_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let term = node.leads().await;
    let records: Vec<_> = (1..=40).map(|number| record(number, number)).collect();
    for record in &records {
        node.anchor.append(term, record.clone());
    }
    node.reported("all are appended", |reported| reported.appended == records).await;
    assert_eq!(node.anchor.history(), made_of(&records));
    assert_eq!(node.anchor.voters(), BTreeSet::from([peer(1)]));
    node.reported("it reports the leader", |reported| {
        reported.leader == Some((Some(peer(1)), 1, 1))
    })
    .await;
    node.close().await;
    assert_eq!(kept_history(folder.path(), peer(1), Step(0)), Some(made_of(&records)));
    assert_eq!(kept_history(folder.path(), peer(2), Step(0)), None, "another anchor's");
}

#[tokio::test]
async fn a_killed_anchor_leads_again_in_a_new_term_with_all_it_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let first = node.leads().await;
    let records: Vec<_> = (1..=5).map(|number| record(number, number)).collect();
    for record in &records {
        node.append(record.clone()).await;
    }
    let copy = copied(folder.path());
    node.close().await;
    for folder in [copy.path(), folder.path()] {
        let mut node = alone(folder).await;
        assert!(node.leads().await > first);
        let history = node.reported.borrow().terms[0].1.clone();
        assert_eq!(history, made_of(&records));
        node.append(record(6, 6)).await;
        node.close().await;
    }
}

#[tokio::test]
async fn a_log_truncated_at_any_byte_opens_to_its_whole_records() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let records: Vec<_> = (1..=6).map(|number| record(number, number)).collect();
    let mut ends = Vec::new();
    let log = folder.path().join("log");
    for record in &records {
        node.append(record.clone()).await;
        ends.push(std::fs::metadata(&log).expect("there").len() as usize);
    }
    node.close().await;
    let bytes = std::fs::read(&log).expect("read");
    let begin = shoal_formats::anchor::journal::empty(peer(1)).len();
    for length in (begin..=bytes.len()).step_by(13).chain(ends.iter().copied()) {
        let copy = tempfile::tempdir().expect("a folder");
        std::fs::write(copy.path().join("log"), &bytes[..length]).expect("written");
        let mut node = alone(copy.path()).await;
        node.leads().await;
        let whole = ends.iter().filter(|end| **end <= length).count();
        assert_eq!(node.anchor.history(), made_of(&records[..whole]), "{length} bytes");
        node.close().await;
    }
}

#[tokio::test]
async fn a_record_for_an_earlier_term_is_dropped() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let term = node.leads().await;
    node.anchor.append(Term(term.0 - 1), record(1, 1));
    node.append(record(1, 2)).await;
    assert_eq!(node.reported.borrow().appended, [record(1, 2)]);
    assert_eq!(node.anchor.history(), made_of(&[record(1, 2)]));
    node.close().await;
}

#[tokio::test]
async fn a_refused_record_ends_the_anchor_and_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    node.append(record(1, 1)).await;
    let term = node.leads().await;
    node.anchor.append(term, record(1, 2));
    node.reported("it fails", |reported| {
        matches!(reported.failed, Some(AnchorError::Refused { .. }))
    })
    .await;
    node.close().await;
    let mut node = alone(folder.path()).await;
    node.leads().await;
    assert_eq!(node.anchor.history(), made_of(&[record(1, 1)]));
    node.close().await;
}

#[tokio::test]
async fn a_record_that_no_message_could_carry_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let term = node.leads().await;
    node.anchor.append(term, large(1, 251 << 10));
    node.reported("it fails", |reported| matches!(reported.failed, Some(AnchorError::TooLarge)))
        .await;
    node.close().await;
}

#[tokio::test]
async fn foreign_and_damaged_files_are_not_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    for number in 1..=3 {
        node.append(record(number, number)).await;
    }
    node.close().await;
    let net = Arc::default();
    let open = |me| Node::open_with(&net, config_of(me, folder.path()), true);
    let foreign = open(peer(2)).await.err().expect("not its own");
    assert!(matches!(foreign, AnchorError::Foreign { owner, .. } if owner == peer(1)));
    let log = folder.path().join("log");
    let bytes = std::fs::read(&log).expect("read");
    let begin = shoal_formats::anchor::journal::empty(peer(1)).len();
    for place in [0, begin, begin + 20] {
        let mut changed = bytes.clone();
        changed[place] ^= 1;
        std::fs::write(&log, changed).expect("written");
        let damaged = open(peer(1)).await.err().expect("damaged");
        assert!(
            matches!(&damaged, AnchorError::Damaged { path, at } if *path == log && *at <= place),
            "{damaged}"
        );
    }
    std::fs::write(&log, &bytes[..begin - 1]).expect("written");
    let none = open(peer(1)).await.err().expect("no beginning");
    assert!(matches!(none, AnchorError::Damaged { at: 0, .. }));
    std::fs::remove_file(&log).expect("removed");
    std::fs::write(folder.path().join("snapshot"), b"no snapshot").expect("written");
    let damaged = open(peer(1)).await.err().expect("no snapshot");
    assert!(matches!(damaged, AnchorError::Damaged { at: 0, .. }));
}

#[tokio::test]
async fn a_lost_folder_ends_the_anchor_at_its_next_record() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let term = node.leads().await;
    std::fs::remove_dir_all(folder.path()).expect("removed");
    // The open file accepts appends; only replacing it fails.
    for number in 1..=40 {
        node.anchor.append(term, large(number, 60 << 10));
    }
    node.reported("it fails", |reported| {
        matches!(reported.failed, Some(AnchorError::Write { .. }))
    })
    .await;
    node.close().await;
}

#[tokio::test]
async fn the_files_stay_small_and_hold_everything() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = alone(folder.path()).await;
    let term = node.leads().await;
    let records: Vec<_> = (1..=300).map(|number| large(number, 20 << 10)).collect();
    for chunk in records.chunks(32) {
        let before = node.reported.borrow().appended.len();
        for record in chunk {
            node.anchor.append(term, record.clone());
        }
        node.reported("all are appended", |reported| {
            reported.appended.len() == before + chunk.len()
        })
        .await;
        let size = std::fs::metadata(folder.path().join("log")).expect("there").len();
        assert!(size < 6 << 20, "the log has {size} bytes");
    }
    assert!(folder.path().join("snapshot").exists());
    let copy = copied(folder.path());
    node.close().await;
    let mut node = alone(copy.path()).await;
    node.leads().await;
    assert_eq!(node.anchor.history(), made_of(&records));
    node.close().await;
}
