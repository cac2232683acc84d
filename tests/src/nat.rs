//! Homes behind address translation (NAT), around one public machine. Needs root, `ip` and `nft`; a router
//! that opens ports needs `miniupnpd` as well.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use crate::namespace::{Namespace, Star, ip};
use crate::program::prepared;

/// The port of peers in homes.
pub const PORT: u16 = 7411;

/// The kind of translation of a home's router, as RFC 3489 names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nat {
    /// Any sender reaches the peer at the router's port: full cone.
    FullCone,
    /// Only hosts that the peer has sent to reach it, all at the same port: port restricted cone.
    Restricted,
    /// Each destination sees the peer at another port: symmetric.
    Symmetric,
    /// As `Restricted`, until the peer asks the router for a port (UPnP).
    Opening,
    /// No translation; only hosts that the peer has sent to reach it.
    Firewall,
    /// No translation; any sender reaches the peer.
    Open,
}

impl Nat {
    /// The router's rules. They drop unsolicited packets before connection tracking, as home routers do.
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

/// Routers at the ends of a star's cables, with a home behind each.
#[derive(Debug)]
pub struct Homes {
    /// Declared first, so that they end before their namespaces.
    daemons: Vec<UpnpDaemon>,
    star: Star,
    homes: Vec<Namespace>,
}

impl Homes {
    /// Creates a home behind each of these routers.
    ///
    /// # Errors
    /// The reason, where the machine lacks support or the user is not root.
    pub fn new(nats: &[Nat]) -> Result<Self, String> {
        let star = Star::new(nats.len())?;
        forward(star.name(Star::MIDDLE))?;
        let (mut homes, mut daemons) = (Vec::new(), Vec::new());
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
                // Peers search for routers by multicast.
                ip(&["-n", router, "route", "add", "224.0.0.0/4", "dev", "home"])?;
                daemons.push(UpnpDaemon::start(router, end, &outer)?);
            }
            homes.push(home);
        }
        Ok(Self { daemons, star, homes })
    }

    /// The public address that a router with UPnP claims to have. miniupnpd accepts it as public: it is from a
    /// network that radio amateurs reserve for tests.
    #[must_use]
    pub fn outer(home: usize) -> String {
        format!("44.128.0.{}", home + 1)
    }

    /// Whether any router has a port open.
    #[must_use]
    pub fn has_open_ports(&self) -> bool {
        self.daemons.iter().any(UpnpDaemon::has_open_ports)
    }

    /// The same command on the public machine.
    #[must_use]
    pub fn outside(&self, command: &Command) -> Command {
        self.star.within(Star::MIDDLE, command)
    }

    /// The same command in a home; homes count from 0.
    #[must_use]
    pub fn within(&self, home: usize, command: &Command) -> Command {
        self.homes[home].within(command)
    }
}

fn forward(name: &str) -> Result<(), String> {
    ip(&["netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
}

fn translate(router: &str, rules: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("`nft` cannot be run: {error}");
    let mut nft = Command::new("ip")
        .args(["netns", "exec", router, "nft", "-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut input = nft.stdin.take().expect("it is piped");
    input.write_all(rules.as_bytes()).map_err(failed)?;
    drop(input);
    let done = nft.wait_with_output().map_err(failed)?;
    let printed = String::from_utf8_lossy(&done.stderr);
    assert!(!printed.contains("syntax error"), "{rules}: {printed}");
    if done.status.success() { Ok(()) } else { Err(format!("nft failed: {}", printed.trim())) }
}

/// A router's UPnP daemon, which opens ports at the request of its home.
#[derive(Debug)]
struct UpnpDaemon {
    router: String,
    daemon: Child,
    /// The folder of its configuration.
    _folder: tempfile::TempDir,
}

impl UpnpDaemon {
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
        // It prints a line once it listens. Later lines are discarded.
        let printed = BufReader::new(daemon.stderr.take().expect("it is piped"));
        let mut lines = printed.lines().map_while(Result::ok);
        let ready = lines.find(|line| line.contains("HTTP listening"));
        std::thread::spawn(move || lines.for_each(drop));
        let started = Self { router: router.to_owned(), daemon, _folder: folder };
        ready.map(|_| started).ok_or_else(|| "miniupnpd does not run here".to_owned())
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

impl Drop for UpnpDaemon {
    fn drop(&mut self) {
        // The daemon may have ended already.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
