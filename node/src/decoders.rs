//! Tests of this crate's decoders. See [`shoal_protocol::decoder`].

use shoal_protocol::decoder::Decoder;

use crate::status::snapshot;
use crate::{anchor, commands, config};

fn all() -> Vec<Decoder> {
    let files = [config::DECODER, commands::fleet::DECODER, commands::scenario::DECODER];
    let answers = [snapshot::DECODER];
    anchor::decoders::DECODERS.iter().copied().chain(files).chain(answers).collect()
}

shoal_protocol::try_decoders!(all());
