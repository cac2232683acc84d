//! `shoal doctor`: what would keep this machine out of a run, and what to do about it.

use anyhow::Context;
use shoal_protocol::net::discovery::PeerAddress;

use super::guest::Guest;
use super::reach::Entrance;
use super::training;
use crate::admission;
use crate::cli::{DoctorArgs, ListFormat};
use crate::doctor::{self, Finding, State};
use crate::driver::home::Files;
use crate::exit::{Exit, ExitWith};

/// Peers met before that are asked where no address was given.
const PEERS: usize = 4;

/// Looks at everything and prints what it found.
///
/// # Errors
/// When something must be mended, or what was given is no address.
pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let findings = training::runtime()?.block_on(look(args))?;
    match args.output {
        ListFormat::Json => println!("{}", serde_json::to_string_pretty(&findings)?),
        ListFormat::Text => findings.iter().for_each(|finding| println!("{finding}")),
    }
    let wrong = findings.iter().filter(|finding| finding.state == State::Wrong).count();
    if wrong > 0 {
        anyhow::bail!("{wrong} of {} things must be mended: see above", findings.len());
    }
    Ok(())
}

async fn look(args: &DoctorArgs) -> anyhow::Result<Vec<Finding>> {
    let mut findings = vec![doctor::version()];
    let (home, owner) = doctor::data_dir(&args.data_dir);
    findings.extend(home);
    findings.push(doctor::disk(&args.data_dir));
    let device = args.device;
    let device = tokio::task::spawn_blocking(move || doctor::device(device)).await;
    findings.push(device.context("looking at the device failed")?);
    findings.extend(doctor::papers(&args.data_dir));
    findings.extend(doctor::ports(&args.listen, owner));
    let mut peers: Vec<PeerAddress> = Vec::new();
    for entrance in &args.peers {
        let text = entrance.read()?.context("there is no address in that file yet")?;
        let entrance: Entrance = text.parse().exit_with(Exit::Usage)?;
        if let Entrance::Ticket(ticket) = &entrance {
            findings.push(doctor::ticket(ticket));
        }
        peers.extend(entrance.addresses());
    }
    if args.peers.is_empty() {
        peers = admission::met(&args.data_dir);
        peers.truncate(PEERS);
    }
    // As somebody whom nobody knows: a peer may be running with this data directory.
    let Guest { transport, events } = Guest::open(&Files::default())?;
    let (network, router) = tokio::join!(doctor::network(&transport, &peers), doctor::router());
    findings.extend(network.into_iter().chain(router));
    drop(events);
    transport.close().await;
    Ok(findings)
}
