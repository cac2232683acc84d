//! Checks of this machine: data directory, disk, device, and the run's certificate.

use std::fs::{File, TryLockError};
use std::path::Path;

use nix::sys::statvfs::statvfs;
use shoal_engine::{Device, DeviceChoice, Devices, EngineError};
use shoal_protocol::net::admission::{Certificate, UnixTime};
use shoal_protocol::net::identity::Identity;
use shoal_protocol::units::Bytes;

use super::{Finding, Owner};
use crate::admission::{Store, access_list_of};
use crate::data_dir;

/// Free disk space below which no run fits.
const LEAST: Bytes = Bytes::mebi(256);

/// Free disk space below which only small runs fit.
const LITTLE: Bytes = Bytes::mebi(4096);

/// Checks that the data directory is writable, and finds out whether a running peer uses it.
pub(crate) fn data_dir(path: &Path) -> (Vec<Finding>, Owner) {
    const ABOUT: &str = "data directory";
    let shown = path.display();
    let writable = data_dir::make(path).and_then(|()| tempfile::tempfile_in(path));
    if let Err(error) = writable {
        let fix = format!("make {shown} writable for this user, or choose another --data-dir");
        return (vec![Finding::wrong(ABOUT, format!("{shown}: {error}"), fix)], Owner::None);
    }
    let lock = File::options().write(true).open(path.join("lock"));
    let owner = match lock.map(|lock| lock.try_lock()) {
        Ok(Err(TryLockError::WouldBlock)) => Owner::Peer,
        _ => Owner::None,
    };
    let used = if owner == Owner::Peer { ", in use by a running peer" } else { "" };
    let mut findings = vec![Finding::well(ABOUT, format!("{shown} is writable{used}"))];
    let identity = path.join("identity");
    findings.push(match identity.exists().then(|| Identity::load_or_create(&identity)) {
        None => Finding::note(
            "identity",
            "none yet: the first `shoal start` or `shoal join` creates it",
        ),
        Some(Ok(known)) => Finding::well("identity", known.peer_id().to_string()),
        Some(Err(error)) => {
            let fix =
                format!("run `chmod 600 {0}`, or restore the file from a copy", identity.display());
            Finding::wrong("identity", error.to_string(), fix)
        }
    });
    (findings, owner)
}

/// Checks the free disk space.
pub(crate) fn disk(path: &Path) -> Finding {
    const ABOUT: &str = "disk";
    let free = match statvfs(path) {
        Ok(disk) => Bytes(disk.blocks_available() * disk.fragment_size()),
        Err(error) => {
            return Finding::note(ABOUT, format!("cannot read the free disk space: {error}"));
        }
    };
    let text = format!("{free} free at {}", path.display());
    if free < LEAST {
        let fix =
            format!("free some of it (at least {LEAST}), or choose a --data-dir on another disk");
        return Finding::wrong(ABOUT, text, fix);
    }
    if free < LITTLE { Finding::note(ABOUT, text) } else { Finding::well(ABOUT, text) }
}

/// Checks the devices that tensors are computed on.
pub(crate) fn devices(devices: &Devices) -> Vec<Finding> {
    // Only a peer that chooses by itself overlooks a GPU.
    let has_unused_gpu = *devices == Devices::default() && Path::new("/dev/nvidiactl").exists();
    match devices.resolve() {
        Ok(mut devices) => {
            // The workers of a processor are alike.
            devices.dedup();
            devices.into_iter().map(|choice| device(choice, has_unused_gpu)).collect()
        }
        Err(error) => vec![no_device(&error)],
    }
}

fn no_device(error: &EngineError) -> Finding {
    let fix = "check the GPU and its driver with `nvidia-smi`, or use --device cpu";
    Finding::wrong("device", error.to_string(), fix)
}

fn device(choice: DeviceChoice, has_unused_gpu: bool) -> Finding {
    const ABOUT: &str = "device";
    match Device::open(choice, 1) {
        Err(error) => no_device(&error),
        Ok(_) if has_unused_gpu && choice.is_processor() => Finding::wrong(
            ABOUT,
            "this machine has an NVIDIA GPU, but the installed libtorch cannot use it",
            "install a GPU build of PyTorch 2.11.0 (`pip install torch==2.11.0`; run `make setup` again where Shoal was \
             built from source) and a matching driver, or use --device cpu",
        ),
        Ok(_) if choice.is_processor() => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Finding::note(
                ABOUT,
                format!("no GPU: this peer computes on {threads} processor threads"),
            )
        }
        Ok(_) => Finding::well(ABOUT, format!("{choice} works")),
    }
}

/// Checks the certificate for the run that this peer last took part in.
pub(crate) fn certificate(path: &Path) -> Vec<Finding> {
    const ABOUT: &str = "certificate";
    let Ok(folder) = Store::current(path) else { return Vec::new() };
    let identity = path.join("identity");
    let known = identity.exists().then(|| Identity::load_or_create(&identity));
    let (Some(Ok(me)), Ok(rules)) = (known, folder.rules()) else { return Vec::new() };
    let me = me.peer_id();
    let banned = access_list_of(&folder).is_ok_and(|access_list| access_list.banned.contains(&me));
    if banned {
        let fix = format!("ask the run's issuer to run `shoal unban {me}`");
        return vec![Finding::wrong(ABOUT, format!("peer {me} is banned from the run"), fix)];
    }
    let (Ok(Some(signed)), Some(key)) = (folder.certificate(), rules.admission.key) else {
        return Vec::new();
    };
    let good = signed.open::<Certificate>(key).and_then(|certificate| {
        certificate.admits(me, rules.run, UnixTime::now()).map(|()| certificate)
    });
    vec![match good {
        Ok(certificate) => {
            let left = certificate.term.expires.since(UnixTime::now()).as_secs() / 86_400;
            Finding::well(
                ABOUT,
                format!("admits this peer to run {:.8} for {left} more days", rules.run),
            )
        }
        Err(denied) => {
            let fix = "ask the run's issuer for a ticket (`shoal invite new`), then run \
                       `shoal join TICKET`";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
    }]
}
