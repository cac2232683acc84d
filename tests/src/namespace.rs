//! Network namespaces, each joined to the first by a cable: separate machines, as far as their sockets
//! can tell. The ends of different cables cannot reach each other.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::program::prepared;

/// A namespace with a loopback device only, which drop removes.
#[derive(Debug)]
pub(crate) struct Namespace(String);

impl Namespace {
    /// Creates the namespace.
    pub(crate) fn new(name: String) -> Result<Self, String> {
        ip(&["netns", "add", &name])?;
        let made = Self(name);
        ip(&["-n", &made.0, "link", "set", "lo", "up"])?;
        Ok(made)
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// The same command inside the namespace.
    pub(crate) fn within(&self, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.0]);
        inside.arg(command.get_program()).args(command.get_args());
        prepared(inside)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A namespace that is already gone is no error.
        let _ = ip(&["netns", "delete", &self.0]);
    }
}

/// One namespace in the middle and several around it.
#[derive(Debug)]
pub struct Star {
    places: Vec<Namespace>,
}

impl Star {
    /// The number of the namespace in the middle. The others count from 1.
    pub const MIDDLE: usize = 0;

    /// Creates the namespaces and their cables.
    ///
    /// # Errors
    /// The reason, where the machine lacks support or the user is not root.
    pub fn new(cables: usize) -> Result<Self, String> {
        // The tests of a process run concurrently.
        static STARS: AtomicUsize = AtomicUsize::new(0);
        let star = STARS.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("shoal-{}-{star}-{end}", std::process::id());
        let places = (0..=cables).map(name).map(Namespace::new).collect::<Result<Vec<_>, _>>()?;
        let middle = places[Self::MIDDLE].name();
        let forwarding = ["netns", "exec", middle, "sysctl", "-qw", "net.ipv4.ip_forward=0"];
        ip(&forwarding)?;
        for (end, other) in places.iter().map(Namespace::name).enumerate().skip(1) {
            let cable = format!("cable{end}");
            let link = ["link", "add", &cable, "netns", middle, "type", "veth"];
            ip(&[link.as_slice(), &["peer", "name", &cable, "netns", other]].concat())?;
            for (name, address) in [(middle, Self::middle(end)), (other, Self::end(end))] {
                let address = format!("{address}/24");
                ip(&["-n", name, "address", "add", &address, "dev", &cable])?;
                ip(&["-n", name, "link", "set", &cable, "up"])?;
            }
            let gateway = Self::middle(end);
            ip(&["-n", other, "route", "add", "default", "via", &gateway])?;
        }
        ip(&["-n", middle, "route", "add", "default", "dev", "cable1"])?;
        Ok(Self { places })
    }

    /// The address of the middle on this cable, from the range for tests of networks (RFC 2544).
    #[must_use]
    pub fn middle(cable: usize) -> String {
        format!("198.18.{cable}.1")
    }

    /// The address at the end of this cable.
    #[must_use]
    pub fn end(cable: usize) -> String {
        format!("198.18.{cable}.2")
    }

    /// The name of a namespace.
    pub(crate) fn name(&self, place: usize) -> &str {
        self.places[place].name()
    }

    /// The same command inside a namespace.
    #[must_use]
    pub fn within(&self, place: usize, command: &Command) -> Command {
        self.places[place].within(command)
    }
}

pub(crate) fn ip(arguments: &[&str]) -> Result<(), String> {
    let failed = |error: String| format!("`ip {}` failed: {}", arguments.join(" "), error.trim());
    let Output { status, stderr, .. } =
        Command::new("ip").args(arguments).output().map_err(|error| failed(error.to_string()))?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(String::from_utf8_lossy(&stderr).into_owned()))
    }
}
