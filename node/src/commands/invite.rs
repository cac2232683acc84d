//! `shoal invite`, `ban` and `unban`: what the warden of a run signs, from its data directory. A peer that runs
//! there notices, and tells the others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;
use shoal_protocol::ids::{PeerId, RunId};
use shoal_protocol::manifest::AdmissionMode;
use shoal_protocol::net::admission::{AccessList, RedemptionLog, TicketId, UnixTime};
use shoal_protocol::net::identity::Identity;

use crate::admission::{self, KeptRules, Store, TicketState, access_list_of};
use crate::cli::{
    BanArgs, InviteAllowArgs, InviteCommand, InviteLsArgs, InviteNewArgs, InviteRevokeArgs,
    Invited, ListFormat,
};
use crate::exit::{Exit, ExitWith};

/// Does what was asked for.
///
/// # Errors
/// When the data directory is not the warden's, or the disk refuses.
pub(super) fn run(command: &InviteCommand) -> anyhow::Result<()> {
    match command {
        InviteCommand::New(args) => new(args),
        InviteCommand::Ls(args) => list(args),
        InviteCommand::Revoke(args) => revoke(args),
        InviteCommand::Allow(args) => allow(args),
    }
}

/// The warden's key and folder.
struct Office {
    issuer: Identity,
    folder: Store,
    rules: KeptRules,
}

impl Office {
    fn open(data_dir: &Path) -> anyhow::Result<Self> {
        let folder = Store::current(data_dir).exit_with(Exit::Usage)?;
        let rules = folder.rules().exit_with(Exit::Usage)?;
        // Not through `DataDir`, which a running peer has locked.
        let issuer = Identity::load_or_create(&data_dir.join("identity"))?;
        match rules.admission.key {
            Some(key) if key == issuer.peer_id() => Ok(Self { issuer, folder, rules }),
            Some(key) => Err(anyhow::anyhow!(
                "who may join run {} is signed by peer {key}: do this where that peer's data directory is",
                rules.run
            )),
            None => Err(anyhow::anyhow!(
                "run {} is open, and nobody's key is in it: bans need `key` under [admission] in run.toml, \
                 from its start",
                rules.run
            )),
        }
        .exit_with(Exit::Usage)
    }

    fn run(&self) -> RunId {
        self.rules.run
    }

    /// Changes the roster and signs its next edition.
    fn change(
        &self,
        change: impl FnOnce(&mut AccessList) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let _lock = self.folder.lock()?;
        let mut access_list = access_list_of(&self.folder)?;
        change(&mut access_list)?;
        let signed = access_list.publish(self.run(), &self.issuer, UnixTime::now());
        self.folder.store_access_list(&signed)
    }
}

fn new(args: &InviteNewArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    match office.rules.admission.mode {
        AdmissionMode::Invite => {}
        AdmissionMode::Open => {
            let text =
                "the run is open: others need no ticket, only the line that `shoal start` prints";
            return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
        }
        AdmissionMode::Allowlist => {
            let text = "the run lets in listed peers: list this one with `shoal invite allow PEER`";
            return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
        }
    }
    let ticket = admission::issue(&office.folder, &office.issuer, args.ttl, args.uses)?;
    println!("{ticket}");
    Ok(())
}

fn revoke(args: &InviteRevokeArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    match args.what {
        Invited::Ticket(id) => {
            let tickets = office.folder.tickets()?;
            let ticket = tickets.iter().find(|ticket| ticket.id == id);
            let missing = || format!("there is no ticket {id}: `shoal invite ls` lists them");
            let expires = ticket.with_context(missing).exit_with(Exit::Usage)?.expires;
            office.change(|access_list| Ok(access_list.revoke(id, expires)?))?;
            println!("ticket {id} is revoked, and every permit that came of it");
        }
        Invited::Peer(peer) => {
            office.change(|access_list| {
                let listed = access_list.disallow(peer);
                anyhow::ensure!(
                    listed,
                    "peer {peer} is not on the list: `shoal ban` closes the run to it"
                );
                Ok(())
            })?;
            println!("{peer} is no longer let in by name");
        }
    }
    Ok(())
}

fn allow(args: &InviteAllowArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    office.change(|access_list| {
        for peer in &args.peers {
            access_list.allow(*peer)?;
        }
        Ok(())
    })?;
    for peer in &args.peers {
        println!("{peer} is let in");
    }
    Ok(())
}

/// `shoal ban`
///
/// # Errors
/// As [`run`].
pub(super) fn ban(args: &BanArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    if args.peer == office.issuer.peer_id() {
        return Err(anyhow::anyhow!("the warden cannot ban itself")).exit_with(Exit::Usage);
    }
    office.change(|access_list| Ok(access_list.ban(args.peer)?))?;
    println!("{} is banned", args.peer);
    Ok(())
}

/// `shoal unban`
///
/// # Errors
/// As [`run`], and when the peer is not banned.
pub(super) fn unban(args: &BanArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    office.change(|access_list| {
        anyhow::ensure!(access_list.unban(args.peer), "peer {} is not banned", args.peer);
        Ok(())
    })?;
    println!("{} is no longer banned", args.peer);
    Ok(())
}

/// A ticket in the list.
#[derive(Debug, Serialize)]
struct ListedTicket {
    id: TicketId,
    ticket_state: TicketState,
    uses: u16,
    expires: UnixTime,
    claimed_by: Vec<PeerId>,
    ticket: String,
}

/// Everything that the warden has said.
#[derive(Debug, Serialize)]
struct Listed {
    run: RunId,
    mode: AdmissionMode,
    access_list: u64,
    tickets: Vec<ListedTicket>,
    allowed: Vec<PeerId>,
    banned: Vec<PeerId>,
}

fn list(args: &InviteLsArgs) -> anyhow::Result<()> {
    let office = Office::open(&args.data_dir)?;
    let listed = listed(&office, UnixTime::now())?;
    match args.output {
        ListFormat::Json => println!("{}", serde_json::to_string_pretty(&listed)?),
        ListFormat::Text => print!("{}", table(&listed, UnixTime::now())?),
    }
    Ok(())
}

fn listed(office: &Office, now: UnixTime) -> anyhow::Result<Listed> {
    let access_list = access_list_of(&office.folder)?;
    let mut claims: BTreeMap<TicketId, Vec<PeerId>> = BTreeMap::new();
    for claim in RedemptionLog::read(&office.folder.claims())? {
        claims.entry(claim.ticket).or_default().push(claim.peer);
    }
    let tickets = office.folder.tickets()?.into_iter().map(|ticket| {
        let claimed_by = claims.remove(&ticket.id).unwrap_or_default();
        let ticket_state = ticket.ticket_state(claimed_by.len(), &access_list, now);
        let (id, uses, expires) = (ticket.id, ticket.uses, ticket.expires);
        ListedTicket { id, ticket_state, uses, expires, claimed_by, ticket: ticket.text }
    });
    Ok(Listed {
        run: office.run(),
        mode: office.rules.admission.mode,
        access_list: access_list.version,
        tickets: tickets.collect(),
        allowed: access_list.allowed.into_iter().collect(),
        banned: access_list.banned.into_iter().collect(),
    })
}

fn table(listed: &Listed, now: UnixTime) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    writeln!(text, "{:<8}{:<9}{:<7}{:<12}used by", "ticket", "state", "uses", "expires in")?;
    for ticket in &listed.tickets {
        let left = ticket.expires.since(now).as_secs();
        let left = match left {
            0 => "-".to_owned(),
            1..7200 => format!("{} min", left.div_ceil(60)),
            _ => format!("{} h", left / 3600),
        };
        let uses = format!("{}/{}", ticket.claimed_by.len(), ticket.uses);
        let peers: Vec<String> = ticket.claimed_by.iter().map(ToString::to_string).collect();
        let row = format!(
            "{:<8}{:<9}{uses:<7}{left:<12}{}",
            ticket.id,
            ticket.ticket_state.word(),
            peers.join(" ")
        );
        writeln!(text, "{}", row.trim_end())?;
    }
    for (word, peers) in [("let in", &listed.allowed), ("banned", &listed.banned)] {
        for peer in peers {
            writeln!(text, "{word}  {peer}")?;
        }
    }
    Ok(text)
}
