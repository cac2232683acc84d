//! Passes the fuzzer's bytes to the decoder that a target is named after. The requirements on a
//! decoder are documented with it, in the `decoders` of its crate. `make fuzz` runs all targets.
//!
//! The decoders of `node` are compiled from their source files, so that libtorch is not needed.

#![allow(dead_code, missing_docs, reason = "the files of another crate, of which a part is used")]

use shoal_protocol::decoder::Decoder;

mod anchor;
#[path = "../../node/src/commands/budget.rs"]
mod budget;
#[path = "../../node/src/config.rs"]
mod config;
#[path = "../../node/src/commands/deaths.rs"]
mod deaths;
#[path = "../../node/src/commands/egress.rs"]
mod egress;
#[path = "../../node/src/epochs.rs"]
mod epochs;
#[path = "../../node/src/commands/fleet.rs"]
mod fleet;
#[path = "../../node/src/commands/fleet_error.rs"]
mod fleet_error;
#[path = "../../node/src/commands/groups.rs"]
mod groups;
#[path = "../../node/src/near_name.rs"]
mod near_name;
#[path = "../../node/src/open_step.rs"]
mod open_step;
#[path = "../../node/src/commands/plan_work.rs"]
mod plan_work;
mod reachability;
#[path = "../../node/src/commands/scenario.rs"]
mod scenario;
#[path = "../../node/src/scores.rs"]
mod scores;
#[path = "../../node/src/status/snapshot.rs"]
mod snapshot;
#[path = "../../node/src/commands/workers_plan.rs"]
mod workers_plan;

/// Checks a decoder with these bytes.
///
/// # Panics
/// If there is no decoder of this name, or it has a defect.
pub fn check(target: &str, bytes: &[u8]) {
    let all = shoal_protocol::decoders::DECODERS
        .iter()
        .chain(shoal_protocol::net::admission::decoders::DECODERS)
        .chain(shoal_protocol::net::transport::decoders::DECODERS)
        .chain(anchor::decoders::DECODERS)
        .chain([&config::DECODER, &fleet::DECODER, &scenario::DECODER, &snapshot::DECODER]);
    let decoder: Option<&Decoder> = { all }.find(|decoder| decoder.name == target);
    (decoder.expect("a target is named after a decoder").check)(bytes);
}

/// The fuzz target of one decoder.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $crate::check($name, bytes));
    };
}
