//! Measurements before a life in a run begins, each on a thread of its own: files of earlier lives,
//! the device's known answers and its speed.

use std::num::NonZeroU16;
use std::sync::Arc;

use anyhow::Context as _;
use shoal_engine::{Device, DeviceChoice, Tiers, copy_rate, swap_rate};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Candidate, Duties, Sealer, Signatures, StageChoice};
use shoal_protocol::units::Rate;
use shoal_scheduler::peer::{Peer, PeerConfig, PeerLimits};
use shoal_scheduler::router::Routing;

use super::archive::Archive;
use super::context::Context;
use super::resource_budget::ResourceBudget;
use super::resume;
use super::setup::{PeerDevices, Setup};
use crate::exit::{Exit, ExitWith};

/// Returns the passes that this peer runs at the same time, which is the number of its devices to others.
///
/// # Errors
/// When its devices cannot share the slices of a pass, or cannot divide the stages.
pub(super) fn passes_of(setup: &Setup) -> anyhow::Result<usize> {
    if setup.choice == StageChoice::None {
        return Ok(setup.devices.each.len());
    }
    if let Some(problem) = pipeline_problem(setup).filter(|_| setup.devices.divide_stages) {
        return Err(anyhow::anyhow!("--pipeline {problem}")).exit_with(Exit::Usage);
    }
    setup.devices.passes_at_once(&setup.manifest).exit_with(Exit::Usage)
}

/// Why devices cannot divide the stages.
fn pipeline_problem(Setup { devices, manifest, limits, .. }: &Setup) -> Option<&'static str> {
    let problems = [
        (
            devices.each.len() == 1,
            "divides the stages among several devices: name them with --device",
        ),
        (manifest.model.slices > 1, "is for runs without slices (model.slices = 1): leave it out"),
        (manifest.inner.is_some(), "is for runs without virtual workers: leave it out"),
        (
            limits.device_memory.is_some(),
            "has all of a stage on its device: leave --device-memory out, or --pipeline",
        ),
    ];
    problems.into_iter().find_map(|(is_so, problem)| is_so.then_some(problem))
}

/// What the engine of this process may host.
#[derive(Debug, Clone)]
pub(super) struct HostedRoom {
    /// The number of stages that the coordinator may have it host at once; 0 if it chooses none.
    pub(super) most: u16,
    /// Where stages go that memory or the device does not hold.
    pub(super) tiers: Tiers,
}

/// Makes this process's peer, which hosts any stage that the machine has room for, and runs so many passes at
/// the same time. Returns also what its engine hosts.
///
/// # Errors
/// When the machine has no room for the chosen stages, or a known-answer pass fails.
pub(super) async fn new_peer(
    setup: &Setup,
    budget: &ResourceBudget,
    passes: usize,
    keys: Arc<dyn Signatures>,
) -> anyhow::Result<(Peer, HostedRoom)> {
    let Setup { manifest, me, choice, longest, price, island, name, .. } = setup;
    let PeerDevices { each: devices, threads, divide_stages } = &setup.devices;
    let Setup { network, role, .. } = setup;
    let fits = budget.fits(manifest, *choice).exit_with(Exit::NotAdmitted)?;
    let resident = budget.resident(manifest, *choice);
    let mut room = budget.room(manifest, *choice, &fits);
    let tiers = budget.tiers(manifest, *choice, room);
    if room.most > room.in_memory {
        room.swap_rate = rate_of(tiers.clone(), devices[0]).await?;
    }
    let fingerprint = match choice {
        StageChoice::None => None,
        _ => Some(known_answers_of_all(manifest, devices, *threads).await?),
    };
    let mut limits = PeerLimits { resident: usize::from(resident), ..PeerLimits::default() };
    // A visit runs as many microbatches as there are.
    limits.first_swapped_window = manifest.training.microbatches as usize;
    if manifest.inner.is_some() {
        // A worker takes long: it goes to a peer that has nothing to do.
        (limits.first_window, limits.largest_windows) = (passes, vec![passes]);
    } else {
        let most = limits.largest_window(1);
        limits.largest_windows = budget.windows(manifest, &fits, (resident, most));
    }
    let candidate = Candidate {
        choice: *choice,
        fits,
        devices: few(passes),
        devices_per_pass: few(devices.len() / passes),
        room,
        longest: *longest,
        price: *price,
        island: island.clone(),
        name: name.clone(),
        link_estimates: None,
        addresses: network.as_ref().map_or_else(Vec::new, |net| net.addresses.clone()),
        fingerprint,
        duties: Duties { anchor: role.anchor.is_some(), archive: role.archive.is_some() },
    };
    let peer = Peer::new(PeerConfig {
        me: *me,
        manifest: manifest.clone(),
        candidate,
        parameters: manifest
            .weight_groups()
            .map(|weights| (weights, shoal_engine::group_elements(manifest, weights)))
            .collect(),
        limits,
        saving: setup.leaving.drain_timeout,
        seed: u64::from_le_bytes(*me.peer.0.first_chunk().expect("32 bytes")),
        sealer: Sealer::new(manifest.run_id(), keys),
        routing: Routing::default(),
        divides_stages: *divide_stages,
    });
    Ok((peer, HostedRoom { most: room.most, tiers }))
}

fn few(devices: usize) -> NonZeroU16 {
    u16::try_from(devices).ok().and_then(NonZeroU16::new).expect("a few devices")
}

/// Measures how fast the lowest tier takes and gives what is swapped.
async fn rate_of(tiers: Tiers, device: DeviceChoice) -> anyhow::Result<Rate> {
    let measure = move || match tiers.lower {
        Some(lower) => swap_rate(&lower.folder),
        None => copy_rate(Device::open(device, 1)?),
    };
    let measured = tokio::task::spawn_blocking(measure).await;
    Ok(measured.context("the measurement of the tier panicked")??)
}

/// Offers files of earlier lives to other peers. Returns the number of checkpoints that are of no
/// use.
///
/// # Errors
/// When the search panicked.
pub(super) async fn offer_kept(context: &Context) -> anyhow::Result<usize> {
    let (data_dir, archive) = (context.data_dir.clone(), context.archive.clone());
    let (run, files) = (context.manifest.run_id(), context.files.clone());
    let look =
        move || resume::offer_kept(&data_dir, archive.as_ref().map(Archive::folder), run, &files);
    tokio::task::spawn_blocking(look).await.context("the search for kept files panicked")
}

/// Computes the fingerprint of the first device, and warns of devices that compute other bits.
async fn known_answers_of_all(
    manifest: &Arc<Manifest>,
    devices: &[DeviceChoice],
    threads: usize,
) -> anyhow::Result<ContentHash> {
    let first = known_answers(manifest.clone(), devices[0], threads).await?;
    // Workers of one processor are alike.
    for device in devices[1..].iter().filter(|device| !device.is_processor()) {
        if known_answers(manifest.clone(), *device, threads).await? != first {
            tracing::warn!(
                "{device} computes other bits than {}: the model will depend on which of them does what. Use like \
                 devices, or one peer for each kind",
                devices[0]
            );
        }
    }
    Ok(first)
}

/// Computes the fingerprint by which peers that compute the same bits recognise each other.
async fn known_answers(
    manifest: Arc<Manifest>,
    device: DeviceChoice,
    threads: usize,
) -> anyhow::Result<ContentHash> {
    let compute = move || shoal_engine::fingerprint(&manifest, Device::open(device, threads)?);
    let computed = tokio::task::spawn_blocking(compute).await;
    Ok(computed.context("the known-answer pass panicked")??)
}

/// Measures the peak rate of all devices, each like the first, in floating-point operations per second.
///
/// # Errors
/// When the device cannot be opened, or the measurement panicked.
pub(super) async fn peak_flops(
    manifest: &Manifest,
    devices: &[DeviceChoice],
    threads: usize,
) -> anyhow::Result<f64> {
    let (device, dtype) = (devices[0], manifest.training.dtype);
    let measure = move || shoal_engine::peak_flops(Device::open(device, threads)?, dtype);
    let measured = tokio::task::spawn_blocking(measure).await;
    let each = measured.context("the measurement of the device panicked")??;
    Ok(each * devices.len() as f64)
}
