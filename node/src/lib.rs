//! The Shoal process: command line, configuration and the driver.
//!
//! The modules are layers: a command ([`commands`]) takes its checked flags ([`cli`]) and starts the
//! driver ([`driver`]), which drives the state machines, the links and the engine. The driver reports
//! typed events ([`events`]) and knows no screen. The observers ([`observers`]) pass each event to the
//! progress view ([`progress`]), the report ([`report`]), the status ([`status`]) and TensorBoard
//! ([`tensorboard`]). A command that
//! trains reads a run configuration ([`shoal_formats::config`]).

// Texts of peers and files reach a terminal through `terminal` alone, which escapes them.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod address;
mod admission;
mod anchor;
pub mod bucket;
pub mod cli;
pub mod commands;
pub mod config_sources;
pub mod data_dir;
pub mod dataset;
mod doctor;
pub mod driver;
mod event_text;
pub mod events;
pub mod exit;
mod fault_point;
mod gpus;
pub mod http;
pub mod logging;
mod memory;
mod model_check;
pub mod network;
pub mod observers;
mod other_run;
mod outward_ip;
pub mod plot;
mod port_map;
pub mod progress;
mod reachability;
pub mod report;
pub mod signals;
pub mod source_epochs;
pub mod status;
mod step_count;
pub mod tensorboard;
mod terminal;
mod text;
mod text_model;
mod text_stream;
mod top;
mod training_rate;
mod whole_file;
mod writable;
