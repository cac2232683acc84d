//! `shoal doctor`: checks whether this machine can join a run, and suggests fixes.

use anyhow::Context;
use shoal_protocol::net::admission::{Gate, Ticket};
use shoal_protocol::net::discovery::PeerAddress;

use super::client::{ANY_PORT, Caller, Client};
use super::contact::JoinLine;
use super::training;
use crate::admission::{self, Store};
use crate::cli::DoctorArgs;
use crate::data_dir::{DataDir, Files};
use crate::doctor::{self, Finding, Owner, State};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Known peers that are contacted if no address is given.
const PEERS: usize = 4;

/// Runs all checks and prints the findings.
///
/// # Errors
/// If a finding must be mended, or an argument is no address.
pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let findings = training::runtime()?.block_on(look(args))?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        findings.iter().for_each(|finding| outln!("{finding}"));
    }
    let wrong = findings.iter().filter(|finding| finding.state == State::Wrong).count();
    if wrong > 0 {
        anyhow::bail!("{wrong} of {} findings must be mended: see above", findings.len());
    }
    Ok(())
}

/// The peer of a data directory, whose certificate or ticket admits it to a run. The use of the ticket is the one of
/// its later `shoal join`.
fn caller(home: &DataDir, ticket: Option<Ticket>) -> anyhow::Result<Caller> {
    let caller = Caller {
        identity: home.identity()?,
        incarnation: home.next_incarnation()?,
        gate: Gate::default(),
    };
    let folder = match &ticket {
        Some(ticket) => Some(Store::of(home.path(), ticket.terms.run)),
        None => Store::current(home.path()).ok(),
    };
    match (folder.map(|folder| folder.certificate()).transpose()?.flatten(), ticket) {
        (Some(certificate), _) => caller.gate.hold(certificate),
        (None, Some(ticket)) => caller.gate.invite(ticket),
        (None, None) => {}
    }
    Ok(caller)
}

async fn look(args: &DoctorArgs) -> anyhow::Result<Vec<Finding>> {
    let mut findings = vec![doctor::version()];
    let (home, owner) = doctor::data_dir(&args.data_dir);
    findings.extend(home);
    findings.push(doctor::disk(&args.data_dir));
    findings.push(doctor::memory());
    let devices = args.device.clone();
    let devices = move || [doctor::libtorch(), doctor::devices(&devices)].concat();
    let devices = tokio::task::spawn_blocking(devices).await;
    findings.extend(devices.context("the check of the device failed")?);
    findings.extend(doctor::certificate(&args.data_dir));
    let ports = doctor::ports(&args.listen, owner);
    let free = ports.iter().all(|port| port.state == State::Well);
    findings.extend(ports);
    let (mut peers, mut ticket): (Vec<PeerAddress>, _) = (Vec::new(), None);
    for join_line in &args.peers {
        let text = join_line.read()?.context("that file holds no address yet")?;
        let join_line: JoinLine = text.parse().exit_with(Exit::Usage)?;
        peers.extend(join_line.addresses());
        if let JoinLine::Ticket(given) = join_line {
            findings.push(doctor::ticket(&given));
            ticket = Some(*given);
        }
    }
    if args.peers.is_empty() {
        peers = admission::met(&args.data_dir);
        peers.truncate(PEERS);
    }
    // The lock keeps a peer from starting with this data directory meanwhile.
    let home = if owner == Owner::None { DataDir::open(&args.data_dir).ok() } else { None };
    let caller = home.as_ref().and_then(|home| caller(home, ticket).ok());
    let caller = caller.unwrap_or_else(Caller::stranger);
    // Other peers probe the peer's own ports if these are free.
    let files = Files::default();
    let own = if free { Client::open_as(caller.clone(), &args.listen, &files).ok() } else { None };
    let probes = own.is_some();
    let Client { transport, events } =
        own.map_or_else(|| Client::open_as(caller, &[ANY_PORT], &files), Ok)?;
    let asked = doctor::network(&transport, &peers, probes);
    let ((network, probe_reports), router) = tokio::join!(asked, doctor::router());
    findings.extend(network);
    let asks_router = router.as_ref().is_some_and(|router| router.state == State::Well);
    if probes {
        findings.push(doctor::by_probes(&probe_reports, asks_router));
    } else if owner == Owner::Peer {
        findings.push(doctor::of_running(&args.data_dir).await);
    }
    findings.extend(router);
    drop(events);
    transport.close().await;
    Ok(findings)
}
