//! The flags of `shoal doctor`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;

use super::{DEFAULT_PORT, DeviceChoice, ListFormat, default_data_dir};
use crate::address::JoinAddress;

/// `shoal doctor`
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Peers to ask: addresses, a ticket (which is not used up by it), or `@PATH` of a file with one; else
    /// those that were met before.
    #[arg(value_name = "ADDRESS")]
    pub peers: Vec<JoinAddress>,
    /// The data directory to look at; a peer may be using it.
    #[arg(long, value_name = "D", default_value_os_t = default_data_dir())]
    pub data_dir: PathBuf,
    /// Where the peer is to listen; may be given several times.
    #[arg(long, value_name = "ADDR",
          default_values_t = [SocketAddr::from((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT))])]
    pub listen: Vec<SocketAddr>,
    /// What is to be computed on: `auto`, `cpu` or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// How the findings look.
    #[arg(short, long, value_enum, default_value_t = ListFormat::Text)]
    pub output: ListFormat,
}
