//! The contribution of a stage to the gradient norm.

use shoal_protocol::limits;

use crate::device::kernel::widest;

widest! {
    /// The contribution of one stage's mean gradient (f32, little-endian) to the gradient norm: its
    /// sum of squares, in f64.
    ///
    /// The order is fixed, so the bits do not depend on shares or threads: blocks of
    /// [`limits::ROUND_BLOCK_ELEMENTS`] elements from the stage's first; within a block, 16 running
    /// sums, each over every sixteenth element, added up in pairs; then the blocks in order. Bytes
    /// after the last whole f32 are ignored.
    pub fn square_norm(gradient: &[u8]) -> f64 {
        let mut total = 0.0;
        for block in gradient.chunks(4 * limits::ROUND_BLOCK_ELEMENTS) {
            let mut lanes = [0f64; 16];
            let mut rows = block.chunks_exact(4 * 16);
            for row in rows.by_ref() {
                for (lane, bytes) in lanes.iter_mut().zip(row.as_chunks::<4>().0) {
                    let value = f64::from(f32::from_le_bytes(*bytes));
                    *lane += value * value;
                }
            }
            for (lane, bytes) in lanes.iter_mut().zip(rows.remainder().as_chunks::<4>().0) {
                let value = f64::from(f32::from_le_bytes(*bytes));
                *lane += value * value;
            }
            for width in [8, 4, 2, 1] {
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            total += lanes[0];
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_is_that_of_the_values() {
        let values: Vec<f32> = (0..10_000).map(|index| (index as f32).sin()).collect();
        let exact: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        let norm = square_norm(bytemuck::cast_slice(&values));
        assert!((norm - exact).abs() < 1e-9 * exact);
    }
}
