//! Trains a run of two stages with two processes that trust each other. It uses the same engine, transport and
//! tensors as Shoal, but has no claims, no log, no commits and no recovery. `bench/overhead.py` compares Shoal's
//! driver with it.
//!
//! ```text
//! bare_driver run.toml            hosts stage 0, and prints its address
//! bare_driver run.toml ADDRESS    hosts stage 1, and connects to that address
//! ```
//!
//! Each prints a line of JSON for every step.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use bytes::Bytes;
use shoal_engine::{
    Device, DeviceChoice, Engine, FixedPoint, ForwardOutput, Samples, TokenFile, Update,
    group_elements, square_norm,
};
use shoal_formats::config::RunConfig;
use shoal_node::config_sources::OnDisk;
use shoal_node::dataset;
use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame};
use shoal_protocol::ids::{
    ClaimKey, Incarnation, Microbatch, PeerId, Stage, StageSpan, Step, WeightGroup,
};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::FixedLoss;
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::identity::Identity;
use shoal_protocol::net::transport::{
    Class, Congestion, NoFiles, Transport, TransportConfig, TransportEvent,
};
use tokio::sync::mpsc::Receiver;

/// Microbatches in flight at the first stage, as many as Shoal starts with.
const WINDOW: usize = 5;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let (config, first) = match arguments.as_slice() {
        [_, config] => (config, None),
        [_, config, address] => (config, Some(address.as_str())),
        _ => bail!("bare_driver run.toml [ADDRESS]"),
    };
    let stage = Stage(u16::from(first.is_some()));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _entered = runtime.enter();
    let config = RunConfig::load(Path::new(config), &OnDisk)?;
    let folder = tempfile::tempdir()?;
    let dataset = dataset::prepare(&config, folder.path())?;
    let manifest = dataset.manifest.clone();
    let tokens = manifest.text().context("a run on a text")?;
    let token_file = dataset.token_file().context("a token file")?;
    let device = Device::open(DeviceChoice::Cpu, 1)?;
    let engine = Engine::new(&manifest, StageSpan::one(stage), device)?;
    let samples = Samples::new(&manifest, TokenFile::open(token_file, tokens)?);
    let link = runtime.block_on(Link::open(first))?;
    let mut trainer = Trainer { manifest, engine, samples, link, stage };
    for step in 0..trainer.manifest.training.steps {
        let (loss, norm) = trainer.step(&runtime, Step(step))?;
        println!(r#"{{"event":"committed","step":{step},"loss":{loss},"gradient_norm":{norm}}}"#);
        std::io::stdout().flush()?;
    }
    runtime.block_on(trainer.link.transport.close());
    Ok(())
}

/// The connection to the other process.
struct Link {
    transport: Transport,
    events: Receiver<TransportEvent>,
    other: PeerId,
    /// Messages that arrived while the process waited for tensors.
    early: VecDeque<Vec<u8>>,
}

impl Link {
    /// Connects to the first process, or waits as the first process for the other.
    async fn open(first: Option<&str>) -> anyhow::Result<Self> {
        let identity = Identity::ephemeral();
        let config = TransportConfig {
            incarnation: Incarnation(1),
            run: None,
            congestion: Congestion::Cubic,
            files: Arc::new(NoFiles),
            gate: Gate::default(),
        };
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (transport, mut events) = Transport::bind(&identity, &[listen], config)?;
        let other = if let Some(first) = first {
            let first: PeerAddress = first.parse()?;
            let addresses = first.resolve().await?;
            transport.connect(first.peer, &addresses).await?;
            first.peer
        } else {
            let here = PeerAddress::new(transport.local_addresses()[0], identity.peer_id());
            println!(r#"{{"event":"listening","address":"{here}"}}"#);
            std::io::stdout().flush()?;
            loop {
                match events.recv().await {
                    Some(TransportEvent::Connected { member, .. }) => break member.peer,
                    Some(_) => {}
                    None => bail!("no process connected"),
                }
            }
        };
        transport.set_members([other]);
        Ok(Self { transport, events, other, early: VecDeque::new() })
    }

    fn send(
        &self,
        runtime: &tokio::runtime::Runtime,
        key: ClaimKey,
        tensors: Vec<Frame>,
    ) -> anyhow::Result<()> {
        let tag = key.microbatch.0.to_le_bytes().to_vec();
        let queued = self.transport.send_tensor(self.other, tag, tensors, Class::Activation)?;
        runtime.spawn(queued);
        Ok(())
    }

    /// The next tensors. Without `wait` there may be none.
    fn tensors(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        wait: bool,
    ) -> anyhow::Result<Option<(u32, Vec<Bytes>)>> {
        loop {
            let event = match self.events.try_recv() {
                Ok(event) => event,
                Err(_) if !wait => return Ok(None),
                Err(_) => runtime.block_on(self.events.recv()).context("the link closed")?,
            };
            match event {
                TransportEvent::Tensor(message) => {
                    let number = message.tag.as_slice().try_into().context("a number")?;
                    let bodies = message.frames.iter().map(Frame::unpack);
                    let bodies = bodies.collect::<Result<_, _>>()?;
                    return Ok(Some((u32::from_le_bytes(number), bodies)));
                }
                TransportEvent::Control { bytes, .. } => self.early.push_back(bytes),
                TransportEvent::Disconnected { .. } => bail!("the other process is gone"),
                _ => {}
            }
        }
    }

    /// Exchanges numbers with the other process.
    fn exchange(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        numbers: [f64; 2],
    ) -> anyhow::Result<[f64; 2]> {
        let bytes = numbers.map(f64::to_le_bytes).concat();
        self.transport.send_control(self.other, bytes)?;
        while self.early.is_empty() {
            match runtime.block_on(self.events.recv()).context("the link closed")? {
                TransportEvent::Control { bytes, .. } => self.early.push_back(bytes),
                TransportEvent::Disconnected { .. } => bail!("the other process is gone"),
                _ => {}
            }
        }
        let message = self.early.pop_front().context("a message just arrived")?;
        let (numbers, _) = message.as_chunks::<8>();
        let [first, second] = numbers else { bail!("two numbers") };
        Ok([f64::from_le_bytes(*first), f64::from_le_bytes(*second)])
    }
}

struct Trainer {
    manifest: Manifest,
    engine: Engine,
    samples: Samples,
    link: Link,
    stage: Stage,
}

impl Trainer {
    /// Trains a step, and returns its mean loss and the norm of its gradient.
    fn step(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        step: Step,
    ) -> anyhow::Result<(f64, f64)> {
        let loss = match self.stage {
            Stage(0) => self.first(runtime, step)?,
            _ => self.last(runtime, step)?,
        };
        let weights = WeightGroup(self.stage.0);
        let elements = group_elements(&self.manifest, weights);
        let sums = self.engine.export(weights, step, 0..elements)?;
        let mean = FixedPoint::of(&self.manifest).reduce(&[sums])?;
        let own = square_norm(&mean);
        let [other, other_loss] = self.link.exchange(runtime, [own, loss])?;
        let norm = (own + other).sqrt();
        let whole = FixedLoss::new(0, self.manifest.tokens_per_step());
        let update = Update {
            step,
            count: step.0 + 1,
            gradients: &[&mean],
            gradient_norm: norm,
            loss: whole,
        };
        self.engine.apply(self.stage, &update)?;
        Ok((loss.max(other_loss), norm))
    }

    /// Stage 0: backward passes come before new forward passes, of which a window is in flight.
    fn first(&mut self, runtime: &tokio::runtime::Runtime, step: Step) -> anyhow::Result<f64> {
        let all = self.manifest.training.microbatches;
        let (mut begun, mut ended) = (0, 0);
        while ended < all {
            let may_begin = begun < all && ((begun - ended) as usize) < WINDOW;
            if let Some((number, bodies)) = self.link.tensors(runtime, !may_begin)? {
                let key = self.key(step, number);
                self.engine.backward(key, Some(&bodies[0]))?;
                self.engine.accumulate(key)?;
                ended += 1;
                continue;
            }
            let key = self.key(step, begun);
            let batch = self.samples.batch(step, key.microbatch);
            let labels = self.manifest.with_tokens(&batch.inputs, batch.labels);
            let ForwardOutput::Activation(output) =
                self.engine.forward(key, &batch.inputs, Some(&labels))?
            else {
                bail!("stage 0 of two has an activation");
            };
            let frames = vec![self.activation(output)?, self.labels(labels)?];
            self.link.send(runtime, key, frames)?;
            begun += 1;
        }
        Ok(0.0)
    }

    /// Stage 1: runs both passes of each microbatch as it arrives.
    fn last(&mut self, runtime: &tokio::runtime::Runtime, step: Step) -> anyhow::Result<f64> {
        let all = self.manifest.training.microbatches;
        let mut loss = 0.0;
        for _ in 0..all {
            let (number, bodies) =
                self.link.tensors(runtime, true)?.context("tensors were awaited")?;
            let key = self.key(step, number);
            match self.engine.forward(key, &bodies[0], Some(&bodies[1]))? {
                ForwardOutput::Loss { share, .. } => loss += f64::from(share),
                ForwardOutput::Activation(_) => bail!("the last stage has a loss"),
            }
            let gradient = self.engine.backward(key, None)?.context("stage 1 has an input")?;
            self.engine.accumulate(key)?;
            let frames = vec![self.activation(gradient)?];
            self.link.send(runtime, key, frames)?;
        }
        Ok(loss / f64::from(all))
    }

    fn key(&self, step: Step, number: u32) -> ClaimKey {
        ClaimKey { step, stage: self.stage, microbatch: Microbatch(number) }
    }

    fn activation(&self, bytes: Bytes) -> anyhow::Result<Frame> {
        let shape = self.manifest.boundary_shape();
        let element = self.manifest.codec.activations.into();
        Ok(Frame::pack(element, &shape, bytes, Packing::Raw)?)
    }

    fn labels(&self, bytes: Bytes) -> anyhow::Result<Frame> {
        Ok(Frame::pack(Element::U32, &self.manifest.label_shape(), bytes, Packing::Raw)?)
    }
}
