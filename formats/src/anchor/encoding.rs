//! Raft's values as bytes, in a format of our own. Files and messages stay readable when the library
//! changes its types, and values from a peer are checked before they are used.

use std::collections::BTreeSet;

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use openraft::EntryPayload;
use shoal_protocol::history::History;
use shoal_protocol::ids::{PeerId, Term};
use shoal_protocol::message::LogRecord;

use super::types::{AnchorId, Entry, LogId, Membership, Proposal, StoredMembership, Vote, log_id};

/// Bytes of an encoded history with its position in the log.
pub const SNAPSHOT: usize = 16 << 20;

/// Voters and learners of one log.
const ANCHORS: usize = 64;

/// Terms and indexes beyond are invalid, so that increments cannot overflow.
const NUMBERS: u64 = 1 << 56;

const CONFIG: Configuration<LittleEndian, Varint, Limit<SNAPSHOT>> =
    bincode::config::standard().with_limit::<SNAPSHOT>();

/// Why bytes are no valid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They do not encode the expected type.
    #[error("{0}")]
    Bytes(String),
    /// A term or index is too large.
    #[error("{0} is too large for a term or a log index")]
    Number(u64),
    /// A membership has no valid sets of voters.
    #[error("the sets of voters are invalid")]
    Voters,
    /// Bytes follow the value.
    #[error("bytes follow the value")]
    Trailing,
}

/// Encodes one of our types for the disk.
pub fn encode(value: &impl bincode::Encode) -> Vec<u8> {
    bincode::encode_to_vec(value, CONFIG).expect("writing to memory does not fail")
}

/// Decodes a value at the start of the bytes, and returns its length.
pub fn decode<T: bincode::Decode<()>>(bytes: &[u8]) -> Result<(T, usize), Malformed> {
    bincode::decode_from_slice(bytes, CONFIG).map_err(|error| Malformed::Bytes(error.to_string()))
}

/// A position in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Mark {
    term: u64,
    index: u64,
}

impl From<LogId> for Mark {
    fn from(id: LogId) -> Self {
        Self { term: id.leader_id.term, index: id.index }
    }
}

impl Mark {
    /// Its place in the log.
    ///
    /// # Errors
    /// If it is none of a log.
    pub fn log_id(self) -> Result<LogId, Malformed> {
        Ok(log_id(number(self.term)?, number(self.index)?))
    }
}

/// A position in the log, or none before the first entry.
pub fn place(mark: Option<Mark>) -> Result<Option<LogId>, Malformed> {
    mark.map(Mark::log_id).transpose()
}

/// The candidate that an anchor voted for, and whether it is known to be elected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Ballot {
    /// The term.
    pub term: u64,
    /// The anchor that it is for.
    pub candidate: Option<PeerId>,
    /// Whether a majority gave theirs.
    pub elected: bool,
}

impl From<Vote> for Ballot {
    fn from(vote: Vote) -> Self {
        let candidate = vote.leader_id.voted_for.map(|id| id.0);
        Self { term: vote.leader_id.term, candidate, elected: vote.committed }
    }
}

impl Ballot {
    /// As openraft has it.
    ///
    /// # Errors
    /// If no anchor is named.
    pub fn vote(self) -> Result<Vote, Malformed> {
        let leader_id = openraft::LeaderId {
            term: number(self.term)?,
            voted_for: self.candidate.map(AnchorId),
        };
        Ok(Vote { leader_id, committed: self.elected })
    }
}

/// The log's membership.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AnchorSet {
    /// The voters; two groups during a joint consensus.
    voters: Vec<BTreeSet<PeerId>>,
    /// Peers that receive the log without a vote.
    learners: BTreeSet<PeerId>,
}

impl From<&Membership> for AnchorSet {
    fn from(membership: &Membership) -> Self {
        let peers = |ids: &BTreeSet<AnchorId>| ids.iter().map(|id| id.0).collect();
        Self {
            voters: membership.get_joint_config().iter().map(peers).collect(),
            learners: membership.learner_ids().map(|id| id.0).collect(),
        }
    }
}

impl AnchorSet {
    /// An empty membership is valid: an empty log has one.
    fn membership(&self) -> Result<Membership, Malformed> {
        let count = self.voters.iter().map(BTreeSet::len).sum::<usize>() + self.learners.len();
        let none = self.voters.iter().any(BTreeSet::is_empty);
        if self.voters.len() > 2 || none || count > 2 * ANCHORS {
            return Err(Malformed::Voters);
        }
        let ids = |peers: &BTreeSet<PeerId>| peers.iter().copied().map(AnchorId).collect();
        Ok(Membership::new(self.voters.iter().map(ids).collect(), ids(&self.learners)))
    }
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub struct Item {
    at: Mark,
    content: Content,
}

#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
enum Content {
    /// A leader's first entry.
    Opening,
    Record {
        term: Term,
        record: LogRecord,
    },
    AnchorSet(AnchorSet),
}

impl From<&Entry> for Item {
    fn from(entry: &Entry) -> Self {
        let content = match &entry.payload {
            EntryPayload::Blank => Content::Opening,
            EntryPayload::Normal(Proposal { term, record }) => {
                Content::Record { term: *term, record: record.clone() }
            }
            EntryPayload::Membership(membership) => Content::AnchorSet(membership.into()),
        };
        Self { at: entry.log_id.into(), content }
    }
}

impl Item {
    /// As openraft has it.
    ///
    /// # Errors
    /// If its place or content is none of a log.
    pub fn entry(self) -> Result<Entry, Malformed> {
        let payload = match self.content {
            Content::Opening => EntryPayload::Blank,
            Content::Record { term, record } => EntryPayload::Normal(Proposal { term, record }),
            Content::AnchorSet(anchors) if anchors.voters.is_empty() => {
                return Err(Malformed::Voters);
            }
            Content::AnchorSet(anchors) => EntryPayload::Membership(anchors.membership()?),
        };
        Ok(Entry { log_id: self.at.log_id()?, payload })
    }
}

/// The history up to a position in the log, in place of all entries up to there.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    /// What all records amount to.
    pub history: History,
    /// The last record in it.
    pub last: Option<LogId>,
    /// The anchors, and the record that named them.
    pub anchors: StoredMembership,
}

#[derive(bincode::Encode, bincode::Decode)]
struct ImageBytes {
    history: History,
    last: Option<Mark>,
    anchors_at: Option<Mark>,
    anchors: AnchorSet,
}

impl Image {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(&ImageBytes {
            history: self.history.clone(),
            last: self.last.map(Mark::from),
            anchors_at: self.anchors.log_id().map(Mark::from),
            anchors: self.anchors.membership().into(),
        })
    }

    /// Reads its bytes.
    ///
    /// # Errors
    /// If they are none of an image.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (image, taken) = decode::<ImageBytes>(bytes)?;
        if taken != bytes.len() {
            return Err(Malformed::Trailing);
        }
        let membership = image.anchors.membership()?;
        Ok(Self {
            history: image.history,
            last: place(image.last)?,
            anchors: StoredMembership::new(place(image.anchors_at)?, membership),
        })
    }
}

fn number(number: u64) -> Result<u64, Malformed> {
    if number < NUMBERS { Ok(number) } else { Err(Malformed::Number(number)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(numbers: &[u8]) -> BTreeSet<PeerId> {
        numbers.iter().map(|number| PeerId([*number; 32])).collect()
    }

    #[test]
    fn entries_read_back() {
        let anchors =
            AnchorSet { voters: vec![peers(&[1, 2]), peers(&[2, 3])], learners: peers(&[4]) };
        let record = LogRecord::Term(Term(3));
        for content in [
            Content::Opening,
            Content::Record { term: Term(3), record },
            Content::AnchorSet(anchors),
        ] {
            let item = Item { at: Mark { term: 3, index: 9 }, content };
            let (read, taken) = decode::<Item>(&encode(&item)).expect("whole");
            assert_eq!((&read, taken), (&item, encode(&item).len()));
            assert_eq!(Item::from(&read.entry().expect("valid")), item);
        }
    }

    #[test]
    fn invalid_values_are_rejected() {
        let far = Mark { term: 1, index: u64::MAX };
        assert_eq!(far.log_id(), Err(Malformed::Number(u64::MAX)));
        let ballot = Ballot { term: NUMBERS, candidate: None, elected: true };
        assert_eq!(ballot.vote(), Err(Malformed::Number(NUMBERS)));
        let many: BTreeSet<PeerId> = (0..200).map(|number| PeerId([number; 32])).collect();
        for voters in [vec![], vec![peers(&[])], vec![peers(&[1]); 3], vec![many]] {
            let anchors = AnchorSet { voters, learners: peers(&[]) };
            let item =
                Item { at: Mark { term: 1, index: 1 }, content: Content::AnchorSet(anchors) };
            assert_eq!(item.entry(), Err(Malformed::Voters));
        }
    }
}
