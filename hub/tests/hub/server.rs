//! A small HTTP server whose answers a test scripts, and which records its requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A request that has arrived.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    /// The path with its query.
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a body in JSON")
    }

    /// The first byte that a `Range` header asks for.
    pub(crate) fn range_start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// An answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are sent before the connection ends.
    sent: usize,
    /// Time between the sent part and the end of the connection.
    hold: Duration,
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let sent = body.len();
        Self { status, headers: Vec::new(), body, sent, hold: Duration::ZERO }
    }

    pub(crate) fn json(value: &serde_json::Value) -> Self {
        Self::new(200, value.to_string())
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Only this much of the body is sent.
    pub(crate) fn cut(mut self, sent: usize) -> Self {
        self.sent = sent;
        self
    }

    /// After what is sent, the server is silent for this long.
    pub(crate) fn then_silent(mut self, hold: Duration) -> Self {
        self.hold = hold;
        self
    }
}

type Handler = dyn Fn(&Asked) -> Answer + Send + Sync;

/// The server, which ends with its value.
pub(crate) struct Server {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let ended = Arc::new(AtomicBool::new(false));
        let handler: Arc<Handler> = Arc::new(handler);
        let (log, stop) = (Arc::clone(&asked), Arc::clone(&ended));
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (log, handler) = (Arc::clone(&log), Arc::clone(&handler));
                thread::spawn(move || serve(stream, &log, &*handler));
            }
        });
        Self { address, asked, ended, thread: Some(thread) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }

    /// The requests whose path contains this.
    pub(crate) fn asked_for(&self, part: &str) -> Vec<Asked> {
        self.asked().into_iter().filter(|asked| asked.path.contains(part)).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // The connection wakes the listener up.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Asked>>, handler: &Handler) {
    let Some(asked) = read(&stream) else { return };
    let answer = handler(&asked);
    log.lock().expect("no panic").push(asked);
    let mut head = format!("HTTP/1.1 {} Scripted\r\nconnection: close\r\n", answer.status);
    head.push_str(&format!("content-length: {}\r\n", answer.body.len()));
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    // The client may have gone.
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(&answer.body[..answer.sent]);
    let _ = stream.flush();
    thread::sleep(answer.hold);
}

fn read(stream: &TcpStream) -> Option<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap_or(0));
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Asked { method, path, headers, body })
}
