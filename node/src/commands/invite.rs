//! `shoal invite`, `ban` and `unban`: documents that the issuer of a run signs, from its data
//! directory. A running peer there notices changes and sends them to the others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;
use shoal_protocol::ids::{PeerId, RunId};
use shoal_protocol::manifest::AdmissionMode;
use shoal_protocol::net::admission::{AccessList, Admits, RedemptionLog, TicketId, UnixTime};
use shoal_protocol::net::identity::Identity;
use shoal_protocol::plain_name::PeerName;

use super::training;
use crate::admission::{self, Candidates, KeptRules, Store, TicketState, access_list_of};
use crate::cli::{
    AnchorCommand, AnchorRemoveArgs, BanArgs, InviteAllowArgs, InviteCommand, InviteLsArgs,
    InviteNewArgs, InviteRevokeArgs, Invited,
};
use crate::data_dir::shown_at;
use crate::exit::{Exit, ExitWith};
use crate::http::client;
use crate::terminal::{out, outln};

/// Runs the subcommand.
///
/// # Errors
/// If the data directory is not the issuer's, or cannot be written.
pub(super) fn run(command: &InviteCommand) -> anyhow::Result<()> {
    match command {
        InviteCommand::New(args) => new(args),
        InviteCommand::Ls(args) => list(args),
        InviteCommand::Revoke(args) => revoke(args),
        InviteCommand::Allow(args) => allow(args),
    }
}

/// The issuer's key, and the folder of the run's admission.
struct Issuer {
    identity: Identity,
    folder: Store,
    rules: KeptRules,
}

impl Issuer {
    fn open(data_dir: &Path) -> anyhow::Result<Self> {
        let folder = Store::current(data_dir).exit_with(Exit::Usage)?;
        let rules = folder.rules().exit_with(Exit::Usage)?;
        // Does not open the data directory as a peer does: a running peer has locked it.
        let identity = Identity::load_or_create(&data_dir.join("identity"))?;
        match rules.admission.key {
            Some(key) if key == identity.peer_id() => Ok(Self { identity, folder, rules }),
            Some(key) => Err(anyhow::anyhow!(
                "peer {key} controls admission to run {}: run this command with that peer's data directory",
                rules.run
            )),
            None => Err(anyhow::anyhow!(
                "run {} is open and has no issuer: bans need `key` under [admission] in run.toml from the start of \
                 the run",
                rules.run
            )),
        }
        .exit_with(Exit::Usage)
    }

    fn run(&self) -> RunId {
        self.rules.run
    }

    /// The peers of the run that are known here: those that used tickets, those on the access list and, while the peer
    /// of the data directory runs, its members with their names.
    fn members(&self, data_dir: &Path) -> anyhow::Result<Candidates> {
        let mut members = Candidates::new("member", "shoal status");
        let access_list = access_list_of(&self.folder)?;
        let redeemed = RedemptionLog::read(&self.folder.redemptions())?;
        members.add(unnamed(redeemed.into_iter().map(|redemption| redemption.peer)));
        members.add(unnamed(access_list.allowed.into_iter().chain(access_list.banned)));
        if let Ok(address) = shown_at(data_dir)
            && let Ok(status) = training::runtime()?.block_on(client::status(address))
        {
            members.add(status.members.into_iter().map(|member| (member.peer, member.name)));
        }
        Ok(members)
    }

    /// Changes the access list, and signs it as the next version.
    fn change(
        &self,
        change: impl FnOnce(&mut AccessList) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let _lock = self.folder.lock()?;
        let mut access_list = access_list_of(&self.folder)?;
        change(&mut access_list)?;
        let signed = access_list.publish(self.run(), &self.identity, UnixTime::now());
        self.folder.store_access_list(&signed)
    }
}

/// Peers without names.
fn unnamed(
    peers: impl IntoIterator<Item = PeerId>,
) -> impl Iterator<Item = (PeerId, Option<PeerName>)> {
    peers.into_iter().map(|peer| (peer, None))
}

fn new(args: &InviteNewArgs) -> anyhow::Result<()> {
    let issuer = Issuer::open(&args.data_dir)?;
    match issuer.rules.admission.mode {
        AdmissionMode::Invite => {}
        AdmissionMode::Open => {
            let text = "the run is open: others need no ticket, only the command that `shoal start` prints";
            return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
        }
        AdmissionMode::Allowlist => {
            let text =
                "the run admits listed peers only: list a peer with `shoal invite allow PEER`";
            return Err(anyhow::anyhow!(text)).exit_with(Exit::Usage);
        }
    }
    let admits = Admits { uses: args.uses, anchor: args.anchor };
    let ticket = admission::issue(&issuer.folder, &issuer.identity, args.ttl, admits)?;
    outln!("{ticket}");
    Ok(())
}

fn revoke(args: &InviteRevokeArgs) -> anyhow::Result<()> {
    let issuer = Issuer::open(&args.data_dir)?;
    match &args.what {
        Invited::Ticket(id) => {
            let id = *id;
            let tickets = issuer.folder.tickets()?;
            let ticket = tickets.iter().find(|ticket| ticket.id == id);
            let missing = || format!("there is no ticket {id}: `shoal invite ls` lists them");
            let expires = ticket.with_context(missing).exit_with(Exit::Usage)?.expires;
            issuer.change(|access_list| Ok(access_list.revoke(id, expires)?))?;
            outln!("ticket {id} and every certificate issued for it are revoked");
        }
        Invited::Peer(choice) => {
            let mut listed = Candidates::new("listed peer", "shoal invite ls");
            listed.add(unnamed(access_list_of(&issuer.folder)?.allowed));
            let peer = listed.find(choice).exit_with(Exit::Usage)?;
            issuer.change(|access_list| {
                let listed = access_list.disallow(peer);
                anyhow::ensure!(
                    listed,
                    "peer {peer} is not listed: use `shoal ban` to keep it out"
                );
                Ok(())
            })?;
            outln!("{peer} is not listed any more");
        }
    }
    Ok(())
}

fn allow(args: &InviteAllowArgs) -> anyhow::Result<()> {
    let issuer = Issuer::open(&args.data_dir)?;
    issuer.change(|access_list| {
        for peer in &args.peers {
            access_list.allow(*peer)?;
        }
        Ok(())
    })?;
    for peer in &args.peers {
        outln!("{peer} is listed");
    }
    Ok(())
}

/// Runs `shoal anchor`.
///
/// # Errors
/// As [`run`], and if an anchor is the issuer itself.
pub(super) fn anchor(command: &AnchorCommand) -> anyhow::Result<()> {
    let AnchorCommand::Remove(AnchorRemoveArgs { peers, data_dir }) = command;
    let issuer = Issuer::open(data_dir)?;
    let members = issuer.members(data_dir)?;
    let found = peers.iter().map(|choice| members.find(choice)).collect::<Result<Vec<_>, _>>();
    let peers = &found.exit_with(Exit::Usage)?;
    if peers.contains(&issuer.identity.peer_id()) {
        return Err(anyhow::anyhow!("the issuer cannot remove itself")).exit_with(Exit::Usage);
    }
    issuer.change(|access_list| Ok(peers.iter().try_for_each(|peer| access_list.ban(*peer))?))?;
    for peer in peers {
        outln!("{peer} is removed and banned");
    }
    outln!(
        "if the run is paused, start this peer again (`shoal start`): it keeps the log alone until others join"
    );
    Ok(())
}

/// Runs `shoal ban`.
///
/// # Errors
/// As [`run`], and if the peer is the issuer itself.
pub(super) fn ban(args: &BanArgs) -> anyhow::Result<()> {
    let issuer = Issuer::open(&args.data_dir)?;
    let peer = issuer.members(&args.data_dir)?.find(&args.peer).exit_with(Exit::Usage)?;
    if peer == issuer.identity.peer_id() {
        return Err(anyhow::anyhow!("the issuer cannot ban itself")).exit_with(Exit::Usage);
    }
    issuer.change(|access_list| Ok(access_list.ban(peer)?))?;
    outln!("{peer} is banned");
    Ok(())
}

/// Runs `shoal unban`.
///
/// # Errors
/// As [`run`], and if the peer is not banned.
pub(super) fn unban(args: &BanArgs) -> anyhow::Result<()> {
    let issuer = Issuer::open(&args.data_dir)?;
    let mut banned = Candidates::new("banned peer", "shoal invite ls");
    banned.add(unnamed(access_list_of(&issuer.folder)?.banned));
    let peer = banned.find(&args.peer).exit_with(Exit::Usage)?;
    issuer.change(|access_list| {
        anyhow::ensure!(access_list.unban(peer), "peer {peer} is not banned");
        Ok(())
    })?;
    outln!("{peer} is no longer banned");
    Ok(())
}

/// A ticket, as listed.
#[derive(Debug, Serialize)]
struct ListedTicket {
    id: TicketId,
    state: TicketState,
    uses: u16,
    expires: UnixTime,
    redeemed_by: Vec<PeerId>,
    ticket: String,
}

/// Everything that the issuer has signed.
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
    let issuer = Issuer::open(&args.data_dir)?;
    let listed = listed(&issuer, UnixTime::now())?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&listed)?);
    } else {
        out!("{}", table(&listed, UnixTime::now())?);
    }
    Ok(())
}

fn listed(issuer: &Issuer, now: UnixTime) -> anyhow::Result<Listed> {
    let access_list = access_list_of(&issuer.folder)?;
    let mut redeemers: BTreeMap<TicketId, Vec<PeerId>> = BTreeMap::new();
    for redemption in RedemptionLog::read(&issuer.folder.redemptions())? {
        redeemers.entry(redemption.ticket).or_default().push(redemption.peer);
    }
    let tickets = issuer.folder.tickets()?.into_iter().map(|ticket| {
        let redeemed_by = redeemers.remove(&ticket.id).unwrap_or_default();
        let state = ticket.state(redeemed_by.len(), &access_list, now);
        let (id, uses, expires) = (ticket.id, ticket.uses, ticket.expires);
        ListedTicket { id, state, uses, expires, redeemed_by, ticket: ticket.text }
    });
    Ok(Listed {
        run: issuer.run(),
        mode: issuer.rules.admission.mode,
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
        let uses = format!("{}/{}", ticket.redeemed_by.len(), ticket.uses);
        let peers: Vec<String> = ticket.redeemed_by.iter().map(ToString::to_string).collect();
        let row = format!(
            "{:<8}{:<9}{uses:<7}{left:<12}{}",
            ticket.id,
            ticket.state.name(),
            peers.join(" ")
        );
        writeln!(text, "{}", row.trim_end())?;
    }
    for (label, peers) in [("listed", &listed.allowed), ("banned", &listed.banned)] {
        for peer in peers {
            writeln!(text, "{label}  {peer}")?;
        }
    }
    Ok(text)
}
