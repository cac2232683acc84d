//! A real S3 server, and a proxy before it that fails as networks and stores do.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::process::Process;
use crate::program::{prepared, root};

/// The bucket of every server.
pub const BUCKET: &str = "s3://models";

/// Bytes that the proxy passes on at a time.
const CHUNK: usize = 16 << 10;

/// An S3 server with one bucket, which drop ends.
#[derive(Debug)]
pub struct ObjectStore {
    _server: Process,
    address: SocketAddr,
    key: String,
    secret: String,
}

impl ObjectStore {
    /// Starts a server that accepts all credentials.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start() -> Self {
        Self::started(&[])
    }

    /// Starts a server that accepts its own credentials only.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn with_credentials() -> Self {
        Self::started(&["--credentials"])
    }

    fn started(flags: &[&str]) -> Self {
        let interpreter = root().join(".venv/bin/python");
        assert!(interpreter.exists(), "scripts/setup.sh --tests installs the object store");
        let mut command = Command::new(interpreter);
        command.arg(root().join("tests/python/object_store.py")).args(flags);
        let mut server = Process::start("object store", prepared(command));
        let listening = server.event("listening");
        let text = |name: &str| listening[name].as_str().expect("text").to_owned();
        let address = text("address").parse().expect("an address");
        Self { _server: server, address, key: text("key"), secret: text("secret") }
    }

    /// The server's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Has a command use this server, and its credentials, at an address.
    pub fn use_at(&self, address: SocketAddr, command: &mut Command) {
        use_store(address, (&self.key, &self.secret), command);
    }

    /// Has a command use this server and its credentials.
    pub fn use_in(&self, command: &mut Command) {
        self.use_at(self.address, command);
    }
}

/// Has a command use the S3 server at an address with these credentials.
pub fn use_store(address: SocketAddr, (key, secret): (&str, &str), command: &mut Command) {
    command
        .env("AWS_ENDPOINT_URL", format!("http://{address}"))
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", key)
        .env("AWS_SECRET_ACCESS_KEY", secret)
        .env_remove("AWS_SESSION_TOKEN");
}

/// A proxy whose connections break, stall or slow down.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that clients have sent.
    uploaded: AtomicU64,
    /// The value of `uploaded` at which every connection breaks, and no new one comes about.
    breaks_at: Mutex<Option<u64>>,
    /// The pause before each chunk that a client sends.
    pause: Mutex<Duration>,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Starts a proxy before a server.
    ///
    /// # Panics
    /// When no port is free.
    #[must_use]
    pub fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let state = Arc::<State>::default();
        thread::spawn({
            let state = state.clone();
            move || {
                for client in listener.incoming().flatten() {
                    state.connect(client, server);
                }
            }
        });
        Self { address, state }
    }

    /// The proxy's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that clients have sent so far.
    #[must_use]
    pub fn uploaded(&self) -> u64 {
        self.state.uploaded.load(Ordering::SeqCst)
    }

    /// Breaks all connections once clients have sent so many more bytes, and refuses new ones.
    pub fn break_after(&self, bytes: u64) {
        *lock(&self.state.breaks_at) = Some(self.uploaded() + bytes);
        if bytes == 0 {
            self.state.break_all();
        }
    }

    /// Accepts connections again.
    pub fn mend(&self) {
        *lock(&self.state.breaks_at) = None;
    }

    /// Waits so long before each 16 KiB that a client sends.
    pub fn slow_down(&self, pause: Duration) {
        *lock(&self.state.pause) = pause;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn is_broken(&self) -> bool {
        lock(&self.breaks_at).is_some_and(|at| self.uploaded.load(Ordering::SeqCst) >= at)
    }

    fn break_all(&self) {
        for stream in lock(&self.open).drain(..) {
            // The other end may have closed it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn connect(self: &Arc<Self>, client: TcpStream, server: SocketAddr) {
        // Dropping the connection closes it.
        if self.is_broken() {
            return;
        }
        let Ok(server) = TcpStream::connect(server) else { return };
        let both = [&client, &server].map(TcpStream::try_clone);
        let [Ok(client_too), Ok(server_too)] = both else { return };
        let others = [&client, &server].map(TcpStream::try_clone);
        lock(&self.open).extend(others.into_iter().flatten());
        let state = self.clone();
        thread::spawn(move || state.pass_uploads(client, server));
        thread::spawn(move || pass(server_too, client_too));
    }

    /// Passes on what a client sends.
    fn pass_uploads(&self, mut client: TcpStream, mut server: TcpStream) {
        let mut chunk = [0; CHUNK];
        while let Ok(length @ 1..) = client.read(&mut chunk) {
            let pause = *lock(&self.pause);
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            self.uploaded.fetch_add(length as u64, Ordering::SeqCst);
            if self.is_broken() {
                self.break_all();
                return;
            }
            if server.write_all(&chunk[..length]).is_err() {
                break;
            }
        }
        // One of the ends has closed it.
        let _ = server.shutdown(Shutdown::Write);
    }
}

/// Passes on what a server answers.
fn pass(mut server: TcpStream, mut client: TcpStream) {
    let _ = std::io::copy(&mut server, &mut client);
    // One of the ends has closed it.
    let _ = client.shutdown(Shutdown::Both);
}
