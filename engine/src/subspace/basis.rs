//! The basis of a run's subspace, drawn from the seed.

use shoal_protocol::manifest::Manifest;

use crate::numeric::normal_stream::NormalStream;

/// The name whose stream the basis is drawn from, as weights are from theirs.
const NAME: &str = "shoal.subspace";

/// The orthonormal columns of a run's subspace: `[hidden, width]`, row-major.
///
/// Normal numbers, row by row from the stream of [`NAME`], become orthonormal by Gram-Schmidt's process,
/// column by column from the first on, each twice so that rounding does not build up. All is f64 with sums
/// in ascending order, rounded to f32 at the end, so the bits are the same on every machine.
pub(super) fn draw(manifest: &Manifest, width: usize) -> Vec<f32> {
    let mut normals = vec![0.0f32; manifest.model.hidden as usize * width];
    NormalStream::new(manifest.training.seed, NAME, 1.0).fill(0, &mut normals);
    let mut matrix: Vec<f64> = normals.into_iter().map(f64::from).collect();
    let mut along = vec![0.0; width];
    for column in 0..width {
        for _ in 0..2 {
            remove_earlier(&mut matrix, &mut along[..column], width);
        }
        let squares = matrix.chunks_exact(width).map(|row| row[column] * row[column]);
        // Of a column of at least two normal numbers, fewer columns than rows before it.
        let length = libm::sqrt(squares.fold(0.0, |sum, square| sum + square));
        matrix.chunks_exact_mut(width).for_each(|row| row[column] /= length);
    }
    matrix.into_iter().map(|value| value as f32).collect()
}

/// Removes from a column what lies along the earlier ones, as many as `along` has room for.
fn remove_earlier(matrix: &mut [f64], along: &mut [f64], width: usize) {
    let column = along.len();
    along.fill(0.0);
    for row in matrix.chunks_exact(width) {
        for (sum, value) in along.iter_mut().zip(row) {
            *sum += value * row[column];
        }
    }
    for row in matrix.chunks_exact_mut(width) {
        let (earlier, rest) = row.split_at_mut(column);
        let shared =
            earlier.iter().zip(&*along).fold(0.0, |sum, (value, along)| sum + value * along);
        rest[0] -= shared;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::manifest;

    #[test]
    fn columns_are_orthonormal_also_where_almost_all_are_taken() {
        for (hidden, width) in [(64, 5), (64, 63), (8, 2)] {
            let mut manifest = manifest();
            manifest.model.hidden = hidden;
            let basis = draw(&manifest, width);
            let product = |one: usize, other: usize| -> f64 {
                let rows = basis.chunks_exact(width);
                rows.map(|row| f64::from(row[one]) * f64::from(row[other])).sum()
            };
            for (one, other) in (0..width).flat_map(|one| (0..=one).map(move |other| (one, other)))
            {
                let expected = if one == other { 1.0 } else { 0.0 };
                assert!(
                    (product(one, other) - expected).abs() < 1e-6,
                    "{one} and {other} of {width}"
                );
            }
        }
    }

    #[test]
    fn the_bits_are_those_of_the_seed_on_every_machine() {
        let mut manifest = manifest();
        manifest.model.hidden = 64;
        let basis = draw(&manifest, 6);
        let hash = blake3::hash(bytemuck::cast_slice(&basis));
        assert_eq!(hash.to_hex()[..16], *"225297c6d1a3e86b");
        manifest.training.seed += 1;
        assert_ne!(draw(&manifest, 6), basis);
    }
}
