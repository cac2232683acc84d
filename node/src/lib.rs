//! The Shoal process: command line, configuration and the driver loop.
//!
//! A command line ([`cli`]) becomes the options of one command ([`commands`]). Those that train read
//! a run configuration ([`config`]) and tell what happens as typed events ([`events`]), from which
//! the progress view ([`progress`]), the report ([`report`]) and the loss curve ([`plot`]) are made.

pub mod address;
mod admission;
mod anchor;
pub mod cli;
pub mod commands;
pub mod config;
pub mod dataset;
#[cfg(test)]
mod decoders;
mod doctor;
pub mod driver;
pub mod events;
pub mod exit;
mod fault_point;
pub mod http;
pub mod logging;
mod memory;
pub mod network;
pub mod plot;
mod port_map;
pub mod progress;
mod reachability;
pub mod report;
pub mod status;
mod top;
mod whole_file;
