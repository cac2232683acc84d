//! Speed of the matrix multiplication that dominates training, to see the effect of the feature
//! `mkl-avx512`: `cargo run --release --example gemm_speed [--features mkl-avx512]`.

use std::time::Instant;

use shoal_engine::{Device, DeviceChoice};
use tch::{Kind, Tensor};

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |text| text.parse().expect("threads"));
    Device::open(DeviceChoice::Cpu, threads).expect("a CPU");
    let feature = if cfg!(feature = "mkl-avx512") { "mkl-avx512" } else { "default" };
    for (kind, name) in [(Kind::Float, "f32"), (Kind::BFloat16, "bf16")] {
        for size in [256, 1024] {
            let options = (kind, tch::Device::Cpu);
            let left = Tensor::ones([1024, size], options);
            let right = Tensor::ones([size, size], options);
            for _ in 0..3 {
                let _ = left.matmul(&right);
            }
            let (start, mut count) = (Instant::now(), 0);
            while start.elapsed().as_secs_f64() < 1.0 {
                let _ = left.matmul(&right);
                count += 1;
            }
            let operations = f64::from(count) * 2.0 * 1024.0 * (size * size) as f64;
            let rate = operations / start.elapsed().as_secs_f64() / 1e9;
            println!(
                "{name} 1024 x {size} x {size}, threads {threads}, {feature}: {rate:.0} GFLOP/s"
            );
        }
    }
}
