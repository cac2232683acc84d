//! What a log holds, and the file that tells how it came to.
//!
//! The file says what happened, in order: entries added or cut off, votes, and how far the log was
//! agreed on or is in the snapshot.

use std::collections::BTreeMap;
use std::path::Path;

use shoal_protocol::ids::PeerId;

use super::encoding::{self, Ballot, Item, Malformed, Mark};
use super::error::AnchorError;
use super::frame;
use super::types::{Entry, LogId, Vote};

/// The form of the file.
const FORMAT: u32 = 2;

/// Bytes that one piece of the file is filled up to; its last item may take it beyond.
const PIECE: usize = 256 << 10;

/// No piece is larger.
const PIECE_CAP: usize = 1 << 20;

/// What happened.
#[derive(Debug, PartialEq, bincode::Encode, bincode::Decode)]
pub(super) enum Event {
    /// The file's first.
    Begin { format: u32, anchor: PeerId },
    /// A vote was given, or won.
    Voted(Ballot),
    /// The next entry.
    Added(Item),
    /// Entries from this place on were another's and never agreed on.
    CutFrom(u64),
    /// The log was agreed on up to here.
    Agreed(Mark),
    /// The snapshot stands for all up to here.
    Purged(Mark),
}

/// An entry that is held.
pub(super) struct Kept {
    pub(super) entry: Entry,
    /// Of its bytes.
    pub(super) size: u64,
}

/// A log.
#[derive(Default)]
pub(super) struct Held {
    pub(super) vote: Option<Vote>,
    pub(super) purged: Option<LogId>,
    pub(super) agreed: Option<LogId>,
    /// `agreed` grew since the file was written to: it is said with the next thing that is.
    pub(super) unsaid: bool,
    pub(super) entries: BTreeMap<u64, Kept>,
    /// Of the entries together.
    pub(super) entries_size: u64,
    pub(super) file_size: u64,
}

/// What a log's file said when it was opened.
pub(super) struct Opened {
    pub(super) held: Held,
    /// Bytes of the file that are whole.
    pub(super) whole: usize,
}

/// A file for a log in which nothing happened.
pub(super) fn empty(anchor: PeerId) -> Vec<u8> {
    pieces(&[Event::Begin { format: FORMAT, anchor }])
}

/// Reads a log's file.
pub(super) fn read(path: &Path, bytes: &[u8], anchor: PeerId) -> Result<Opened, AnchorError> {
    let damaged = |at| AnchorError::Damaged { path: path.to_owned(), at };
    let (found, whole) = frame::read_all(bytes, PIECE_CAP).map_err(damaged)?;
    let mut held = Held { file_size: whole as u64, ..Held::default() };
    let mut at = 0;
    let mut begun = false;
    for piece in found {
        let mut rest = piece;
        while !rest.is_empty() {
            let (event, taken) = encoding::decode::<Event>(rest).map_err(|_| damaged(at))?;
            rest = &rest[taken..];
            if let Event::Begin { format, anchor: owner } = event {
                let path = path.to_owned();
                if format != FORMAT {
                    return Err(AnchorError::Format { path, format });
                }
                if owner != anchor {
                    return Err(AnchorError::Foreign { path, owner });
                }
                begun = true;
            } else if !begun || held.replay(event).is_err() {
                return Err(damaged(at));
            }
        }
        at += frame::HEAD + piece.len();
    }
    // A file comes to its name with its first piece in it.
    if !begun {
        return Err(damaged(0));
    }
    // Who led may have left entries that only it had. It leads again only once elected again, so
    // that they are either in the log before its new term or never agreed on.
    if let Some(vote) = &mut held.vote
        && vote.leader_id.voted_for.is_some_and(|candidate| candidate.0 == anchor)
    {
        vote.committed = false;
    }
    Ok(Opened { held, whole })
}

impl Held {
    fn replay(&mut self, event: Event) -> Result<(), Malformed> {
        match event {
            Event::Begin { .. } => {}
            Event::Voted(ballot) => self.vote = Some(ballot.vote()?),
            Event::Added(item) => {
                let size = encoding::encode(&item).len() as u64;
                self.add(item.entry()?, size);
            }
            Event::CutFrom(index) => self.cut_from(index),
            Event::Agreed(mark) => self.agreed = Some(mark.log_id()?),
            Event::Purged(mark) => self.purge(mark.log_id()?),
        }
        Ok(())
    }

    pub(super) fn add(&mut self, entry: Entry, size: u64) {
        self.entries_size += size;
        if let Some(old) = self.entries.insert(entry.log_id.index, Kept { entry, size }) {
            self.entries_size -= old.size;
        }
    }

    pub(super) fn cut_from(&mut self, index: u64) {
        let cut = self.entries.split_off(&index);
        self.entries_size -= cut.values().map(|kept| kept.size).sum::<u64>();
    }

    pub(super) fn purge(&mut self, upto: LogId) {
        let kept = self.entries.split_off(&(upto.index + 1));
        let gone = std::mem::replace(&mut self.entries, kept);
        self.entries_size -= gone.values().map(|kept| kept.size).sum::<u64>();
        self.purged = self.purged.max(Some(upto));
    }

    /// What the file would say if it were written now.
    pub(super) fn events(&self, anchor: PeerId) -> Vec<Event> {
        let entries = self.entries.values().map(|kept| Event::Added((&kept.entry).into()));
        std::iter::once(Event::Begin { format: FORMAT, anchor })
            .chain(self.purged.map(|id| Event::Purged(id.into())))
            .chain(self.vote.map(|vote| Event::Voted(vote.into())))
            .chain(entries)
            .chain(self.agreed.map(|id| Event::Agreed(id.into())))
            .collect()
    }
}

/// What is to be written for this to be said.
pub(super) fn pieces(events: &[Event]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut piece = Vec::new();
    for event in events {
        piece.extend(encoding::encode(event));
        if piece.len() >= PIECE {
            bytes.extend(frame::seal(&std::mem::take(&mut piece)));
        }
    }
    if !piece.is_empty() {
        bytes.extend(frame::seal(&piece));
    }
    bytes
}
