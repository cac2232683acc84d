//! The machine alone: its disk, its device, what earlier lives left.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use nix::sys::statvfs::statvfs;
use shoal_engine::{Device, DeviceChoice};
use shoal_protocol::net::admission::{Certificate, UnixTime};
use shoal_protocol::net::identity::Identity;
use shoal_protocol::units::Bytes;

use super::{Finding, Owner};
use crate::admission::{Store, access_list_of};

/// Less than this on the disk is not enough for any run.
const LEAST: Bytes = Bytes::mebi(256);

/// Less than this does for small runs only.
const LITTLE: Bytes = Bytes::mebi(4096);

/// Whether the data directory can be used, and by whom it is.
pub(crate) fn data_dir(path: &Path) -> (Vec<Finding>, Owner) {
    const ABOUT: &str = "data directory";
    let shown = path.display();
    let writable = fs::create_dir_all(path).and_then(|()| tempfile::tempfile_in(path));
    if let Err(error) = writable {
        let fix = format!("make {shown} writable for this user, or give another --data-dir");
        return (vec![Finding::wrong(ABOUT, format!("{shown}: {error}"), fix)], Owner::Nobody);
    }
    let lock = File::options().write(true).open(path.join("lock"));
    let owner = match lock.map(|lock| lock.try_lock()) {
        Ok(Err(TryLockError::WouldBlock)) => Owner::Peer,
        _ => Owner::Nobody,
    };
    let used = if owner == Owner::Peer { ", in use by a running peer" } else { "" };
    let mut findings = vec![Finding::well(ABOUT, format!("{shown} can be written{used}"))];
    let identity = path.join("identity");
    findings.push(match identity.exists().then(|| Identity::load_or_create(&identity)) {
        None => Finding::note("identity", "none yet: the first start makes one"),
        Some(Ok(known)) => Finding::well("identity", known.peer_id().to_string()),
        Some(Err(error)) => {
            let fix = format!("chmod 600 {0}, or restore {0}", identity.display());
            Finding::wrong("identity", error.to_string(), fix)
        }
    });
    (findings, owner)
}

/// Whether there is room on the disk.
pub(crate) fn disk(path: &Path) -> Finding {
    const ABOUT: &str = "disk";
    let free = match statvfs(path) {
        Ok(disk) => Bytes(disk.blocks_available() * disk.fragment_size()),
        Err(error) => {
            return Finding::note(ABOUT, format!("it does not say what is free: {error}"));
        }
    };
    let says = format!("{free} free at {}", path.display());
    if free < LEAST {
        let fix =
            format!("free some of it ({LEAST} at the least), or give a --data-dir on another disk");
        return Finding::wrong(ABOUT, says, fix);
    }
    if free < LITTLE { Finding::note(ABOUT, says) } else { Finding::well(ABOUT, says) }
}

/// What there is to compute with.
pub(crate) fn device(choice: DeviceChoice) -> Finding {
    const ABOUT: &str = "device";
    let gpu = Path::new("/dev/nvidiactl").exists();
    match Device::open(choice, 1) {
        Err(error) => {
            let fix = "look at what `nvidia-smi` says, or start with --device cpu";
            Finding::wrong(ABOUT, error.to_string(), fix)
        }
        Ok(_) if gpu && choice == DeviceChoice::Auto && choice.is_processor() => Finding::wrong(
            ABOUT,
            "this machine has an NVIDIA GPU, and this libtorch cannot use it",
            "install a libtorch for CUDA (`make setup` on this machine does) and a driver that fits it, \
             or start with --device cpu",
        ),
        Ok(_) if choice.is_processor() => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Finding::note(ABOUT, format!("no GPU: passes run on {threads} processor threads"))
        }
        Ok(_) => Finding::well(ABOUT, format!("{choice} works")),
    }
}

/// What this peer has to show in the run that it last took part in.
pub(crate) fn papers(path: &Path) -> Vec<Finding> {
    const ABOUT: &str = "certificate";
    let Ok(folder) = Store::current(path) else { return Vec::new() };
    let identity = path.join("identity");
    let known = identity.exists().then(|| Identity::load_or_create(&identity));
    let (Some(Ok(me)), Ok(rules)) = (known, folder.rules()) else { return Vec::new() };
    let me = me.peer_id();
    let banned = access_list_of(&folder).is_ok_and(|access_list| access_list.banned.contains(&me));
    if banned {
        let fix = "ask the run's warden for `shoal unban` with this peer's id";
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
                format!("lets this peer into run {:.8} for {left} days", rules.run),
            )
        }
        Err(denied) => {
            let fix = "ask for a ticket (`shoal invite new`), and type `shoal join TICKET`";
            Finding::wrong(ABOUT, denied.to_string(), fix)
        }
    }]
}
