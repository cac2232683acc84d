//! Two network namespaces joined by a cable: two machines as far as their sockets can tell.

use std::process::{Command, Output};

use crate::program::prepared;

/// Two namespaces with an address each. They are removed when this is dropped.
#[derive(Debug)]
pub struct Pair {
    names: [String; 2],
}

impl Pair {
    /// The addresses of the two ends, from those set aside for tests of networks (RFC 2544).
    pub const ADDRESSES: [&'static str; 2] = ["198.18.7.1", "198.18.7.2"];

    /// Makes them.
    ///
    /// # Errors
    /// With the reason, where this machine cannot or its user is not root.
    pub fn new() -> Result<Self, String> {
        let names = ["a", "b"].map(|end| format!("shoal-{}-{end}", std::process::id()));
        let pair = Self { names };
        let [a, b] = &pair.names;
        for name in &pair.names {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        let cable = ["link", "add", "cable", "netns", a, "type", "veth"];
        ip(&[cable.as_slice(), &["peer", "name", "cable", "netns", b]].concat())?;
        for (name, address) in pair.names.iter().zip(Self::ADDRESSES) {
            let address = format!("{address}/24");
            ip(&["-n", name, "address", "add", &address, "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
            ip(&["-n", name, "route", "add", "default", "dev", "cable"])?;
        }
        Ok(pair)
    }

    /// The same command inside one of the two.
    #[must_use]
    pub fn within(&self, end: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.names[end]]);
        inside.arg(command.get_program()).args(command.get_args());
        prepared(inside)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for name in &self.names {
            // One that was never made cannot be removed.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let told = |error: String| format!("`ip {}` says: {}", arguments.join(" "), error.trim());
    let Output { status, stderr, .. } =
        Command::new("ip").args(arguments).output().map_err(|error| told(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(told(String::from_utf8_lossy(&stderr).into_owned())) }
}
