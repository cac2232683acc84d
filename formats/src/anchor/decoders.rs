//! Decoders of an anchor's files and messages, registered for tests and fuzzing. See
//! [`shoal_protocol::decoder`].

use std::collections::BTreeSet;
use std::path::Path;

use openraft::EntryPayload;
use shoal_protocol::decoder::{Decoder, reads_back};
use shoal_protocol::history::History;
use shoal_protocol::ids::{
    ContentHash, Era, Incarnation, Member, PeerId, RunId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{
    AnchorGroup, CommitRecord, FixedLoss, Founding, LogRecord, MemberRecord, StoredFile,
    StoredStage, TermVote, ViewChange,
};
use shoal_protocol::units::Bytes;
use shoal_protocol::wire;

use super::encoding::{self, Ballot, Image, Item, Mark};
use super::journal::{self, Event};
use super::rpc::{self, Answer, Request};
use super::types::{AnchorId, Entry, Membership, Proposal, StoredMembership, Vote, log_id};

/// The anchors' decoders.
pub const DECODERS: &[Decoder] = &[
    Decoder { name: "anchor_journal", examples: journals, check: journal },
    Decoder { name: "anchor_image", examples: images, check: image },
    Decoder { name: "anchor_request", examples: requests, check: request },
    Decoder { name: "anchor_answer", examples: answers, check: answer },
];

const ME: PeerId = PeerId([1; 32]);

fn view() -> LogRecord {
    let member = Member { peer: ME, incarnation: Incarnation(4) };
    let record = MemberRecord {
        addresses: vec![([192, 0, 2, 1], 7410).into()],
        ..MemberRecord::plain(member, StageSpan::one(Stage(0)))
    };
    let gone = [Member { peer: PeerId([2; 32]), incarnation: Incarnation(3) }].into();
    LogRecord::View(ViewChange {
        since: 0,
        number: 1,
        stops: true,
        gone,
        here: vec![record.into()],
    })
}

fn commit() -> LogRecord {
    LogRecord::Commit(CommitRecord {
        era: Era(0),
        term: Term(1),
        step: Step(0),
        rounds: Vec::new(),
        gradient_norm: 1.5,
        loss: FixedLoss::new(1 << 34, 1),
        held_out_loss: None,
    })
}

fn vote() -> TermVote {
    let group = AnchorGroup { history: 0, number: 3, voters: vec![[ME].into()] };
    TermVote { term: Term(4), coordinator: ME, group }
}

fn founded() -> LogRecord {
    let file = StoredFile {
        name: "model-00001-of-00001.safetensors".to_owned(),
        hash: ContentHash::of(b"file"),
        size: Bytes(4),
    };
    let stages = vec![StoredStage { holders: vec![ME], files: vec![file] }];
    LogRecord::Founded(Founding { number: 2, version: Step(30), stages })
}

fn membership() -> Membership {
    Membership::new(vec![BTreeSet::from([AnchorId(ME)])], None)
}

/// The items of a log that has begun, and its records from this index on.
fn items() -> Vec<Item> {
    let record = |record| EntryPayload::Normal(Proposal { term: Term(1), record });
    [
        EntryPayload::Membership(membership()),
        EntryPayload::Blank,
        record(LogRecord::Term(Term(1))),
        record(view()),
        record(commit()),
        record(founded()),
    ]
    .into_iter()
    .zip(0..)
    .map(|(payload, index)| Item::from(&Entry { log_id: log_id(1, index), payload }))
    .collect()
}

fn ballot() -> Ballot {
    Vote::new_committed(1, AnchorId(ME)).into()
}

fn journals() -> Vec<Vec<u8>> {
    let happened = [Event::Voted(ballot())]
        .into_iter()
        .chain(items().into_iter().map(Event::Added))
        .chain([Event::Agreed(log_id(1, 3).into()), Event::CutFrom(4)])
        .chain([Event::Purged(log_id(1, 1).into())]);
    let mut bytes = journal::empty(ME);
    bytes.extend(journal::pieces(&happened.collect::<Vec<_>>()));
    vec![journal::empty(ME), bytes]
}

/// Decodes a file, and the bytes as a piece with a valid header: damage that keeps the checksum.
fn journal(bytes: &[u8]) {
    let path = Path::new("log");
    for bytes in [bytes.to_vec(), super::frame::seal(bytes)] {
        let Ok(opened) = journal::read(path, &bytes, ME) else { continue };
        assert!(opened.whole <= bytes.len());
        let written = journal::pieces(&opened.held.events(ME));
        let Ok(again) = journal::read(path, &written, ME) else {
            panic!("a decoded journal must decode again");
        };
        assert_eq!(journal::pieces(&again.held.events(ME)), written);
    }
}

fn images() -> Vec<Vec<u8>> {
    let mut history = History::default();
    for record in [LogRecord::Term(Term(1)), view(), commit()] {
        history.apply(&record).expect("it follows");
    }
    let last = Some(log_id(1, 4));
    let anchors = StoredMembership::new(Some(log_id(1, 0)), membership());
    let mut continued = History::default();
    continued.apply(&founded()).expect("the first record");
    [history, continued]
        .map(|history| Image { history, last, anchors: anchors.clone() }.encode())
        .to_vec()
}

fn image(bytes: &[u8]) {
    let Ok(image) = Image::decode(bytes) else { return };
    let written = image.encode();
    let again = Image::decode(&written).expect("an encoded image decodes");
    assert_eq!(again.encode(), written);
    // Whatever it holds, the next record is applied or refused.
    let mut history = image.history;
    for record in [founded(), LogRecord::Term(Term(2)), view(), commit()] {
        let _ = history.apply(&record);
    }
}

fn requests() -> Vec<Vec<u8>> {
    let last = Some(Mark::from(log_id(1, 4)));
    let bytes = images().remove(0);
    [
        Request::Append { ballot: ballot(), previous: None, agreed: last, items: items() },
        Request::Vote { ballot: ballot(), last },
        Request::Snapshot {
            ballot: ballot(),
            last: log_id(1, 4).into(),
            offset: 0,
            bytes,
            done: true,
        },
        Request::WouldVote { last: None },
        Request::Vouch { vote: vote() },
    ]
    .map(|request| wire::encode(&request).expect("small"))
    .to_vec()
}

fn request(bytes: &[u8]) {
    reads_back::<Request>(bytes);
    let Ok(request) = wire::decode::<Request>(bytes) else { return };
    match request {
        Request::Append { ballot, previous, agreed, items } => {
            let Ok(vote) = rpc::own_vote(ME, ballot, true) else { return };
            let count = items.len();
            if let Ok(append) = rpc::append_request(vote, previous, agreed, items) {
                assert_eq!(append.entries.len(), count);
            }
        }
        Request::Vote { ballot, last } => {
            if let Ok(vote) = rpc::own_vote(ME, ballot, false) {
                let _ = rpc::vote_request(vote, last);
            }
        }
        Request::Snapshot { bytes, .. } => image(&bytes),
        Request::WouldVote { last } => drop(encoding::place(last)),
        Request::Vouch { vote } => drop(vote.signed_bytes(RunId::of(b"run"))),
    }
}

fn answers() -> Vec<Vec<u8>> {
    let last = Some(Mark::from(log_id(1, 4)));
    [
        Answer::Higher(ballot()),
        Answer::Vote { ballot: ballot(), granted: true, last },
        Answer::Vouched(Some([7; 64])),
    ]
    .map(|answer| wire::encode(&answer).expect("small"))
    .to_vec()
}

fn answer(bytes: &[u8]) {
    let Ok(answer) = wire::decode::<Answer>(bytes) else { return };
    let written = wire::encode(&answer).expect("a decoded answer encodes");
    assert_eq!(wire::decode::<Answer>(&written), Ok(answer.clone()));
    match answer {
        Answer::Higher(ballot) => {
            let _ = rpc::higher_vote(Vote::new_committed(3, AnchorId(ME)), ballot);
        }
        Answer::Vote { ballot, granted, last } => {
            let _ = rpc::vote_response(ballot, granted, last);
        }
        _ => {}
    }
}
