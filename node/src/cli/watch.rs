//! The flags of the commands that watch a peer, and where a peer is shown.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::default_data_dir;
use crate::data_dir::shown_at;

/// The HTTP address of a peer, if any: by default a loopback address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpAddress(pub Option<SocketAddr>);

impl HttpAddress {
    /// Whether the user chose a port, and so watches the peer for long.
    #[must_use]
    pub fn is_chosen(self) -> bool {
        self.0.is_some_and(|address| address.port() != 0)
    }
}

impl Default for HttpAddress {
    fn default() -> Self {
        Self(Some((Ipv4Addr::LOCALHOST, 0).into()))
    }
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("none"),
            Some(address) => address.fmt(f),
        }
    }
}

impl FromStr for HttpAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            text => text
                .parse()
                .map(|address| Self(Some(address)))
                .map_err(|_| "an address is IP:PORT, as 127.0.0.1:9464, or `none`"),
        }
    }
}

/// The running peer to ask.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// HTTP address of the peer (its --http); default: the one in its data directory.
    #[arg(value_name = "IP:PORT")]
    address: Option<SocketAddr>,
    /// The data directory of the peer.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    data_dir: PathBuf,
}

impl NodeArgs {
    /// The HTTP address of the peer.
    ///
    /// # Errors
    /// When its data directory does not say, since it does not run.
    pub fn address(&self) -> anyhow::Result<SocketAddr> {
        if let Some(address) = self.address {
            return Ok(address);
        }
        shown_at(&self.data_dir)
    }
}

/// `shoal status`
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// The peer.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}

/// `shoal plot`
#[derive(Debug, Clone, Args)]
pub struct PlotArgs {
    /// The peer.
    #[command(flatten)]
    pub node: NodeArgs,
    /// A run's `report.json`, or a file that a peer wrote with --events, instead of a running peer.
    #[arg(long, value_name = "FILE", conflicts_with = "address")]
    pub from: Option<PathBuf>,
    /// File for the picture.
    #[arg(short, long, value_name = "FILE.svg", default_value = "loss.svg")]
    pub out: PathBuf,
}

/// `shoal healthcheck`
#[derive(Debug, Clone, Args)]
pub struct HealthcheckArgs {
    /// The peer.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Check whether the peer serves, instead of whether it is alive.
    #[arg(long)]
    pub ready: bool,
}
