//! The flags of `shoal invite`, `shoal audit`, `shoal ban` and `shoal unban`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use shoal_protocol::ids::PeerId;
use shoal_protocol::net::admission::TicketId;

use super::default_data_dir;
use crate::admission::PeerChoice;

/// The longest lifetime of a ticket.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// `shoal invite`
#[derive(Debug, Clone, Subcommand)]
pub enum InviteCommand {
    /// Create a ticket: its bearer joins with `shoal join TICKET`.
    New(InviteNewArgs),
    /// List tickets and their uses, and allowed and banned peers.
    Ls(InviteLsArgs),
    /// Revoke a ticket with all its certificates, or remove a peer from the access list.
    Revoke(InviteRevokeArgs),
    /// Allow peers by their ids, without a ticket.
    Allow(InviteAllowArgs),
}

/// `shoal invite new`
#[derive(Debug, Clone, Args)]
pub struct InviteNewArgs {
    /// Lifetime of the ticket: 30m, 24h, 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_life)]
    pub ttl: Duration,
    /// Number of peers that the ticket admits.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub uses: u16,
    /// Let them be anchors too (`shoal join --anchor`).
    #[arg(long)]
    pub anchor: bool,
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal invite ls`
#[derive(Debug, Clone, Args)]
pub struct InviteLsArgs {
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}

/// `shoal invite revoke`
#[derive(Debug, Clone, Args)]
pub struct InviteRevokeArgs {
    /// Number of a ticket, as `shoal invite ls` prints it, or a peer on the access list: its id, or the beginning or end
    /// of it.
    #[arg(value_name = "ID")]
    pub what: Invited,
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal invite allow`
#[derive(Debug, Clone, Args)]
pub struct InviteAllowArgs {
    /// Ids of the peers, as `shoal id` prints them there.
    #[arg(value_name = "PEER", required = true)]
    pub peers: Vec<PeerId>,
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal anchor`
#[derive(Debug, Clone, Subcommand)]
pub enum AnchorCommand {
    /// Remove anchors that are gone for good. They are banned, so that they cannot come back with the old log.
    ///
    /// The others replace them while they are a majority of the anchors. Where they are not, the run is paused:
    /// start the issuer's peer again with `shoal start`, and it keeps the log alone until others join it.
    Remove(AnchorRemoveArgs),
}

/// `shoal anchor remove`
#[derive(Debug, Clone, Args)]
pub struct AnchorRemoveArgs {
    /// The anchors: their names or ids, as `shoal status` prints them, or the beginnings or ends of the ids.
    #[arg(value_name = "PEER", required = true)]
    pub peers: Vec<PeerChoice>,
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// `shoal ban` and `shoal unban`
#[derive(Debug, Clone, Args)]
pub struct BanArgs {
    /// The peer: its name or id, as `shoal status` prints it, or the beginning or end of the id.
    #[arg(value_name = "PEER")]
    pub peer: PeerChoice,
    /// The data directory of the run's issuer; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
}

/// A ticket or a peer to revoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invited {
    /// A ticket.
    Ticket(TicketId),
    /// A peer on the access list.
    Peer(PeerChoice),
}

impl FromStr for Invited {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let ticket = text.parse().map(|number| Self::Ticket(TicketId(number)));
        ticket.or_else(|_| {
            let peer = text.parse().map(Self::Peer);
            peer.map_err(|_| "the number of a ticket (`shoal invite ls`) or the id of a peer")
        })
    }
}

/// Reads a number of minutes, hours or days.
fn parse_life(text: &str) -> Result<Duration, &'static str> {
    let wrong = "a number with s, m, h or d, at most 366d, as 24h";
    let unit = text.chars().next_back().ok_or(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => 24 * 60 * 60,
        _ => return Err(wrong),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wrong)?;
    let life = count.checked_mul(seconds).map(Duration::from_secs);
    life.filter(|life| (Duration::from_secs(1)..=LONGEST).contains(life)).ok_or(wrong)
}

/// `shoal audit`
#[derive(Debug, Clone, Args)]
pub struct AuditArgs {
    /// The data directory of an anchor; its peer may be running.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_has_a_unit_and_a_limit() {
        assert_eq!(parse_life("24h"), Ok(Duration::from_secs(24 * 60 * 60)));
        assert_eq!(parse_life("90s"), Ok(Duration::from_secs(90)));
        for text in ["", "h", "0h", "24", "367d", "1y", "-1h", "99999999999999999999d", "1é"] {
            assert!(parse_life(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tickets_have_numbers_and_peers_have_ids_or_names() {
        let peer = PeerId([7; 32]);
        assert_eq!("12".parse(), Ok(Invited::Ticket(TicketId(12))));
        for text in [&peer.to_string(), "twelve"] {
            let choice = text.parse().expect("plain");
            assert_eq!(text.parse(), Ok(Invited::Peer(choice)));
        }
        assert!("two words".parse::<Invited>().is_err());
    }
}
