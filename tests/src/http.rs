//! HTTP requests to the processes of a test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::PATIENCE;

/// The code and the body of the answer to `GET path`; `None` where no process listens.
///
/// # Panics
/// When the answer is not HTTP.
#[must_use]
pub fn try_get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
    // HTTP 1.0: the body is not chunked, and ends with the connection.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Some((code.expect("a code"), body.to_owned()))
}

/// The code and the body of the answer to `GET path`.
///
/// # Panics
/// When no process answers.
#[must_use]
pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    try_get(address, path).unwrap_or_else(|| panic!("no process answers at {address}"))
}

/// The body of a page.
///
/// # Panics
/// When no process answers, or with an error.
#[must_use]
pub fn page(address: SocketAddr, path: &str) -> String {
    let (code, body) = get(address, path);
    assert_eq!(code, 200, "GET {path}: {body}");
    body
}
