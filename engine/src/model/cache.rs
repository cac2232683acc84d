//! Keys and values of the tokens that a model has read, so that the next token needs no others.

use tch::Tensor;

use crate::error::Result;

/// Tokens by which the room of a cache grows.
const BLOCK: i64 = 256;

/// The keys and values of one layer for one sample.
#[derive(Debug, Default)]
pub(crate) struct LayerCache {
    /// Keys and values, `[1, at least length, heads, D]`; what lies behind `length` has no meaning.
    room: Option<[Tensor; 2]>,
    length: i64,
}

impl LayerCache {
    /// Number of tokens.
    pub(crate) fn length(&self) -> i64 {
        self.length
    }

    /// Forgets all tokens but the first `length`.
    pub(crate) fn truncate(&mut self, length: i64) {
        self.length = self.length.min(length);
    }

    /// Appends the keys and values `[1, T, heads, D]` of the next tokens. Returns those that these
    /// tokens may read: all, or for a single token those of its window.
    pub(crate) fn extend(&mut self, new: [&Tensor; 2], window: Option<u32>) -> Result<[Tensor; 2]> {
        let (start, added) = (self.length, new[0].size4()?.1);
        let length = start + added;
        let room = match self.room.take() {
            Some(room) if room[0].size4()?.1 >= length => room,
            old => {
                let grown = |index: usize| {
                    grow(old.as_ref().map(|old| &old[index]), new[index], self.length, length)
                };
                [grown(0)?, grown(1)?]
            }
        };
        for (room, new) in room.iter().zip(new) {
            room.f_narrow(1, start, added)?.f_copy_(new)?;
        }
        self.length = length;
        let window = window.filter(|_| added == 1).map_or(length, i64::from).min(length);
        let visible = |tensor: &Tensor| tensor.f_narrow(1, length - window, window);
        let visible = [visible(&room[0])?, visible(&room[1])?];
        self.room = Some(room);
        Ok(visible)
    }
}

/// Room for at least `length` tokens like those of `new`, with the first `used` of `old`.
fn grow(old: Option<&Tensor>, new: &Tensor, used: i64, length: i64) -> Result<Tensor> {
    let (samples, _, heads, size) = new.size4()?;
    let places = (length + BLOCK - 1) / BLOCK * BLOCK;
    let room = Tensor::f_empty([samples, places, heads, size], (new.kind(), new.device()))?;
    if let Some(old) = old.filter(|_| used > 0) {
        room.f_narrow(1, 0, used)?.f_copy_(&old.f_narrow(1, 0, used)?)?;
    }
    Ok(room)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::device::tensor::elements;

    /// Keys of tokens `start..end`: one head of two channels, each with the token's number.
    fn numbered(start: i64, end: i64) -> Tensor {
        let numbers = Tensor::arange_start(start, end, (Kind::Float, Device::Cpu));
        numbers.view([1, -1, 1, 1]).repeat([1, 1, 1, 2])
    }

    fn extend(cache: &mut LayerCache, start: i64, end: i64, window: Option<u32>) -> Vec<i64> {
        let (keys, values) = (numbered(start, end), numbered(start, end).neg());
        let [keys, values] = cache.extend([&keys, &values], window).expect("room");
        let first = |tensor: &Tensor| -> Vec<i64> {
            let column = tensor.select(3, 1).flatten(0, -1).contiguous();
            elements::<f32>(&column).iter().map(|number| *number as i64).collect()
        };
        assert_eq!(first(&keys), first(&values.neg()));
        first(&keys)
    }

    #[test]
    fn tokens_stay_when_the_room_grows_and_go_when_it_is_cut() {
        let mut cache = LayerCache::default();
        assert_eq!(extend(&mut cache, 0, 3, None), [0, 1, 2]);
        assert_eq!(extend(&mut cache, 3, 4, None), [0, 1, 2, 3]);
        assert_eq!(extend(&mut cache, 4, 2 * BLOCK, None), (0..2 * BLOCK).collect::<Vec<_>>());
        assert_eq!(extend(&mut cache, 2 * BLOCK, 2 * BLOCK + 1, None).len() as i64, 2 * BLOCK + 1);
        cache.truncate(2);
        assert_eq!(extend(&mut cache, 7, 8, None), [0, 1, 7]);
        cache.truncate(9);
        assert_eq!(cache.length(), 3);
    }

    #[test]
    fn a_single_token_gets_its_window_and_several_get_everything() {
        let mut cache = LayerCache::default();
        assert_eq!(extend(&mut cache, 0, 4, Some(2)), [0, 1, 2, 3]);
        assert_eq!(extend(&mut cache, 4, 5, Some(2)), [3, 4]);
        assert_eq!(extend(&mut cache, 5, 7, Some(2)).len(), 7);
        assert_eq!(extend(&mut cache, 7, 8, Some(9)).len(), 8);
    }
}
