//! The documents of a microbatch, which attention does not cross.

use tch::{Device, Kind, Tensor};

use crate::device::tensor::upload;
use crate::error::Result;

/// Documents that lie one after the other through all samples.
#[derive(Debug)]
pub(crate) struct Documents {
    /// Tokens of each, on the host. A sample begins a document.
    pub(crate) lengths: Vec<i64>,
    /// The place of each token in its document, from 0: i64 `[B, T]`.
    pub(crate) places: Tensor,
}

impl Documents {
    /// Documents of these lengths, in samples of `tokens` each.
    pub(crate) fn new(lengths: Vec<i64>, tokens: i64, device: Device) -> Result<Self> {
        let places: Vec<i64> = lengths.iter().flat_map(|length| 0..*length).collect();
        let places = Tensor::f_from_slice(&places)?.f_view([-1, tokens])?;
        Ok(Self { lengths, places: upload(&places, device)? })
    }
}

/// The first token of each document, and their sum: i32, on the device.
pub(crate) fn starts(lengths: &[i64], device: Device) -> Result<Tensor> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    let starts: Vec<i64> = [0].into_iter().chain(ends).collect();
    upload(&Tensor::f_from_slice(&starts)?.f_to_kind(Kind::Int)?, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tensor::elements;

    #[test]
    fn tokens_have_the_places_of_their_documents() {
        let documents = Documents::new(vec![1, 3, 4], 4, Device::Cpu).expect("small");
        assert_eq!(elements::<i64>(&documents.places), [0, 0, 1, 2, 0, 1, 2, 3]);
        assert_eq!(documents.places.size(), [2, 4]);
        let starts = starts(&documents.lengths, Device::Cpu).expect("small");
        assert_eq!(elements::<i32>(&starts), [0, 1, 4, 8]);
    }
}
