//! Training speed of the engine alone, for comparison with `tests/python/train_speed.py`.
//!
//! `cargo run --release --example train_speed -- [dtype] [threads] [hidden] [layers] [microbatches] [stages] [seconds]`

#[path = "../tests/integration/common/mod.rs"]
mod common;

use std::time::Instant;

use shoal_engine::{Device, DeviceChoice, Engine};
use shoal_protocol::ids::StageSpan;
use shoal_protocol::manifest::{Codecs, Dtype};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dtype = match arguments.next().as_deref() {
        Some("bf16") => Dtype::Bf16,
        _ => Dtype::F32,
    };
    let mut number =
        |default: u32| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let mut manifest = common::manifest();
    let threads = number(1) as usize;
    manifest.model.hidden = number(256);
    manifest.model.layers = number(4);
    manifest.model.heads = manifest.model.hidden / 64;
    manifest.model.key_value_heads = manifest.model.heads;
    manifest.model.intermediate = manifest.model.hidden * 4;
    manifest.model.context = 128;
    manifest.training.microbatches = number(4);
    manifest.training.stages = u16::try_from(number(1)).expect("a small number");
    manifest.training.microbatch_size = 8;
    manifest.training.dtype = dtype;
    manifest.codec = Codecs::all(dtype.into());
    let seconds = f64::from(number(10));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let samples = common::samples(&mut manifest, folder.path(), &common::text().repeat(20));
    let device = Device::open(DeviceChoice::Cpu, threads).expect("a CPU");
    let span = StageSpan::all(manifest.training.stages);
    let engine = Engine::new(&manifest, span, device).expect("room");
    let mut trainer = common::Trainer {
        manifest,
        engine,
        samples,
        base: None,
        packed: false,
        spread: 1,
        targets: Default::default(),
        given: Default::default(),
    };
    let mut step = 0;
    for _ in 0..2 {
        trainer.step(step);
        step += 1;
    }
    let (start, busy, first) = (Instant::now(), processor_seconds(), step);
    let mut loss = 0.0;
    while start.elapsed().as_secs_f64() < seconds {
        loss = trainer.step(step).0;
        step += 1;
    }
    let tokens = (step - first) * trainer.manifest.tokens_per_step();
    let rate = tokens as f64 / start.elapsed().as_secs_f64();
    let busy = tokens as f64 / (processor_seconds() - busy);
    println!(
        "engine {dtype:?} threads {threads}: {rate:.0} tokens/s, {busy:.0} per processor second, loss {loss:.4}"
    );
}

/// Processor time that this process has used.
fn processor_seconds() -> f64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
    let usage = usage.expect("our own usage");
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}
