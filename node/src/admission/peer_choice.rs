//! A peer as an operator names it: by its identifier, by one of its ends, or by its name.

use std::collections::BTreeSet;
use std::str::FromStr;

use shoal_formats::words::title;
use shoal_protocol::ids::PeerId;
use shoal_protocol::plain_name::PeerName;

/// The most characters of a choice: no identifier is longer.
const LONGEST: usize = 64;

/// The fewest characters of a part of an identifier.
const PART: usize = 4;

/// The most candidates that an error names.
const NAMED: usize = 8;

/// A peer, or a part of its identifier, or its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerChoice(String);

impl FromStr for PeerChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let valid = (1..=LONGEST).contains(&text.len()) && text.bytes().all(plain);
        valid
            .then(|| Self(text.to_owned()))
            .ok_or("a peer is its id, the beginning or the end of it, or its name")
    }
}

/// A choice that is not one peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChoiceError {
    /// No known peer fits.
    #[error(
        "no {kind} has the name or the id {choice}: `{list}` lists them; the whole id of any peer will do"
    )]
    Unknown {
        /// What was given.
        choice: String,
        /// The peers to choose from, in words.
        kind: &'static str,
        /// The command that lists them.
        list: &'static str,
    },
    /// Several peers fit.
    #[error("{choice} may be any of {count} peers: {candidates}; give more of the id")]
    Ambiguous {
        /// What was given.
        choice: String,
        /// How many fit.
        count: usize,
        /// The first of them.
        candidates: String,
    },
}

/// The peers to choose from.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    known: BTreeSet<(PeerId, Option<PeerName>)>,
    kind: &'static str,
    list: &'static str,
}

impl Candidates {
    /// Peers of a kind, in words, that a command lists.
    pub(crate) fn new(kind: &'static str, list: &'static str) -> Self {
        Self { known: BTreeSet::new(), kind, list }
    }

    /// Adds peers. A peer may come twice, with its name and without.
    pub(crate) fn add(&mut self, peers: impl IntoIterator<Item = (PeerId, Option<PeerName>)>) {
        self.known.extend(peers);
    }

    /// The peer that is meant. A name and a part of an identifier count alike, so a peer that calls itself like another
    /// one's identifier makes the choice ambiguous.
    ///
    /// # Errors
    /// If no peer fits, or several do.
    pub(crate) fn find(&self, PeerChoice(choice): &PeerChoice) -> Result<PeerId, ChoiceError> {
        if let Ok(peer) = choice.parse() {
            return Ok(peer);
        }
        let fits = |(peer, name): &&(PeerId, Option<PeerName>)| {
            let id = peer.to_string();
            let is_part = id.starts_with(choice.as_str()) || id.ends_with(choice.as_str());
            (is_part && choice.len() >= PART)
                || name.as_ref().is_some_and(|name| name.as_str() == choice)
        };
        let found: BTreeSet<PeerId> =
            self.known.iter().filter(fits).map(|(peer, _)| *peer).collect();
        let choice = choice.clone();
        match (found.first(), found.len()) {
            (None, _) => Err(ChoiceError::Unknown { choice, kind: self.kind, list: self.list }),
            (Some(peer), 1) => Ok(*peer),
            (_, count) => {
                let first = found.iter().take(NAMED).map(|peer| self.describe(*peer));
                let candidates = first.collect::<Vec<_>>().join(", ");
                Err(ChoiceError::Ambiguous { choice, count, candidates })
            }
        }
    }

    fn describe(&self, peer: PeerId) -> String {
        let mut known = self.known.iter().filter(|(other, _)| *other == peer);
        let name = known.find_map(|(_, name)| name.as_ref());
        name.map_or_else(|| peer.to_string(), |name| title(peer, Some(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn candidates() -> Candidates {
        let name = |text: &str| Some(text.parse().expect("a name"));
        let mut candidates = Candidates::new("member", "shoal status");
        candidates.add([(peer(1), None), (peer(1), name("gpu-7")), (peer(2), name("twin"))]);
        candidates.add([(peer(3), name("twin")), (peer(4), None)]);
        candidates
    }

    fn find(text: &str) -> Result<PeerId, ChoiceError> {
        candidates().find(&text.parse().expect("plain"))
    }

    #[test]
    fn a_peer_is_found_by_its_name_and_by_the_ends_of_its_id() {
        assert_eq!(find("gpu-7"), Ok(peer(1)));
        for number in 1..=4 {
            let id = peer(number).to_string();
            assert_eq!(find(&id), Ok(peer(number)));
            assert_eq!(find(&peer(number).short()), Ok(peer(number)));
            assert_eq!(find(&id[..id.len() - 1]), Ok(peer(number)));
        }
        let id = peer(4).to_string();
        assert!(matches!(find(&id[id.len() - 3..]), Err(ChoiceError::Unknown { .. })), "too short");
        // A whole identifier needs not be known.
        assert_eq!(find(&peer(9).to_string()), Ok(peer(9)));
    }

    #[test]
    fn what_may_be_several_peers_is_refused_with_the_candidates() {
        let error = find("twin").expect_err("two").to_string();
        let (two, three) = (peer(2).short(), peer(3).short());
        let expected = format!(
            "twin may be any of 2 peers: twin ({two}), twin ({three}); give more of the id"
        );
        assert_eq!(error, expected);
        // Every identifier begins alike.
        assert!(matches!(find("12D3KooW"), Err(ChoiceError::Ambiguous { count: 4, .. })));
    }

    #[test]
    fn a_peer_that_calls_itself_like_another_is_not_taken_for_it() {
        let mut candidates = candidates();
        candidates.add([(peer(5), Some(peer(1).short().parse().expect("a name")))]);
        let choice = peer(1).short().parse().expect("plain");
        assert!(matches!(candidates.find(&choice), Err(ChoiceError::Ambiguous { count: 2, .. })));
    }

    #[test]
    fn an_unknown_peer_is_refused_with_where_to_look() {
        let error = find("gpu-8").expect_err("unknown").to_string();
        assert!(
            error.contains("no member has the name or the id gpu-8: `shoal status`"),
            "{error}"
        );
        assert!("two words".parse::<PeerChoice>().is_err() && "".parse::<PeerChoice>().is_err());
    }
}
