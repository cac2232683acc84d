//! What this peer measured of its links: the coordinator hears it, and routers prefer who is near.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use shoal_protocol::ids::PeerId;
use shoal_protocol::limits;
use shoal_protocol::message::{ToCoordinator, Way};

use super::{Out, Peer, Status};
use crate::action::PeerAction;
use crate::router::Routing;

/// What has changed by less than this many times is not said again.
const NEWS: f64 = 2.0;

impl Peer {
    /// The links were measured. Of a few the coordinator is told what it does not know yet.
    pub(super) fn measured(&mut self, links: BTreeMap<PeerId, Way>, out: &mut Out) {
        self.links = links;
        self.route_by_ways();
        let Self { links, ways_said, .. } = self;
        ways_said.retain(|peer, _| links.contains_key(peer));
        let mut news = Vec::new();
        for (peer, way) in links {
            let room = ways_said.len() < limits::WAYS;
            let is_news = ways_said.get(peer).map_or(room, |said| differ(said, way));
            if is_news {
                ways_said.insert(*peer, *way);
                news.push((*peer, *way));
            }
        }
        let counts = self.config.routing == Routing::BySpeed;
        if !news.is_empty() && counts && self.status == Status::Member {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Ways { ways: news }));
        }
    }

    /// Looks at members before a stage is given to this peer.
    pub(super) fn look_round(&mut self, at: Vec<(PeerId, Vec<SocketAddr>)>, out: &mut Out) {
        if self.status == Status::Joining && self.config.candidate.ways.is_none() {
            out.push(PeerAction::LookRound { at });
        }
    }

    /// This peer has looked round: it asks again to be admitted.
    pub(super) fn looked(&mut self, mut ways: Vec<(PeerId, Way)>, out: &mut Out) {
        if self.status == Status::Joining && self.config.candidate.ways.is_none() {
            ways.truncate(limits::WAYS);
            self.config.candidate.ways = Some(ways);
            self.register(out);
        }
    }

    /// Has routers know how far those are to whom they send.
    pub(super) fn route_by_ways(&mut self) {
        let Self { stages, links, .. } = self;
        for hosted in stages.values_mut() {
            hosted.onward.set_ways(|member| links.get(&member.peer).map(|link| link.round_trip));
        }
    }
}

fn differ(one: &Way, other: &Way) -> bool {
    let apart = |one: f64, other: f64| one.max(other) > NEWS * one.min(other);
    let rate = |way: &Way| way.rate.map_or(0.0, |rate| rate.0 as f64);
    apart(one.round_trip.as_secs_f64(), other.round_trip.as_secs_f64())
        || apart(rate(one), rate(other))
}
