//! The contents of a log, and the journal file that they are replayed from.
//!
//! The file is a sequence of events: entries added or truncated, votes, and how far the log is
//! committed or covered by the snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use openraft::EntryPayload;
use shoal_protocol::ids::PeerId;

use super::encoding::{self, Ballot, Item, Malformed, Mark};
use super::error::AnchorError;
use super::frame;
use super::types::{AnchorId, Entry, LogId, Membership, Vote, log_id};

/// Version of the file format.
const FORMAT: u32 = 2;

/// Bytes at which a piece of the file is full; its last item may exceed that.
const PIECE: usize = 256 << 10;

/// The largest piece that is read.
const PIECE_CAP: usize = 1 << 20;

/// An event in the journal.
#[derive(Debug, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Event {
    /// The file's first event.
    Begin {
        /// Version of the file format.
        format: u32,
        /// The anchor whose file it is.
        anchor: PeerId,
    },
    /// A vote was given, or won.
    Voted(Ballot),
    /// The next entry.
    Added(Item),
    /// Entries from this index on conflict with the leader's and were never committed.
    CutFrom(u64),
    /// The log is committed up to this entry.
    Agreed(Mark),
    /// The snapshot covers the log up to this entry.
    Purged(Mark),
}

/// An entry and its encoded size.
pub struct Kept {
    /// The entry.
    pub entry: Entry,
    /// Bytes of the encoded entry.
    pub size: u64,
}

/// The contents of a log.
#[derive(Default)]
pub struct Held {
    /// The last vote.
    pub vote: Option<Vote>,
    /// The last entry that a snapshot covers.
    pub purged: Option<LogId>,
    /// The last entry that is committed.
    pub agreed: Option<LogId>,
    /// `agreed` grew since the last write to the file; the next write includes it.
    pub agreed_unwritten: bool,
    /// The entries behind the snapshot, by index.
    pub entries: BTreeMap<u64, Kept>,
    /// Bytes of all encoded entries.
    pub entries_size: u64,
    /// Bytes of the file.
    pub file_size: u64,
}

/// A log as read from its file.
pub struct Opened {
    /// What it holds.
    pub held: Held,
    /// Bytes of the file up to the end of the last whole piece.
    pub whole: usize,
}

/// The file of an empty log.
pub fn empty(anchor: PeerId) -> Vec<u8> {
    pieces(&[Event::Begin { format: FORMAT, anchor }])
}

/// Reads a log's file.
///
/// # Errors
/// If it is damaged, of another format or of another anchor.
pub fn read(path: &Path, bytes: &[u8], anchor: PeerId) -> Result<Opened, AnchorError> {
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
    // A new file has its first piece before it gets its name.
    if !begun {
        return Err(damaged(0));
    }
    // A former leader may hold entries that only it has. It must be elected again to lead, and by
    // then these entries are either in the log before its new term or never committed.
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

    /// Appends an entry of this encoded size, or puts it into the place of another.
    pub fn add(&mut self, entry: Entry, size: u64) {
        self.entries_size += size;
        if let Some(old) = self.entries.insert(entry.log_id.index, Kept { entry, size }) {
            self.entries_size -= old.size;
        }
    }

    /// Takes out the entries from this index on.
    pub fn cut_from(&mut self, index: u64) {
        let cut = self.entries.split_off(&index);
        self.entries_size -= cut.values().map(|kept| kept.size).sum::<u64>();
    }

    /// Takes out the entries that a snapshot covers.
    pub fn purge(&mut self, upto: LogId) {
        let kept = self.entries.split_off(&(upto.index + 1));
        let gone = std::mem::replace(&mut self.entries, kept);
        self.entries_size -= gone.values().map(|kept| kept.size).sum::<u64>();
        self.purged = self.purged.max(Some(upto));
    }

    /// Whether the voters without the removed ones, some of which vote, are no majority. `snapshot` has the
    /// membership that the entries may change.
    pub fn leaves_too_few(
        &self,
        snapshot: Option<&Membership>,
        removed: &BTreeSet<PeerId>,
    ) -> bool {
        let newest = self.entries.values().rev().find_map(|kept| match &kept.entry.payload {
            EntryPayload::Membership(membership) => Some(membership),
            _ => None,
        });
        // Of a change that has not ended, both sets must agree.
        let sets = newest.or(snapshot).map(Membership::get_joint_config);
        sets.into_iter().flatten().any(|voters| {
            let left = voters.iter().filter(|voter| !removed.contains(&voter.0)).count();
            left < voters.len() && left * 2 <= voters.len()
        })
    }

    /// Makes an anchor the only voter, in a term of its own after all that the log knows. What only the others
    /// have of the log is lost: they are gone for good, by the word of the run's issuer.
    pub fn keep_alone(&mut self, anchor: PeerId) -> Vec<Event> {
        let last = self.entries.last_key_value().map(|(_, kept)| kept.entry.log_id).or(self.purged);
        let voted = self.vote.map_or(0, |vote| vote.leader_id.term);
        let term = voted.max(last.map_or(0, |last| last.leader_id.term)) + 1;
        let (me, index) = (AnchorId(anchor), last.map_or(0, |last| last.index + 1));
        let vote = Vote::new(term, me);
        let membership = Membership::new(vec![BTreeSet::from([me])], None);
        let payload = EntryPayload::Membership(membership);
        let entry = Entry { log_id: log_id(term, index), payload };
        let item = Item::from(&entry);
        let size = encoding::encode(&item).len() as u64;
        self.vote = Some(vote);
        self.add(entry, size);
        vec![Event::Voted(vote.into()), Event::Added(item)]
    }

    /// The shortest sequence of events that describes this log.
    pub fn events(&self, anchor: PeerId) -> Vec<Event> {
        let entries = self.entries.values().map(|kept| Event::Added((&kept.entry).into()));
        std::iter::once(Event::Begin { format: FORMAT, anchor })
            .chain(self.purged.map(|id| Event::Purged(id.into())))
            .chain(self.vote.map(|vote| Event::Voted(vote.into())))
            .chain(entries)
            .chain(self.agreed.map(|id| Event::Agreed(id.into())))
            .collect()
    }
}

/// The encoded pieces of a sequence of events.
pub fn pieces(events: &[Event]) -> Vec<u8> {
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
