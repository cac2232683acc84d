//! Products of f32 matrices with the same bits on every processor and with any number of threads.
//!
//! Each element is a sum over the inner extent in ascending order, of products that are rounded before they are
//! added: neither the tiles nor the width of vectors changes that order. Libtorch's products are faster, since they
//! fuse multiplications with additions, and their bits depend on the processor.

use std::ops::Range;

use crate::kernel::widest;

/// Rows of a tile, whose sums stay in registers.
const ROWS: usize = 4;

/// Columns of a tile.
const COLUMNS: usize = 32;

/// Terms of the sums between a load and a store of a tile: as many rows of a tile's columns fit into the first
/// cache.
const DEPTH: usize = 256;

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
    let panels = pack(b, columns);
    let panels = &panels;
    let mut shares: Vec<Vec<(usize, &mut [f32])>> = Vec::new();
    shares.resize_with(threads.max(1), Vec::new);
    let count = shares.len();
    for (index, block) in c.chunks_mut(BLOCK * columns).enumerate() {
        shares[index % count].push((index * BLOCK, block));
    }
    let run = |share: Vec<(usize, &mut [f32])>| {
        for (first, block) in share {
            block.fill(0.0);
            let height = block.len() / columns;
            let from = if symmetry == Symmetry::Symmetric { first / COLUMNS } else { 0 };
            rows_of_product(
                &a[first * inner..(first + height) * inner],
                panels,
                block,
                [inner, from],
            );
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

/// The rows of a matrix in panels of [`COLUMNS`], one after the other, with zeros after the last column.
fn pack(matrix: &[f32], columns: usize) -> Vec<[f32; COLUMNS]> {
    let mut panels = Vec::with_capacity(columns.div_ceil(COLUMNS) * (matrix.len() / columns));
    for start in (0..columns).step_by(COLUMNS) {
        let width = COLUMNS.min(columns - start);
        for row in matrix.chunks_exact(columns) {
            let mut packed = [0.0; COLUMNS];
            packed[..width].copy_from_slice(&row[start..start + width]);
            panels.push(packed);
        }
    }
    panels
}

/// The columns of some rows in tiles of [`ROWS`], with zeros after the last row.
fn pack_rows(rows: &[f32], inner: usize) -> Vec<[f32; ROWS]> {
    let height = rows.len() / inner;
    let mut tiles = Vec::with_capacity(height.div_ceil(ROWS) * inner);
    for first in (0..height).step_by(ROWS) {
        for column in 0..inner {
            tiles.push(std::array::from_fn(|row| {
                rows.get((first + row) * inner + column).copied().unwrap_or(0.0)
            }));
        }
    }
    tiles
}

/// Computes some rows of a product, from a panel on; `out` has as many columns as the whole product.
fn rows_of_product(
    rows: &[f32],
    panels: &[[f32; COLUMNS]],
    out: &mut [f32],
    [inner, from]: [usize; 2],
) {
    let height = rows.len() / inner;
    let columns = out.len() / height;
    let tiles = pack_rows(rows, inner);
    for start in (0..inner).step_by(DEPTH) {
        let depth = start..inner.min(start + DEPTH);
        for (panel, b) in panels.chunks_exact(inner).enumerate().skip(from) {
            let left = panel * COLUMNS;
            let across = left..columns.min(left + COLUMNS);
            for (tile, a) in tiles.chunks_exact(inner).enumerate() {
                let down = tile * ROWS..height.min((tile + 1) * ROWS);
                let mut sums = load(out, columns, down.clone(), across.clone());
                add_products(&a[depth.clone()], &b[depth.clone()], &mut sums);
                store(&sums, out, columns, down, across.clone());
            }
        }
    }
}

fn load(
    out: &[f32],
    columns: usize,
    down: Range<usize>,
    across: Range<usize>,
) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for (sums, row) in sums.iter_mut().zip(down) {
        let values = &out[row * columns..][across.clone()];
        sums[..values.len()].copy_from_slice(values);
    }
    sums
}

fn store(
    sums: &[[f32; COLUMNS]; ROWS],
    out: &mut [f32],
    columns: usize,
    down: Range<usize>,
    across: Range<usize>,
) {
    for (sums, row) in sums.iter().zip(down) {
        let values = &mut out[row * columns..][across.clone()];
        values.copy_from_slice(&sums[..values.len()]);
    }
}

widest! {
    fn add_products(a: &[[f32; ROWS]], b: &[[f32; COLUMNS]], sums: &mut [[f32; COLUMNS]; ROWS]) {
        let mut held = *sums;
        for (a, b) in a.iter().zip(b) {
            for (row, a) in held.iter_mut().zip(a) {
                for (sum, b) in row.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
        }
        *sums = held;
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
