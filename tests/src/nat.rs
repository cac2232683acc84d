//! Homes behind address translation (NAT), around one machine that everybody reaches. Needs root, `ip` and
//! `nft`; for a router that opens ports, `miniupnpd` as well.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use crate::namespace::{Namespace, Star, ip};
use crate::program::prepared;

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
    /// As the restricted one, until the peer asks the router for a port (UPnP).
    Opening,
    /// Nothing is translated, and only whom the peer has sent to reaches it.
    Firewall,
    /// Nothing is translated, and whoever sends to the peer reaches it.
    Open,
}

impl Nat {
    /// The router's rules. What comes unasked is dropped before anything remembers it, as routers for
    /// homes do.
    fn rules(self, home: &str) -> String {
        let out = match self {
            Self::Symmetric => "oifname \"cable*\" masquerade random,fully-random",
            Self::FullCone | Self::Restricted | Self::Opening => "oifname \"cable*\" masquerade",
            Self::Firewall | Self::Open => "",
        };
        let through =
            if self == Self::Firewall { "iifname \"cable*\" ct state new drop" } else { "" };
        let inwards = match self {
            Self::FullCone => format!(
                "iifname \"cable*\" meta l4proto {{ tcp, udp }} th dport {PORT} dnat to {home}:{PORT}"
            ),
            _ => String::new(),
        };
        format!(
            "table ip home {{
                chain inwards {{ type nat hook prerouting priority dstnat; {inwards}; }}
                chain out {{ type nat hook postrouting priority srcnat; {out}; }}
                chain through {{ type filter hook forward priority filter; {through}; }}
                chain router {{ type filter hook input priority filter; iifname \"cable*\" drop; }}
            }}"
        )
    }
}

/// Routers at the ends of a star's cables, and a home behind each.
#[derive(Debug)]
pub struct Homes {
    /// Before the namespaces that they are in.
    openers: Vec<Opener>,
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
        let (mut homes, mut openers) = (Vec::new(), Vec::new());
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
            let leads = |to: &str| {
                let middle = star.name(Star::MIDDLE);
                ip(&["-n", middle, "route", "add", to, "via", &Star::end(end)])
            };
            if [Nat::Firewall, Nat::Open].contains(nat) {
                leads(&address)?;
            }
            if *nat == Nat::Opening {
                let outer = Self::outer(end - 1);
                leads(&outer)?;
                // Routers are searched for by multicast.
                ip(&["-n", router, "route", "add", "224.0.0.0/4", "dev", "home"])?;
                openers.push(Opener::start(router, end, &outer)?);
            }
            homes.push(home);
        }
        Ok(Self { openers, star, homes })
    }

    /// What a router that opens ports says its address is: one that it does not know to be private. It is of
    /// the network that radio amateurs set aside for tests.
    #[must_use]
    pub fn outer(home: usize) -> String {
        format!("44.128.0.{}", home + 1)
    }

    /// Whether any router has a port open now.
    #[must_use]
    pub fn has_open_ports(&self) -> bool {
        self.openers.iter().any(Opener::has_open_ports)
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

/// A router's part that opens ports for who asks in its home.
#[derive(Debug)]
struct Opener {
    router: String,
    daemon: Child,
    /// Its configuration.
    _folder: tempfile::TempDir,
}

impl Opener {
    fn start(router: &str, end: usize, outer: &str) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let config = folder.path().join("miniupnpd.conf");
        let text = format!(
            "ext_ifname=cable{end}\next_ip={outer}\nlistening_ip=home\nenable_upnp=yes\nenable_natpmp=no\n\
             secure_mode=yes\nuuid=00000000-0000-0000-0000-00000000000{end}\nupnp_table_name=upnp\n\
             upnp_nat_table_name=upnp\nupnp_forward_chain=forwarded\nupnp_nat_chain=inwards\n\
             upnp_nat_postrouting_chain=outwards\nallow 1024-65535 0.0.0.0/0 1024-65535\n"
        );
        std::fs::write(&config, text).map_err(|error| error.to_string())?;
        translate(
            router,
            "table inet upnp {
                chain forward { type filter hook forward priority 0; jump forwarded; }
                chain forwarded { }
                chain before { type nat hook prerouting priority -110; jump inwards; }
                chain inwards { }
                chain after { type nat hook postrouting priority 90; jump outwards; }
                chain outwards { }
            }",
        )?;
        let mut daemon = Command::new("miniupnpd");
        daemon.args(["-d", "-f"]).arg(&config).arg("-P").arg(folder.path().join("pid"));
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", router]).arg(daemon.get_program()).args(daemon.get_args());
        let mut inside = prepared(inside);
        let mut daemon = inside
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("`ip` cannot be run: {error}"))?;
        // It says so when it listens; what it says later nobody reads.
        let said = BufReader::new(daemon.stderr.take().expect("it is piped"));
        let mut lines = said.lines().map_while(Result::ok);
        let ready = lines.find(|line| line.contains("HTTP listening"));
        std::thread::spawn(move || lines.for_each(drop));
        let opener = Self { router: router.to_owned(), daemon, _folder: folder };
        ready.map(|_| opener).ok_or_else(|| "miniupnpd does not run here".to_owned())
    }

    fn has_open_ports(&self) -> bool {
        let listed = Command::new("ip")
            .args([
                "netns",
                "exec",
                &self.router,
                "nft",
                "list",
                "chain",
                "inet",
                "upnp",
                "inwards",
            ])
            .output()
            .expect("nft ran before");
        String::from_utf8_lossy(&listed.stdout).contains("dnat")
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        // It may be over already.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
