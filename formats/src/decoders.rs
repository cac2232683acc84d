//! Tests of this crate's decoders. See [`shoal_protocol::decoder`].

use shoal_protocol::decoder::Decoder;

use crate::{anchor, config, snapshot};

fn all() -> Vec<Decoder> {
    let files = [config::DECODER, snapshot::DECODER];
    anchor::decoders::DECODERS.iter().copied().chain(files).collect()
}

shoal_protocol::try_decoders!(all());
