//! Namespaces whose packets a thread of this process carries.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sched::{CloneFlags, setns};
use nix::sys::time::TimeSpec;
use tun_rs::{DeviceBuilder, SyncDevice};

use super::link::{Config, Counts, Network, Packet};
use crate::namespace::{Namespace, ip};

const DEVICE: &str = "link";

/// The largest packet of a device, in bytes: that of Ethernet.
const MTU: u16 = 1500;

/// The packets taken from one device before the next one.
const BURST: usize = 64;

/// Machines joined by an emulated network, which drop removes.
#[derive(Debug)]
pub struct Machines {
    places: Vec<Namespace>,
    carrier: Option<JoinHandle<Vec<Counts>>>,
    /// Ends the carrier when dropped.
    stop: Option<OwnedFd>,
}

impl Machines {
    /// Creates the machines and starts to carry packets.
    ///
    /// # Errors
    /// The reason, where the machine lacks support or the user is not root.
    pub fn new(config: &Config) -> Result<Self, String> {
        static NETWORKS: AtomicUsize = AtomicUsize::new(0);
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("shoal-link-{}-{network}-{end}", std::process::id());
        let places =
            (0..config.ends.len()).map(name).map(Namespace::new).collect::<Result<Vec<_>, _>>()?;
        let mut devices = Vec::new();
        for (end, name) in places.iter().map(Namespace::name).enumerate() {
            let device = device(name, Self::address(end));
            devices.push(device.map_err(|error| format!("no device in {name}: {error}"))?);
            ip(&["-n", name, "route", "add", "default", "dev", DEVICE])?;
        }
        let (wait, stop) = nix::unistd::pipe().map_err(|error| error.to_string())?;
        let network = Network::new(config);
        let carrier = Carrier { devices, network, began: Instant::now() };
        let carrier = Some(std::thread::spawn(move || carrier.run(&wait)));
        Ok(Self { places, carrier, stop: Some(stop) })
    }

    /// The address of a machine, from the range for tests of networks (RFC 2544).
    #[must_use]
    pub fn address(end: usize) -> Ipv4Addr {
        Ipv4Addr::new(198, 19, 0, u8::try_from(end + 1).expect("few machines"))
    }

    /// The names of the namespaces.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.places.iter().map(Namespace::name).collect()
    }

    /// The same command on a machine.
    #[must_use]
    pub fn within(&self, end: usize, command: &Command) -> Command {
        self.places[end].within(command)
    }

    /// Stops carrying packets, and gives the counts of each machine.
    ///
    /// # Panics
    /// When a device failed.
    pub fn stop(&mut self) -> Vec<Counts> {
        self.end().map(|counts| counts.expect("it carries")).unwrap_or_default()
    }

    fn end(&mut self) -> Option<std::thread::Result<Vec<Counts>>> {
        drop(self.stop.take());
        self.carrier.take().map(JoinHandle::join)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        // The panic of a thread has been printed.
        let _ = self.end();
    }
}

/// Creates a device in a namespace, on a thread of its own: a namespace belongs to a thread.
fn device(namespace: &str, address: Ipv4Addr) -> io::Result<SyncDevice> {
    let place = File::open(Path::new("/var/run/netns").join(namespace))?;
    let made = std::thread::spawn(move || {
        setns(place, CloneFlags::CLONE_NEWNET)?;
        let device = DeviceBuilder::new()
            .name(DEVICE)
            .ipv4(address, 24, None)
            .mtu(MTU)
            .tx_queue_len(10_000)
            .build_sync()?;
        device.set_nonblocking(true)?;
        Ok(device)
    });
    made.join().expect("making a device does not panic")
}

/// The thread that carries packets.
struct Carrier {
    devices: Vec<SyncDevice>,
    network: Network,
    began: Instant,
}

impl Carrier {
    fn run(mut self, stop: &OwnedFd) -> Vec<Counts> {
        let ends: BTreeMap<Ipv4Addr, usize> =
            (0..self.devices.len()).map(|end| (Machines::address(end), end)).collect();
        let mut buffer = vec![0; usize::from(MTU)];
        while !self.wait(stop) {
            for from in 0..self.devices.len() {
                self.take(from, &ends, &mut buffer);
            }
            self.give();
        }
        self.network.counts().to_vec()
    }

    /// Waits for a packet to take or to deliver. Gives whether to stop.
    fn wait(&self, stop: &OwnedFd) -> bool {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let devices = self.devices.iter().map(AsFd::as_fd);
        let mut all: Vec<PollFd> =
            std::iter::once(stop.as_fd()).chain(devices).map(readable).collect();
        let now = self.began.elapsed();
        let patience = self.network.next().map(|due| due.saturating_sub(now));
        match ppoll(&mut all, patience.map(TimeSpec::from), None) {
            Ok(_) => all[0].any().unwrap_or(true),
            Err(nix::errno::Errno::EINTR) => false,
            Err(error) => panic!("waiting for packets: {error}"),
        }
    }

    fn take(&mut self, from: usize, ends: &BTreeMap<Ipv4Addr, usize>, buffer: &mut [u8]) {
        for _ in 0..BURST {
            let length = match self.devices[from].recv(buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => panic!("taking packets of machine {from}: {error}"),
            };
            let bytes = &buffer[..length];
            // Packets to other destinations, such as multicast, are discarded.
            if let Some(to) = destination(bytes).and_then(|address| ends.get(&address)) {
                let packet = Packet { from, to: *to, bytes: bytes.to_vec() };
                self.network.send(self.began.elapsed(), packet);
            }
        }
    }

    fn give(&mut self) {
        let now: Duration = self.began.elapsed();
        while let Some(packet) = self.network.arrived(now) {
            // A receiver that is too slow loses packets.
            let _ = self.devices[packet.to].send(&packet.bytes);
        }
    }
}

/// The destination of an IPv4 packet (RFC 791).
fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let version = packet.first()? >> 4;
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    (version == 4).then(|| address.into())
}
