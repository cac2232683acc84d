//! The flags of `shoal doctor`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;

use super::{DEFAULT_PORT, Devices, default_data_dir};
use crate::address::JoinAddress;

/// `shoal doctor`
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Peers to check: addresses, a ticket (its use is the one of the later `shoal join`), or `@PATH` of a file with one; default:
    /// known peers.
    #[arg(value_name = "ADDRESS")]
    pub peers: Vec<JoinAddress>,
    /// The data directory to check; a peer may be using it.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// Address that the peer will listen at; repeatable.
    #[arg(long, value_name = "ADDR",
          default_values_t = [SocketAddr::from((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT))])]
    pub listen: Vec<SocketAddr>,
    /// Devices to check, as those of a peer.
    #[arg(long, value_name = "DEVICES", default_value = "auto")]
    pub device: Devices,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}
