//! Who is let in, as far as it concerns the run: the roster spreads from member to member, and refused
//! connections are counted and told of.

use std::time::{Duration, Instant};

use shoal_metrics::Refusal;
use shoal_protocol::ids::Member;
use shoal_protocol::message::Message;
use shoal_protocol::net::admission::{Gate, Signed};
use shoal_protocol::wire;
use tokio::sync::watch;

use super::Driver;
use super::outgoing::Links;
use crate::events::RunEvent;

/// How often refused connections are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is noticed of the gate.
#[derive(Debug)]
pub(super) struct Doors {
    changes: Option<watch::Receiver<u64>>,
    /// The version of the roster that the others were told of.
    told: u64,
    looked: Option<Instant>,
}

impl Doors {
    /// Those of a peer, which has none where it is alone.
    pub(super) fn of(links: Option<&Links>) -> Self {
        let gate = links.map(|links| links.transport.gate());
        let told = gate.map_or(0, |gate| gate.access_list().0.version);
        Self { changes: gate.map(Gate::changes), told, looked: None }
    }

    /// Waits until something is different.
    pub(super) async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl Driver<'_> {
    /// Tells everybody who is connected of a roster that is new here. Who connects later is shown it first.
    pub(super) fn doors_changed(&mut self) {
        let Some(links) = &self.links else { return };
        let (access_list, signed) = links.transport.gate().access_list();
        let Some(signed) = signed.filter(|_| access_list.version > self.doors.told) else { return };
        self.doors.told = access_list.version;
        let signed = wire::encode(&signed).expect("a roster is under the cap of a message");
        let others = links.transport.connected();
        tracing::info!(
            version = access_list.version,
            banned = access_list.banned.len(),
            "the roster is new"
        );
        self.note(&RunEvent::AccessList {
            version: access_list.version,
            banned: access_list.banned.len(),
            revoked: access_list.revoked.len(),
            allowed: access_list.allowed.len(),
        });
        for other in others {
            self.send(other, Message::AccessList { signed: signed.clone() });
        }
    }

    /// Somebody tells of a roster. If it is new, the gate's change has it passed on.
    pub(super) fn handle_access_list(&mut self, from: Member, signed: &[u8]) {
        let Some(links) = &self.links else { return };
        let gate = links.transport.gate();
        let learned = wire::decode::<Signed>(signed)
            .map_err(|error| error.to_string())
            .and_then(|signed| gate.learn(&signed).map_err(|denied| denied.to_string()));
        if let Err(reason) = learned {
            tracing::warn!(peer = %from, %reason, "refused");
            self.meters.refused(Refusal::Malformed);
            links.transport.reject(from.peer, &reason);
        }
    }

    /// Counts refused connections, and tells of the first few of each second.
    pub(super) fn look_at_doors(&mut self) {
        let Some(links) = &self.links else { return };
        if self.doors.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return;
        }
        self.doors.looked = Some(Instant::now());
        let gate = links.transport.gate();
        self.meters.turned_away(&gate.refusals());
        for turned in gate.newest_refusals() {
            let reason = self.meters.name_of(turned.reason).to_owned();
            let (peer, address) = (turned.peer, turned.address);
            self.note(&RunEvent::ConnectionRefused { peer, address, reason, text: turned.text });
        }
    }
}
