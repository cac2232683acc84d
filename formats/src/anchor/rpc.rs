//! Messages between anchors: Raft's requests and their answers.

use openraft::raft::{AppendEntriesRequest, VoteRequest, VoteResponse};
use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::{Signature, TermVote};

use super::encoding::{Ballot, Item, Malformed, Mark, place};
use super::types::{AnchorId, LogId, Types, Vote};

/// Bytes of a message's body; the rest of a control message surrounds it.
pub const BODY: usize = (limits::CONTROL_MESSAGE.0 as usize) - (4 << 10);

/// Bytes of a record, which fits into a body together with Raft's fields.
pub const RECORD: usize = BODY - (4 << 10);

/// Bytes of a piece of a snapshot.
pub const SNAPSHOT_PIECE: usize = 64 << 10;

/// What an anchor asks another.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Request {
    /// Entries of the leader's log, or none as a heartbeat.
    Append {
        /// The sender's vote.
        ballot: Ballot,
        /// The entry before these.
        previous: Option<Mark>,
        /// The last entry that is committed.
        agreed: Option<Mark>,
        /// The entries.
        items: Vec<Item>,
    },
    /// A candidate asks for a vote.
    Vote {
        /// The sender's vote.
        ballot: Ballot,
        /// The end of its log.
        last: Option<Mark>,
    },
    /// A piece of the leader's snapshot, which covers the log up to `last`.
    Snapshot {
        /// The sender's vote.
        ballot: Ballot,
        /// The last entry that the snapshot covers.
        last: Mark,
        /// Place of the piece in the snapshot.
        offset: u64,
        /// The piece.
        bytes: Vec<u8>,
        /// Whether it is the last one.
        done: bool,
    },
    /// Whether the receiver would vote for the sender. The request changes no state.
    WouldVote {
        /// The end of the sender's log.
        last: Option<Mark>,
    },
    /// The leader asks for a signature under its election.
    Vouch {
        /// What is to be signed.
        vote: TermVote,
    },
}

/// What an anchor answers.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub enum Answer {
    /// The receiver's log equals the leader's up to the end of these entries.
    Appended,
    /// The receiver's entry at `previous` differs from the leader's.
    Conflict,
    /// The receiver follows a higher vote.
    Higher(Ballot),
    /// The receiver's vote, and the end of its log.
    Vote {
        /// The vote that the receiver follows.
        ballot: Ballot,
        /// Whether it is for the sender.
        granted: bool,
        /// The end of the receiver's log.
        last: Option<Mark>,
    },
    /// The piece arrived. After the last one, the snapshot is installed.
    Received,
    /// Earlier pieces are missing: send the snapshot from its start.
    FromStart,
    /// Whether the receiver would vote for the sender.
    WouldVote(bool),
    /// The receiver's signature, if it follows this leader with the same voters.
    Vouched(Option<Signature>),
}

/// Why a request is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Its contents are invalid.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// It names a candidate other than its sender.
    #[error("its candidate is not its sender")]
    Sender,
    /// Its leader was not elected, or its candidate was.
    #[error("its state of election does not fit a request of this kind")]
    Election,
    /// Its entries are not consecutive.
    #[error("its entries are not consecutive")]
    Order,
    /// The snapshot exceeds the size limit.
    #[error("its snapshot exceeds the size limit")]
    TooLarge,
}

/// The vote in a request, which must name the sender.
pub fn own_vote(from: PeerId, ballot: Ballot, elected: bool) -> Result<Vote, Invalid> {
    if ballot.candidate != Some(from) {
        return Err(Invalid::Sender);
    }
    if ballot.elected != elected || ballot.term == 0 {
        return Err(Invalid::Election);
    }
    Ok(ballot.vote()?)
}

/// A leader's request in Raft's form.
pub fn append_request(
    vote: Vote,
    previous: Option<Mark>,
    agreed: Option<Mark>,
    items: Vec<Item>,
) -> Result<AppendEntriesRequest<Types>, Invalid> {
    let prev_log_id = place(previous)?;
    let mut entries = Vec::with_capacity(items.len());
    let mut last = prev_log_id;
    for item in items {
        let entry = item.entry()?;
        let next = last.map_or(0, |last: LogId| last.index + 1);
        let term = entry.log_id.leader_id.term;
        let fits = last.is_none_or(|last| last.leader_id.term <= term);
        if entry.log_id.index != next || !fits || term > vote.leader_id.term {
            return Err(Invalid::Order);
        }
        last = Some(entry.log_id);
        entries.push(entry);
    }
    Ok(AppendEntriesRequest { vote, prev_log_id, entries, leader_commit: place(agreed)? })
}

/// A candidate's request in Raft's form.
pub fn vote_request(vote: Vote, last: Option<Mark>) -> Result<VoteRequest<AnchorId>, Invalid> {
    Ok(VoteRequest { vote, last_log_id: place(last)? })
}

/// The answer to a candidate in Raft's form.
pub fn vote_response(
    ballot: Ballot,
    granted: bool,
    last: Option<Mark>,
) -> Result<VoteResponse<AnchorId>, Invalid> {
    Ok(VoteResponse { vote: ballot.vote()?, vote_granted: granted, last_log_id: place(last)? })
}

/// A vote that outranks a leader's, so that its term is higher.
pub fn higher_vote(than: Vote, ballot: Ballot) -> Result<Vote, Invalid> {
    if ballot.term <= than.leader_id.term || ballot.candidate.is_none() {
        return Err(Invalid::Election);
    }
    Ok(ballot.vote()?)
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::Term;
    use shoal_protocol::message::LogRecord;

    use super::super::types::{Entry, Proposal, log_id};
    use super::*;

    const ME: PeerId = PeerId([1; 32]);
    const OTHER: PeerId = PeerId([2; 32]);

    fn item(term: u64, index: u64) -> Item {
        let proposal = Proposal { term: Term(term), record: LogRecord::Term(Term(term)) };
        let payload = openraft::EntryPayload::Normal(proposal);
        Item::from(&Entry { log_id: log_id(term, index), payload })
    }

    #[test]
    fn a_request_must_name_its_sender() {
        let ballot = Ballot { term: 3, candidate: Some(ME), elected: true };
        assert!(own_vote(ME, ballot, true).is_ok());
        assert_eq!(own_vote(OTHER, ballot, true), Err(Invalid::Sender));
        assert_eq!(own_vote(ME, ballot, false), Err(Invalid::Election));
        let nobody = Ballot { candidate: None, ..ballot };
        assert_eq!(own_vote(ME, nobody, true), Err(Invalid::Sender));
    }

    #[test]
    fn entries_must_be_consecutive() {
        let vote = Vote::new_committed(3, AnchorId(ME));
        let append = |items| append_request(vote, Some(log_id(2, 4).into()), None, items);
        assert_eq!(append(vec![item(2, 5), item(3, 6)]).expect("in order").entries.len(), 2);
        for wrong in [
            vec![item(2, 4)],
            vec![item(2, 6)],
            vec![item(1, 5)],
            vec![item(4, 5)],
            vec![item(3, 5), item(2, 6)],
        ] {
            assert!(matches!(append(wrong), Err(Invalid::Order)));
        }
    }

    #[test]
    fn only_a_later_term_outranks_a_leader() {
        let mine = Vote::new_committed(3, AnchorId(ME));
        let ballot = Ballot { term: 3, candidate: Some(OTHER), elected: true };
        assert_eq!(higher_vote(mine, ballot), Err(Invalid::Election));
        assert!(higher_vote(mine, Ballot { term: 4, ..ballot }).is_ok());
    }
}
