//! The time of a layer on real cards that follows from what the stand-in counts, and from rates that were measured on such
//! cards. None of it was measured by Shoal on a GPU.

use shoal_protocol::manifest::{Dtype, Manifest};

use super::counts::{Counts, bytes};
use crate::common::{Trainer, device, manifest, samples, text};

/// Floating-point operations a second of large products in bf16, and of both passes of flash attention.
const PRODUCTS: f64 = 790e12;
const ATTENTION: f64 = 300e12;

/// Names, and bytes a second from and to memory that copies reach.
const CARDS: [(&str, f64); 2] = [("H100", 3.0e12), ("H200", 4.3e12)];

/// Tokens of a microbatch, and of a document.
const TOKENS: f64 = 8192.0;
const DOCUMENT: f64 = 2048.0;

/// Operators that are bound by arithmetic: their bytes pass while they compute.
const BOUND_BY_ARITHMETIC: [&str; 6] = [
    "aten::mm",
    "aten::mm.out",
    "aten::addmm",
    "aten::bmm",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
];

/// The shape of a layer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    name: &'static str,
    hidden: u32,
    heads: u32,
    key_value_heads: u32,
    intermediate: u32,
}

/// Those of Llama 3.2 1B and Llama 3 8B.
const SHAPES: [Shape; 2] = [
    Shape { name: "1B", hidden: 2048, heads: 32, key_value_heads: 8, intermediate: 8192 },
    Shape { name: "8B", hidden: 4096, heads: 32, key_value_heads: 8, intermediate: 14336 },
];

impl Shape {
    /// The same proportions, narrower.
    fn divided(self, by: u32) -> Self {
        Self {
            hidden: self.hidden / by,
            heads: self.heads / by,
            key_value_heads: self.key_value_heads / by,
            intermediate: self.intermediate / by,
            ..self
        }
    }

    fn weights(self) -> f64 {
        let [hidden, heads, groups, intermediate] =
            [self.hidden, self.heads, self.key_value_heads, self.intermediate].map(f64::from);
        let attention = 2.0 * hidden * hidden * (1.0 + groups / heads);
        attention + 3.0 * hidden * intermediate + 2.0 * hidden
    }

    fn manifest(self, layers: u32, samples: u32) -> Manifest {
        let mut manifest = manifest();
        let model = &mut manifest.model;
        (model.hidden, model.layers, model.context) = (self.hidden, layers, 64);
        (model.heads, model.key_value_heads) = (self.heads, self.key_value_heads);
        model.intermediate = self.intermediate;
        manifest.training.dtype = Dtype::Bf16;
        (manifest.training.microbatches, manifest.training.microbatch_size) = (1, samples);
        manifest
    }
}

/// Bytes of a microbatch that arithmetic does not hide, and kernels.
fn of_microbatch(shape: Shape, layers: u32, samples_of_microbatch: u32) -> [f64; 2] {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = shape.manifest(layers, samples_of_microbatch);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer { packed: true, ..Trainer::new(&manifest, samples) };
    let counts = Counts::of(|| {
        trainer.forward(0, 0);
        trainer.backward(0, 0);
    });
    assert!(counts.waits <= 2 && counts.pageable_copies == 0, "{counts:?}");
    let hidden: u64 = BOUND_BY_ARITHMETIC.into_iter().map(bytes).sum();
    assert!(hidden > 0, "products have other names");
    [(counts.kernel_bytes - hidden) as f64, counts.kernels as f64]
}

/// Bytes of a layer for each token and for each weight, and its kernels.
fn of_layer(shape: Shape) -> [f64; 3] {
    let [[one, two], [one_longer, two_longer]] =
        [1, 2].map(|samples| [1, 2].map(|layers| of_microbatch(shape, layers, samples)));
    let layer = two[0] - one[0];
    let of_token = (two_longer[0] - one_longer[0] - layer) / 64.0;
    [of_token, (layer - 64.0 * of_token) / shape.weights(), two[1] - one[1]]
}

/// Milliseconds of a layer: products, attention, elementwise work, accumulation; and the share of what products reach.
fn expected(shape: Shape, [of_token, of_weight]: [f64; 2], bandwidth: f64) -> [f64; 5] {
    let products = 6.0 * shape.weights() * TOKENS / PRODUCTS;
    let attention = 7.0 * TOKENS * DOCUMENT * f64::from(shape.hidden) / ATTENTION;
    let elementwise = of_token * TOKENS / bandwidth;
    let accumulation = of_weight * shape.weights() / bandwidth;
    let parts = [products, attention, elementwise, accumulation];
    let [products, attention, elementwise, accumulation] = parts.map(|seconds| 1e3 * seconds);
    let share = products / (products + attention + elementwise + accumulation);
    [products, attention, elementwise, accumulation, share]
}

/// `SHOAL_DIVISOR=1` counts layers of the full width, which takes 16 GB. Prints a table.
#[test]
#[ignore = "needs the stand-in"]
fn a_layer_is_expected_to_reach_more_than_half_of_what_products_do() {
    // Without a driver libtorch's operators compute what kernels do.
    let has_kernels = device().lacks_kernels().is_none();
    let divisor = std::env::var("SHOAL_DIVISOR").map_or(8, |by| by.parse().expect("a number"));
    println!(
        "|shape|card|kernels|bytes a token, in H|bytes a weight|products|attention|elementwise|accumulation|share|"
    );
    for shape in SHAPES {
        let [of_token, of_weight, kernels] = of_layer(shape.divided(divisor));
        // Bytes of a token are as its widths.
        let of_token = of_token * f64::from(divisor);
        for (card, bandwidth) in CARDS {
            let found = expected(shape, [of_token, of_weight], bandwidth);
            let [products, attention, elementwise, accumulation, share] = found;
            println!(
                "|{}|{card}|{kernels}|{:.0}|{of_weight:.1}|{products:.1}|{attention:.1}|{elementwise:.1}|{accumulation:.1}|{:.0} %|",
                shape.name,
                of_token / f64::from(shape.hidden),
                100.0 * share,
            );
            assert!(
                !has_kernels || share >= 0.55,
                "{}, {card}: {share} of what products reach",
                shape.name
            );
        }
    }
}
