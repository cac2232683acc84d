//! Passes the fuzzer's bytes to the decoder that a target is named after. The requirements on a
//! decoder are documented with it, in the `decoders` of its crate. `make fuzz` runs all targets.

use shoal_formats::{anchor, config, snapshot};
use shoal_lab::{fleet, scenario};
use shoal_protocol::decoder::Decoder;

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
