//! Tests of this crate's decoders. See [`shoal_protocol::decoder`].

use crate::{base, checkpoint};

shoal_protocol::try_decoders!(vec![base::DECODER, checkpoint::DECODER]);
