//! Whole swarms on this machine: one program, which runs tests beside each other.

mod admission;
#[cfg(debug_assertions)]
mod audits;
mod bad_input;
mod balance;
mod bucket;
mod chat;
mod checkpoint;
mod demo;
mod disks;
mod doctor;
#[cfg(debug_assertions)]
mod fault_points;
mod guard;
mod hostile;
mod import_check;
mod islands;
mod metrics;
mod mixtures;
mod models;
mod monitoring;
mod optimizers;
mod preferences;
mod recovery;
mod reference;
mod reshape;
mod scores;
mod spans;
mod streaming;
mod swapping;
mod swarm;
mod tensorboard;
mod watch;
mod workers;
