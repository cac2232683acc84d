//! Fleets and runs on paper: what a description of machines and links makes of a model ([`fleet`], [`budget`], [`machines`],
//! [`spans`]), and the swarms that the simulator plays ([`scenario`]).
//!
//! Descriptions are TOML, and go to the planner and the simulator of `shoal_scheduler`. Nothing here runs a peer: `shoal plan` and
//! `shoal simulate` read the files and print the answers.

pub mod advice;
pub mod budget;
pub mod deaths;
#[cfg(test)]
mod decoders;
pub mod egress;
pub mod fleet;
pub mod fleet_error;
pub mod groups;
pub mod machines;
pub mod plan_work;
pub mod scenario;
pub mod spans;
pub mod workers_plan;
