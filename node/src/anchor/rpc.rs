//! What anchors say to each other: Raft's requests and their answers.

use openraft::raft::{AppendEntriesRequest, VoteRequest, VoteResponse};
use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;

use super::encoding::{Ballot, Item, Malformed, Mark, place};
use super::types::{AnchorId, LogId, Types, Vote};

/// One message's body; the rest of a control message is around it.
pub(super) const BODY: usize = (limits::CONTROL_MESSAGE.0 as usize) - (4 << 10);

/// One record, which must fit into a body together with what Raft says of it.
pub(super) const RECORD: usize = BODY - (4 << 10);

/// One piece of a snapshot.
pub(super) const SNAPSHOT_PIECE: usize = 64 << 10;

#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub(super) enum Request {
    /// The leader's log from a place on, or just that it still leads.
    Append { ballot: Ballot, previous: Option<Mark>, agreed: Option<Mark>, items: Vec<Item> },
    /// A candidate asks for a vote.
    Vote { ballot: Ballot, last: Option<Mark> },
    /// A piece of the leader's snapshot, which goes up to this place in the log.
    Snapshot { ballot: Ballot, last: Mark, offset: u64, bytes: Vec<u8>, done: bool },
    /// Whether the receiver would vote for the sender. Nothing is changed by asking.
    WouldVote { last: Option<Mark> },
}

#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
pub(super) enum Answer {
    /// The log is the leader's up to the end of what was sent.
    Appended,
    /// The entry before is not the leader's.
    Conflict,
    /// The receiver obeys this one.
    Higher(Ballot),
    /// The receiver's vote, and the end of its log.
    Vote { ballot: Ballot, granted: bool, last: Option<Mark> },
    /// The piece arrived; after the last one, the snapshot is in use.
    Received,
    /// The pieces before are missing.
    FromStart,
    /// Whether it would vote so.
    WouldVote(bool),
}

/// Why a request is not listened to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unsound {
    /// It says what cannot be.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// It speaks for another than its sender.
    #[error("it speaks for another peer")]
    Sender,
    /// A leader that was not elected, or a candidate that was.
    #[error("it claims an election that was not, or is not yet")]
    Election,
    /// Entries that do not follow each other.
    #[error("its entries do not follow each other")]
    Order,
    /// Too large together with what came before.
    #[error("it makes a snapshot larger than any is")]
    TooLarge,
}

/// The vote behind a request, which must be its sender's own.
pub(super) fn own_vote(from: PeerId, ballot: Ballot, elected: bool) -> Result<Vote, Unsound> {
    if ballot.candidate != Some(from) {
        return Err(Unsound::Sender);
    }
    if ballot.elected != elected || ballot.term == 0 {
        return Err(Unsound::Election);
    }
    Ok(ballot.vote()?)
}

/// A leader's request as Raft takes it.
pub(super) fn append_request(
    vote: Vote,
    previous: Option<Mark>,
    agreed: Option<Mark>,
    items: Vec<Item>,
) -> Result<AppendEntriesRequest<Types>, Unsound> {
    let prev_log_id = place(previous)?;
    let mut entries = Vec::with_capacity(items.len());
    let mut last = prev_log_id;
    for item in items {
        let entry = item.entry()?;
        let next = last.map_or(0, |last: LogId| last.index + 1);
        let term = entry.log_id.leader_id.term;
        let fits = last.is_none_or(|last| last.leader_id.term <= term);
        if entry.log_id.index != next || !fits || term > vote.leader_id.term {
            return Err(Unsound::Order);
        }
        last = Some(entry.log_id);
        entries.push(entry);
    }
    Ok(AppendEntriesRequest { vote, prev_log_id, entries, leader_commit: place(agreed)? })
}

/// A candidate's request as Raft takes it.
pub(super) fn vote_request(
    vote: Vote,
    last: Option<Mark>,
) -> Result<VoteRequest<AnchorId>, Unsound> {
    Ok(VoteRequest { vote, last_log_id: place(last)? })
}

/// An answer to a candidate as Raft takes it.
pub(super) fn vote_response(
    ballot: Ballot,
    granted: bool,
    last: Option<Mark>,
) -> Result<VoteResponse<AnchorId>, Unsound> {
    Ok(VoteResponse { vote: ballot.vote()?, vote_granted: granted, last_log_id: place(last)? })
}

/// The vote that outranks a leader's: none of its own term does.
pub(super) fn higher_vote(than: Vote, ballot: Ballot) -> Result<Vote, Unsound> {
    if ballot.term <= than.leader_id.term || ballot.candidate.is_none() {
        return Err(Unsound::Election);
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
    fn nobody_speaks_for_another() {
        let ballot = Ballot { term: 3, candidate: Some(ME), elected: true };
        assert!(own_vote(ME, ballot, true).is_ok());
        assert_eq!(own_vote(OTHER, ballot, true), Err(Unsound::Sender));
        assert_eq!(own_vote(ME, ballot, false), Err(Unsound::Election));
        let nobody = Ballot { candidate: None, ..ballot };
        assert_eq!(own_vote(ME, nobody, true), Err(Unsound::Sender));
    }

    #[test]
    fn entries_follow_each_other() {
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
            assert!(matches!(append(wrong), Err(Unsound::Order)));
        }
    }

    #[test]
    fn only_a_later_term_outranks_a_leader() {
        let mine = Vote::new_committed(3, AnchorId(ME));
        let ballot = Ballot { term: 3, candidate: Some(OTHER), elected: true };
        assert_eq!(higher_vote(mine, ballot), Err(Unsound::Election));
        assert!(higher_vote(mine, Ballot { term: 4, ..ballot }).is_ok());
    }
}
