//! Tests of the memory that a pass keeps for its backward pass.

use std::ffi::c_void;
use std::sync::Barrier;

use bytes::Bytes;
use shoal_protocol::ids::{ClaimKey, Stage, StageSpan};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::{
    Activation, Balance, Boundary, BoundaryKind, Data, Dtype, Experts, LatentAttention,
    LayerAttention, Manifest, Rotary, RotaryScaling,
};

use crate::cost::memory::{graph_bytes, graphs_bytes};
use crate::device::exchange::Seat;
use crate::device::setup::{Device, DeviceChoice};
use crate::engine::Engine;
use crate::model::parameters::parameter_count;
use crate::swap::Tiers;
use crate::testing::{key, manifest};
use crate::weights::share::Share;

unsafe extern "C" {
    fn shoal_counter_new() -> *mut c_void;
    fn shoal_counter_free(counter: *mut c_void);
    fn shoal_counter_begin(counter: *mut c_void);
    fn shoal_counter_end();
    fn shoal_counter_bytes(counter: *mut c_void) -> i64;
    fn shoal_counter_most(counter: *mut c_void) -> i64;
}

/// Counts the bytes of tensors on several threads (`csrc/tensor_bytes.cpp`).
struct Counter(*mut c_void);

// SAFETY: its number is atomic, and nothing else changes.
unsafe impl Sync for Counter {}

impl Counter {
    fn new() -> Self {
        // SAFETY: it only makes an object.
        Self(unsafe { shoal_counter_new() })
    }

    /// Runs something whose tensors on this thread are counted.
    fn count<T>(&self, run: impl FnOnce() -> T) -> T {
        // SAFETY: the object is alive, and the counting ends on the same thread.
        unsafe { shoal_counter_begin(self.0) };
        let result = run();
        // SAFETY: as above.
        unsafe { shoal_counter_end() };
        result
    }

    fn bytes(&self) -> i64 {
        // SAFETY: the object is alive.
        unsafe { shoal_counter_bytes(self.0) }
    }

    /// The most that they have been at once.
    fn most(&self) -> i64 {
        // SAFETY: the object is alive.
        unsafe { shoal_counter_most(self.0) }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: it is freed once.
        unsafe { shoal_counter_free(self.0) }
    }
}

/// A run of three stages. The only tensors of the middle one beside its layers' are its input and output.
fn manifest_of(slices: u16, dtype: Dtype) -> Manifest {
    let mut manifest = manifest();
    let model = &mut manifest.model;
    (model.hidden, model.heads, model.key_value_heads) = (64, 8, 4);
    (model.intermediate, model.layers, model.context) = (160, 12, 64);
    model.slices = slices;
    (manifest.training.stages, manifest.training.dtype) = (3, dtype);
    manifest.check().expect("a run");
    manifest
}

/// The bytes that the devices of a peer keep of one pass of a stage, all together.
fn kept(manifest: &Manifest, stage: Stage, devices: usize) -> u64 {
    let (counter, turn) = (Counter::new(), Barrier::new(devices));
    let shares: Vec<Share> = match devices {
        1 => vec![Share::WHOLE],
        _ => Share::all_together(Seat::all(devices)).collect(),
    };
    let key = ClaimKey { stage, ..key(0) };
    let words = Bytes::from(vec![0; 4 * manifest.tokens_per_microbatch() as usize]);
    let activation = manifest.boundary_bytes(manifest.codec.activations).0;
    let activation = Bytes::from(vec![0; activation as usize]);
    let input = if stage == Stage(0) { &words } else { &activation };
    let pass = |share: Share| {
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
        let tiers = Tiers::default();
        let mut engine = Engine::sharing(manifest, StageSpan::one(stage), device, (share, tiers))
            .expect("enough memory");
        counter.count(|| {
            engine.forward(key, input, Some(&words)).expect("a pass");
            // All have their graphs.
            turn.wait();
            let kept = counter.bytes();
            turn.wait();
            engine.discard(key);
            kept
        })
    };
    std::thread::scope(|scope| {
        let pass = &pass;
        let threads: Vec<_> =
            shares.into_iter().map(|share| scope.spawn(move || pass(share))).collect();
        threads.into_iter().map(|one| one.join().expect("no device fails")).max()
    })
    .expect("a device") as u64
}

#[test]
fn devices_that_share_slices_divide_the_graph_and_each_have_its_ends() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let manifest = manifest_of(4, dtype);
        let middle = Stage(1);
        let alone = kept(&manifest, middle, 1);
        assert_eq!(alone, kept(&manifest_of(1, dtype), middle, 1), "{dtype:?}");
        let stated = graph_bytes(&manifest, middle);
        assert!(alone <= stated && 10 * alone > 9 * stated, "{dtype:?}: {alone} of {stated}");
        let stream = manifest.tokens_per_microbatch() * 64 * dtype.size() as u64;
        for devices in [2, 4] {
            // Each has the input and the output, and all together the tokens that they took.
            let ends = (2 * (devices as u64 - 1) + 1) * stream;
            let found = kept(&manifest, middle, devices);
            println!("{dtype:?}: one device {alone} bytes, {devices} devices {found}");
            assert_eq!(found, alone + ends, "{dtype:?}, {devices} devices");
        }
    }
}

#[test]
fn graphs_of_experts_take_about_the_stated_memory() {
    for (dtype, slices, shared, balance) in [
        (Dtype::F32, 1, None, Balance::None),
        (Dtype::Bf16, 1, Some(96), Balance::None),
        (Dtype::F32, 4, Some(64), Balance::None),
        (Dtype::F32, 1, None, Balance::Loss),
        (Dtype::Bf16, 4, None, Balance::Loss),
    ] {
        let mut manifest = manifest_of(slices, dtype);
        manifest.model.block.experts = Some(Experts {
            shared_intermediate: shared,
            dense_layers: vec![5],
            balance,
            ..Experts::new(8, 2, 80)
        });
        manifest.check().expect("a run");
        let (found, stated) = (kept(&manifest, Stage(1), 1), graph_bytes(&manifest, Stage(1)));
        println!("{dtype:?}, {slices} slices, {shared:?}: {found} of {stated}");
        assert!(found <= stated && 3 * found > 2 * stated, "{dtype:?}: {found} of {stated}");
    }
}

#[test]
fn graphs_of_other_blocks_take_about_the_stated_memory() {
    let latent = |queries| LatentAttention {
        queries,
        keys_values: 32,
        rotated: 8,
        interleaved: true,
        value_size: 12,
    };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (latent, sinks) in
            [(Some(latent(None)), false), (Some(latent(Some(24))), false), (None, true)]
        {
            let mut manifest = manifest_of(1, dtype);
            let model = &mut manifest.model;
            (model.block.latent, model.block.sinks) = (latent, sinks);
            if sinks {
                model.block.activation = Activation::ClampedSwiglu;
            }
            if latent.is_some() {
                (model.key_value_heads, model.block.head_size) = (model.heads, Some(20));
                let scaling = RotaryScaling::None;
                model.block.rotary = vec![Rotary { theta: 1e4, dimensions: 8, scaling }];
            }
            manifest.check().expect("a run");
            let (found, stated) = (kept(&manifest, Stage(1), 1), graph_bytes(&manifest, Stage(1)));
            let case = format!("{dtype:?}, {latent:?}, sinks {sinks}: {found} of {stated}");
            println!("{case}");
            assert!(found <= stated && 3 * found > 2 * stated, "{case}");
        }
    }
}

#[test]
fn graphs_of_all_stages_take_at_most_the_stated_memory() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for boundary in [None, Some(Boundary { kind: BoundaryKind::Maxout, width: 16 })] {
            let mut manifest = manifest_of(4, dtype);
            manifest.model.boundary = boundary;
            manifest.check().expect("a run");
            for (stage, devices) in [(0, 2), (1, 2), (2, 2), (0, 4), (1, 4), (2, 4)] {
                let stage = Stage(stage);
                let found = kept(&manifest, stage, devices);
                let stated = graphs_bytes(&manifest, stage, devices as u64);
                let case = format!("{dtype:?}, {boundary:?}, {stage:?}, {devices} devices");
                assert!(found <= stated && 3 * found > 2 * stated, "{case}: {found} of {stated}");
            }
        }
    }
}

/// The bytes that are left of a pass of the middle stage after its backward pass, for the addition of its gradient.
fn left(manifest: &Manifest) -> u64 {
    let stage = Stage(1);
    let key = ClaimKey { stage, ..key(0) };
    let bytes = |size| Bytes::from(vec![0; size as usize]);
    let labels = bytes(4 * manifest.tokens_per_microbatch());
    let input = bytes(manifest.boundary_bytes(manifest.codec.activations).0);
    let gradient = bytes(manifest.boundary_bytes(manifest.codec.activation_gradients).0);
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
    let mut engine = Engine::new(manifest, StageSpan::one(stage), device).expect("enough memory");
    let counter = Counter::new();
    counter.count(|| {
        engine.forward(key, &input, Some(&labels)).expect("a pass");
        engine.backward(key, Some(&gradient)).expect("a pass");
        counter.bytes() as u64
    })
}

#[test]
fn factors_of_gradients_take_less_than_the_graph() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for experts in [false, true] {
            let mut manifest = manifest_of(1, dtype);
            manifest.model.block.experts = experts.then_some(Experts {
                shared_intermediate: Some(96),
                dense_layers: vec![5],
                ..Experts::new(8, 2, 80)
            });
            manifest.check().expect("a run");
            let (found, stated) = (left(&manifest), graph_bytes(&manifest, Stage(1)));
            println!("{dtype:?}, experts {experts}: {found} of {stated}");
            assert!(found <= stated && 2 * found > stated, "{dtype:?}: {found} of {stated}");
            // Whole gradients.
            manifest.training.recompute = true;
            assert!(left(&manifest) < 5 * parameter_count(&manifest, Stage(1)) as u64);
        }
    }
}

/// What a microbatch of one sample of so many tokens is made of.
#[derive(Debug, Clone, Copy)]
struct Row {
    dtype: Dtype,
    /// Tokens of a document.
    document: usize,
    window: Option<u32>,
}

/// What both passes of a row of so many tokens need at most, and what is kept between them.
fn of_row(row: Row, tokens: u32) -> [u64; 2] {
    let mut manifest = manifest();
    let model = &mut manifest.model;
    (model.hidden, model.heads, model.key_value_heads, model.intermediate) = (32, 4, 2, 64);
    (model.layers, model.context) = (3, tokens);
    model.block.layers = vec![LayerAttention { rotary: Some(0), window: row.window }; 3];
    (manifest.training.dtype, manifest.training.microbatch_size) = (row.dtype, 1);
    // The first and the last stage have rows of the vocabulary too.
    manifest.training.stages = 3;
    let Data::Text(text) = &mut manifest.data else { panic!("a text") };
    text.count = 1 << 24;
    manifest.check().expect("a run");
    let label = |place: usize| {
        let starts_document = place.is_multiple_of(row.document);
        Label { target: Some(1), starts_document, padding: false }.to_word().to_le_bytes()
    };
    let labels: Vec<u8> = (0..tokens as usize).flat_map(label).collect();
    let labels = Bytes::from(labels);
    let bytes = |size| Bytes::from(vec![0; size as usize]);
    let input = bytes(manifest.boundary_bytes(manifest.codec.activations).0);
    let gradient = bytes(manifest.boundary_bytes(manifest.codec.activation_gradients).0);
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a processor");
    let stage = Stage(1);
    let key = ClaimKey { stage, ..key(0) };
    let mut engine = Engine::new(&manifest, StageSpan::one(stage), device).expect("enough memory");
    let counter = Counter::new();
    let kept = counter.count(|| {
        engine.forward(key, &input, Some(&labels)).expect("a pass");
        let kept = counter.bytes();
        engine.backward(key, Some(&gradient)).expect("a pass");
        kept
    });
    let stated = graph_bytes(&manifest, stage);
    assert!(kept as u64 <= stated, "{row:?}, {tokens} tokens: {kept} of {stated} bytes");
    [counter.most(), kept].map(|bytes| bytes as u64)
}

/// `SHOAL_TOKENS=65536` tries longer rows.
#[test]
fn memory_grows_as_the_tokens_of_a_row() {
    let most: u32 =
        std::env::var("SHOAL_TOKENS").map_or(16384, |most| most.parse().expect("a number"));
    let whole = most as usize;
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    for (dtype, document, window) in [
        (f32, 500, None),
        (f32, whole, None),
        (f32, 3000, Some(128)),
        (f32, whole, Some(300)),
        (bf16, 500, None),
        (bf16, 2000, Some(300)),
    ] {
        let row = Row { dtype, document, window };
        let each = |tokens: u32| of_row(row, tokens).map(|bytes| bytes as f64 / f64::from(tokens));
        let [short, long] = [1024, most].map(each);
        println!("{row:?}: {short:?} bytes a token of 1,024, {long:?} of {most}");
        for (few, many) in short.into_iter().zip(long) {
            assert!(many < 1.05 * few, "{row:?}: {few} bytes a token of 1,024, {many} of {most}");
        }
    }
}
