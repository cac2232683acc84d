//! Products of f32 matrices with the same bits on every processor and with any number of threads.
//!
//! Each element is a sum over the inner extent in ascending order, of products that are rounded before they are
//! added: neither the tiles nor the width of vectors changes that order. Libtorch's products are faster, since they
//! fuse multiplications with additions, and their bits depend on the processor.

use crate::device::kernel::widest;

/// Terms that are added to an element between its load and its store.
const TERMS: usize = 8;

/// Columns of a panel: [`TERMS`] rows of it fit into the first cache.
const PANEL: usize = 512;

/// Rows that one thread computes at a time.
const BLOCK: usize = 64;

/// Whether a product is known to be equal to its transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symmetry {
    None,
    /// Its elements below the diagonal are copied from above.
    Symmetric,
}

/// Computes `c = a · b` of row-major matrices; `inner` is the number of columns of `a` and of rows of `b`.
///
/// # Panics
/// If the lengths do not fit.
pub(crate) fn multiply(
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    inner: usize,
    symmetry: Symmetry,
    threads: usize,
) {
    let (rows, columns) = (a.len() / inner, b.len() / inner);
    assert!(a.len() == rows * inner && b.len() == columns * inner && c.len() == rows * columns);
    let mut shares: Vec<Vec<(usize, &mut [f32])>> = Vec::new();
    shares.resize_with(threads.max(1), Vec::new);
    let count = shares.len();
    for (index, block) in c.chunks_mut(BLOCK * columns).enumerate() {
        shares[index % count].push((index * BLOCK, block));
    }
    let run = |share: Vec<(usize, &mut [f32])>| {
        for (first, block) in share {
            let height = block.len() / columns;
            let from = if symmetry == Symmetry::Symmetric { first } else { 0 };
            rows_of_product(&a[first * inner..(first + height) * inner], b, block, [inner, from]);
        }
    };
    std::thread::scope(|scope| {
        let run = &run;
        let others = shares.split_off(1);
        for share in others.into_iter().filter(|share| !share.is_empty()) {
            scope.spawn(move || run(share));
        }
        run(shares.remove(0));
    });
    if symmetry == Symmetry::Symmetric {
        mirror(c, columns);
    }
}

/// The transpose of a row-major matrix with so many columns.
pub(crate) fn transpose(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    let mut out = vec![0.0; matrix.len()];
    const SIDE: usize = 16;
    for top in (0..rows).step_by(SIDE) {
        for left in (0..columns).step_by(SIDE) {
            for row in top..rows.min(top + SIDE) {
                for column in left..columns.min(left + SIDE) {
                    out[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
    out
}

/// Copies what is above the diagonal to below it.
fn mirror(matrix: &mut [f32], size: usize) {
    for row in 1..size {
        for column in 0..row {
            matrix[row * size + column] = matrix[column * size + row];
        }
    }
}

widest! {
    /// Computes some rows of a product, from a column on; `out` has as many columns as the whole product.
    fn rows_of_product(a: &[f32], b: &[f32], out: &mut [f32], extents: [usize; 2]) {
        let [inner, from] = extents;
        let columns = b.len() / inner;
        out.fill(0.0);
        let whole = inner / TERMS * TERMS;
        let mut panel = [[0.0; PANEL]; TERMS];
        for left in (from..columns).step_by(PANEL) {
            let across = left..columns.min(left + PANEL);
            let width = across.len();
            let part = |k: usize| &b[k * columns..][across.clone()];
            for k in (0..whole).step_by(TERMS) {
                // Beside each other, since rows of some lengths apart take the same places in the cache.
                for (term, packed) in panel.iter_mut().enumerate() {
                    packed[..width].copy_from_slice(part(k + term));
                }
                let rows = panel.each_ref().map(|packed| &packed[..width]);
                for (a, out) in a.chunks_exact(inner).zip(out.chunks_exact_mut(columns)) {
                    let factors: [f32; TERMS] = std::array::from_fn(|term| a[k + term]);
                    add_terms(&mut out[across.clone()], rows, factors);
                }
            }
            for k in whole..inner {
                for (a, out) in a.chunks_exact(inner).zip(out.chunks_exact_mut(columns)) {
                    add_terms(&mut out[across.clone()], [part(k)], [a[k]]);
                }
            }
        }
    }
}

/// Adds rows times their factors, one after the other.
#[inline(always)]
fn add_terms<const N: usize>(out: &mut [f32], rows: [&[f32]; N], factors: [f32; N]) {
    let length = out.len();
    let rows = rows.map(|row| &row[..length]);
    for column in 0..length {
        let mut sum = out[column];
        for term in 0..N {
            sum += factors[term] * rows[term][column];
        }
        out[column] = sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|index| ((index * 7919 + seed * 104_729) % 1009) as f32 / 500.0 - 1.0)
            .collect()
    }

    /// The sums in ascending order.
    fn plainly(a: &[f32], b: &[f32], inner: usize) -> Vec<f32> {
        let columns = b.len() / inner;
        let element = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            (0..inner).fold(0.0, |sum, k| sum + a[row * inner + k] * b[k * columns + column])
        };
        (0..a.len() / inner * columns).map(element).collect()
    }

    #[test]
    fn every_shape_has_the_bits_of_plain_sums() {
        for [rows, inner, columns] in
            [[1, 1, 1], [3, 5, 7], [4, 300, 32], [131, 517, 67], [70, 2, 1]]
        {
            let (a, b) = (numbers(rows * inner, 1), numbers(inner * columns, 2));
            let expected = plainly(&a, &b, inner);
            for threads in [1, 3] {
                // What was there before does not count.
                let mut c = vec![f32::NAN; rows * columns];
                multiply(&a, &b, &mut c, inner, Symmetry::None, threads);
                assert!(c == expected, "{rows} x {inner} x {columns}, {threads} threads");
            }
        }
    }

    #[test]
    fn a_symmetric_product_has_the_bits_of_a_plain_one() {
        for [rows, inner] in [[5, 9], [150, 40]] {
            let a = numbers(rows * inner, 3);
            let b = transpose(&a, inner);
            let mut c = vec![0.0; rows * rows];
            multiply(&a, &b, &mut c, inner, Symmetry::Symmetric, 2);
            assert!(c == plainly(&a, &b, inner));
            // The square of a symmetric matrix is symmetric, too.
            let mut square = vec![0.0; rows * rows];
            multiply(&c, &c, &mut square, rows, Symmetry::Symmetric, 2);
            assert!(square == plainly(&c, &c, rows));
        }
    }
}
