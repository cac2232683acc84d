//! The residual stream of a pass in groups of tokens, in a run with slices: each slice has the norms and sums of one
//! group, and its products read the tokens of all (sequence parallelism: Korthikanti et al., arXiv 2205.05198).
//!
//! A group's gradients of norms and biases are summed by themselves, so that no bit depends on the device that has the
//! group.

use std::ffi::{c_char, c_void};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::device::exchange::place;
use crate::device::shim::{new_tensor, new_tensors, pointer};
use crate::error::Result;
use crate::model::own_slices::OwnSlices;
use crate::numeric::nf4::Window;

unsafe extern "C" {
    fn shoal_take_rows(
        whole: *mut C_tensor,
        exchange: *mut c_void,
        seat: usize,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_all_rows(
        own: *mut C_tensor,
        rows: i64,
        exchange: *mut c_void,
        seat: usize,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_sum_of_rows(
        parts: *const *mut C_tensor,
        count: usize,
        exchange: *mut c_void,
        seat: usize,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_products(
        own: *mut C_tensor,
        rows: i64,
        matrices: *const *mut C_tensor,
        windows: *const Window,
        matrices_of: *const i64,
        biases: *const *mut C_tensor,
        biases_of: *const i64,
        products: usize,
        of_slice: usize,
        exchange: *mut c_void,
        seat: usize,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// Factors of one product: matrices below each other, and the bias of each, if they have some.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) matrices: &'a [Tensor],
    /// The part of each, if they are packed.
    pub(crate) windows: &'a [Window],
    pub(crate) biases: &'a [Tensor],
}

/// The tokens of a pass, in as many groups as there are slices. Without slices, a device has all as one.
#[derive(Debug)]
pub(crate) struct TokenGroups<'a> {
    own: &'a OwnSlices,
    /// B and T.
    extents: [i64; 2],
}

impl<'a> TokenGroups<'a> {
    /// The groups of so many samples of so many tokens.
    pub(crate) fn new(own: &'a OwnSlices, extents: [i64; 2]) -> Self {
        Self { own, extents }
    }

    /// The number of tokens.
    fn tokens(&self) -> i64 {
        self.extents[0] * self.extents[1]
    }

    /// The device's tokens `[N, H]` of `[B, T, H]`, which all devices have; without slices, all as they are.
    pub(crate) fn take(&self, x: &Tensor) -> Result<Tensor> {
        if !self.own.are_several() {
            return Ok(x.shallow_clone());
        }
        let x = x.f_flatten(0, 1)?;
        let Some(seat) = self.own.seat() else { return Ok(x) };
        let (exchange, index) = place(Some(seat));
        // SAFETY: the pointers are of live objects or of the result.
        new_tensor(|result| unsafe { shoal_take_rows(pointer(&x), exchange, index, result) })
    }

    /// All tokens `[B, T, H]` of those that each device has.
    pub(crate) fn all(&self, x: &Tensor) -> Result<Tensor> {
        if !self.own.are_several() {
            return Ok(x.shallow_clone());
        }
        let all = match self.own.seat() {
            None => x.shallow_clone(),
            Some(seat) => {
                let (exchange, index) = place(Some(seat));
                // SAFETY: the pointers are of live objects or of the result.
                new_tensor(|result| unsafe {
                    shoal_all_rows(pointer(x), self.tokens(), exchange, index, result)
                })?
            }
        };
        self.unflatten(&all)
    }

    /// Applies a function to each group of the device's tokens by itself, with the group's number on this device.
    pub(crate) fn by_group(
        &self,
        x: &Tensor,
        apply: impl Fn(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let numbers = self.own.numbers();
        if numbers.len() == 1 {
            return apply(0, x);
        }
        let first = |slice| self.own.rows_of(slice, self.tokens() as usize).start as i64;
        let start = first(numbers.start);
        let group = |(index, slice): (usize, usize)| -> Result<Tensor> {
            let rows = x.f_narrow(0, first(slice) - start, first(slice + 1) - first(slice))?;
            apply(index, &rows)
        };
        let groups = numbers.enumerate().map(group).collect::<Result<Vec<_>>>()?;
        Ok(Tensor::f_cat(&groups, 0)?)
    }

    /// The products of all tokens with factors of each slice of this device, `[B, T, outputs]`. The slices' gradients
    /// of the tokens are added in order.
    pub(crate) fn products(&self, x: &Tensor, factors: &[Product<'_>]) -> Result<Vec<Tensor>> {
        let of_each = |parts: for<'b> fn(&Product<'b>) -> &'b [Tensor]| {
            let parts = factors.iter().map(parts);
            let counts: Vec<i64> = parts.clone().map(|parts| parts.len() as i64).collect();
            let pointers: Vec<*mut C_tensor> = parts.flatten().map(pointer).collect();
            (counts, pointers)
        };
        let (matrices_of, matrices) = of_each(|factors| factors.matrices);
        let (biases_of, biases) = of_each(|factors| factors.biases);
        let window = |(product, at): (&Product<'_>, usize)| {
            product.windows.get(at).copied().unwrap_or_default()
        };
        let each = factors.iter().flat_map(|one| (0..one.matrices.len()).map(move |at| (one, at)));
        let windows: Vec<Window> = each.map(window).collect();
        let (exchange, seat) = place(self.own.seat());
        let slices = self.own.numbers().len();
        // SAFETY: all pointers are of live objects, and the arrays have as many elements as the counts say.
        let products = new_tensors(factors.len(), |products| unsafe {
            shoal_products(
                pointer(x),
                self.tokens(),
                matrices.as_ptr(),
                windows.as_ptr(),
                matrices_of.as_ptr(),
                biases.as_ptr(),
                biases_of.as_ptr(),
                factors.len(),
                factors.len() / slices,
                exchange,
                seat,
                products,
            )
        })?;
        products.iter().map(|product| self.unflatten(product)).collect()
    }

    /// The device's tokens of the sum of the parts `[B, T, H]` of all slices in their order, with a bias for each group if
    /// there are some.
    pub(crate) fn sum(&self, parts: &[Tensor], biases: &[Tensor]) -> Result<Tensor> {
        let parts = parts.iter().map(|part| Ok(part.f_flatten(0, 1)?));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*mut C_tensor> = parts.iter().map(pointer).collect();
        let (exchange, seat) = place(self.own.seat());
        // SAFETY: the pointers are of live objects or of the result, and the array has this number of elements.
        let sum = new_tensor(|result| unsafe {
            shoal_sum_of_rows(pointers.as_ptr(), pointers.len(), exchange, seat, result)
        })?;
        if biases.is_empty() {
            return Ok(sum);
        }
        self.by_group(&sum, |group, rows| Ok(rows.f_add(&biases[group])?))
    }

    /// `[B, T, ..]` of `[B · T, ..]`.
    pub(crate) fn unflatten(&self, x: &Tensor) -> Result<Tensor> {
        let [samples, tokens] = self.extents;
        Ok(x.f_view([samples, tokens, -1])?)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::device::collectives::{Library, proven};
    use crate::device::exchange::Seat;
    use crate::device::setup::DeviceChoice;
    use crate::device::shim::gradients;
    use crate::device::tensor::elements;
    use crate::testing::manifest;

    const SLICES: i64 = 4;
    const WIDTH: i64 = 24;
    const OUTPUTS: i64 = 6;

    fn floats(tensor: &Tensor) -> Vec<f32> {
        elements(&tensor.to_kind(Kind::Float).contiguous()).to_vec()
    }

    /// A tensor of a pass, the same on every device.
    fn random(seed: i64, shape: &[i64], kind: Kind) -> Tensor {
        let count: i64 = shape.iter().product();
        let numbers: Vec<f32> = (0..count)
            .map(|at| ((at * 7919 + seed * 104_729) % 1009) as f32 / 505.0 - 1.0)
            .collect();
        Tensor::from_slice(&numbers).view(shape).to_kind(kind)
    }

    /// What a device computes of a layer of products and their sum: the whole output, the gradient of the input, and those
    /// of its slices' weights and its groups' biases.
    fn pass(seat: Option<&Seat>, extents: [i64; 2], kind: Kind) -> [Vec<Vec<f32>>; 3] {
        let mut model = manifest().model;
        model.slices = SLICES as u16;
        let own = OwnSlices::new(&model, seat);
        let groups = TokenGroups::new(&own, extents);
        let leaf = |seed, shape: &[i64]| random(seed, shape, kind).set_requires_grad(true);
        let x = leaf(1, &[extents[0], extents[1], WIDTH]);
        let slices = own.numbers().map(|number| number as i64);
        let weights: Vec<[Tensor; 5]> = slices
            .map(|slice| {
                // Two matrices joined, their biases, and the columns that follow.
                let matrix = |seed| leaf(slice + seed, &[OUTPUTS, WIDTH]);
                let bias = |seed| leaf(slice + seed, &[OUTPUTS]);
                let columns = leaf(slice + 50, &[WIDTH, 2 * OUTPUTS]);
                [matrix(10), matrix(20), bias(30), bias(40), columns]
            })
            .collect();
        let biases: Vec<Tensor> = own.numbers().map(|_| leaf(60, &[WIDTH])).collect();
        let factors: Vec<Product<'_>> = weights
            .iter()
            .map(|weights| Product {
                matrices: &weights[..2],
                windows: &[],
                biases: &weights[2..4],
            })
            .collect();
        let mine = groups.take(&x).expect("memory");
        let products = groups.products(&mine, &factors).expect("memory");
        let parts = products.iter().zip(&weights);
        let parts: Vec<_> =
            parts.map(|(product, weights)| product.linear(&weights[4], None::<Tensor>)).collect();
        let sum = groups.sum(&parts, &biases).expect("memory");
        let whole = groups.all(&(mine + sum)).expect("memory");
        let leaves = || weights.iter().flatten().chain(&biases);
        let inputs: Vec<&Tensor> = std::iter::once(&x).chain(leaves()).collect();
        let of_whole = random(2, &whole.size(), kind);
        let mut found = gradients(&whole, Some(&of_whole), &inputs).expect("a graph").into_iter();
        let of_x = found.next().expect("that of x");
        let found: Vec<_> = found.map(|gradient| floats(&gradient)).collect();
        [vec![floats(&whole)], vec![floats(&of_x)], found]
    }

    #[test]
    fn devices_have_the_bits_of_one_whatever_the_tokens() {
        // Equal groups, unequal ones, and more groups than tokens; large ones go through collectives.
        for (extents, kind) in [
            ([2, 8], Kind::Float),
            ([1, 7], Kind::BFloat16),
            ([1, 3], Kind::Float),
            ([3, 251], Kind::Float),
            ([16, 48], Kind::BFloat16),
        ] {
            let [whole, of_x, of_weights] = pass(None, extents, kind);
            for devices in [2, 4] {
                let workers = vec![DeviceChoice::Cpu; devices];
                let gloo = proven(Library::Gloo, &workers).expect("gloo is a part of libtorch");
                for seats in [Seat::all(devices), gloo] {
                    let found: Vec<_> = std::thread::scope(|scope| {
                        let run = |seat| scope.spawn(move || pass(Some(seat), extents, kind));
                        let threads: Vec<_> = seats.iter().map(run).collect();
                        threads
                            .into_iter()
                            .map(|one| one.join().expect("no device fails"))
                            .collect()
                    });
                    let slices = SLICES as usize / devices;
                    for (device, [all, input, weights]) in found.iter().enumerate() {
                        let case = format!("{extents:?}, {kind:?}, {device} of {devices}");
                        assert!((all, input) == (&whole, &of_x), "{case}");
                        let (of_slices, of_groups) = weights.split_at(5 * slices);
                        let first = 5 * slices * device;
                        assert!(of_slices == &of_weights[first..first + 5 * slices], "{case}");
                        let first = 5 * SLICES as usize + slices * device;
                        assert!(of_groups == &of_weights[first..first + slices], "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_another_pass_are_an_error_of_libtorch() {
        let mut model = manifest().model;
        model.slices = 2;
        let own = OwnSlices::new(&model, None);
        let groups = TokenGroups::new(&own, [2, 3]);
        let x = Tensor::zeros([6, 4], (Kind::Float, Device::Cpu));
        let narrow = Tensor::zeros([5, 3], (Kind::Float, Device::Cpu));
        let factors =
            [Product { matrices: std::slice::from_ref(&narrow), windows: &[], biases: &[] }; 2];
        assert!(groups.products(&x, &factors).is_err());
    }
}
