//! Tests of this crate's decoders. See [`shoal_protocol::decoder`].

use shoal_protocol::decoder::Decoder;

use crate::{fleet, scenario};

fn all() -> Vec<Decoder> {
    vec![fleet::DECODER, scenario::DECODER]
}

shoal_protocol::try_decoders!(all());
