//! Homes behind address translation (NAT), around one machine that everybody reaches. Needs root, `ip` and
//! `nft`.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::namespace::{Namespace, Star, ip};

/// Where peers in homes listen.
pub const PORT: u16 = 7411;

/// How a home's router translates, in the words of RFC 3489.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nat {
    /// Whoever sends to the router's port reaches the peer: full cone.
    FullCone,
    /// Only whom the peer has sent to reaches it, and all see it at the same port: port restricted cone.
    Restricted,
    /// Each destination sees it at another port: symmetric.
    Symmetric,
}

impl Nat {
    /// The router's rules. What comes unasked is dropped before anything remembers it, as routers for
    /// homes do.
    fn rules(self, home: &str) -> String {
        let out =
            if self == Self::Symmetric { "masquerade random,fully-random" } else { "masquerade" };
        let inwards = match self {
            Self::FullCone => format!(
                "iifname \"cable*\" meta l4proto {{ tcp, udp }} th dport {PORT} dnat to {home}:{PORT}"
            ),
            Self::Restricted | Self::Symmetric => String::new(),
        };
        format!(
            "table ip home {{
                chain inwards {{ type nat hook prerouting priority dstnat; {inwards}; }}
                chain out {{ type nat hook postrouting priority srcnat; oifname \"cable*\" {out}; }}
                chain router {{ type filter hook input priority filter; iifname \"cable*\" drop; }}
            }}"
        )
    }
}

/// Routers at the ends of a star's cables, and a home behind each.
#[derive(Debug)]
pub struct Homes {
    star: Star,
    homes: Vec<Namespace>,
}

impl Homes {
    /// Makes one behind each of these.
    ///
    /// # Errors
    /// With the reason, where this machine cannot or its user is not root.
    pub fn new(nats: &[Nat]) -> Result<Self, String> {
        let star = Star::new(nats.len())?;
        forward(star.name(Star::MIDDLE))?;
        let mut homes = Vec::new();
        for (end, nat) in (1..).zip(nats) {
            let router = star.name(end);
            forward(router)?;
            let home = Namespace::new(format!("{router}-home"))?;
            let link = ["link", "add", "home", "netns", router, "type", "veth"];
            ip(&[link.as_slice(), &["peer", "name", "home", "netns", home.name()]].concat())?;
            let (inner, address) = (format!("10.0.{end}.1"), format!("10.0.{end}.2"));
            for (name, own) in [(router, &inner), (home.name(), &address)] {
                ip(&["-n", name, "address", "add", &format!("{own}/24"), "dev", "home"])?;
                ip(&["-n", name, "link", "set", "home", "up"])?;
            }
            ip(&["-n", home.name(), "route", "add", "default", "via", &inner])?;
            translate(router, &nat.rules(&address))?;
            homes.push(home);
        }
        Ok(Self { star, homes })
    }

    /// The same command on the machine that everybody reaches.
    #[must_use]
    pub fn outside(&self, command: &Command) -> Command {
        self.star.within(Star::MIDDLE, command)
    }

    /// The same command in one of the homes, from 0.
    #[must_use]
    pub fn within(&self, home: usize, command: &Command) -> Command {
        self.homes[home].within(command)
    }
}

fn forward(name: &str) -> Result<(), String> {
    ip(&["netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
}

fn translate(router: &str, rules: &str) -> Result<(), String> {
    let told = |error: std::io::Error| format!("`nft` cannot be run: {error}");
    let mut nft = Command::new("ip")
        .args(["netns", "exec", router, "nft", "-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(told)?;
    let mut input = nft.stdin.take().expect("it is piped");
    input.write_all(rules.as_bytes()).map_err(told)?;
    drop(input);
    let done = nft.wait_with_output().map_err(told)?;
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!said.contains("syntax error"), "{rules}: {said}");
    if done.status.success() { Ok(()) } else { Err(format!("nft says: {}", said.trim())) }
}
