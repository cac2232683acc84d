use std::net::Ipv4Addr;
use std::time::Instant;

use shoal_protocol::ids::ContentHash;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::client;
use super::super::connection::{HEAD_BYTES, Limits};
use super::super::places::Room;
use super::*;
use crate::events::RunEvent;
use crate::status::{NodeState, NodeStatus, Observation};

const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// Limits that are short enough for a test.
fn strict() -> Limits {
    let room = Room { connections: 8, of_address: 4 };
    Limits { room, head: Duration::from_millis(400), whole: Duration::from_secs(5) }
}

/// Runs a server until `asked` ends.
async fn with_server<F: Future>(asked: impl FnOnce(SocketAddr, StatusWatch) -> F) -> F::Output {
    let server = HttpServer::bind(ANY_PORT.into()).await.expect("a free port");
    let address = server.address().expect("bound");
    let status = StatusWatch::default();
    let metrics = Metrics::new().expect("registered");
    let machine = Machine::new(&[shoal_engine::DeviceChoice::Cpu], std::path::Path::new("."));
    let shown = Shown { metrics, machine, status: status.clone() };
    let stop = CancellationToken::new();
    let asking = async {
        let result = asked(address, status).await;
        stop.cancel();
        result
    };
    let ((), result) = tokio::join!(server.serve_within(strict(), shown, stop.clone()), asking);
    result
}

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("it listens")
}

/// Everything received until the other end closes.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A client that is disconnected may see a reset.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = connect(address).await;
    stream.write_all(request.as_bytes()).await.expect("sent");
    rest(&mut stream).await
}

async fn get(address: SocketAddr, path: &str) -> String {
    raw(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n")).await
}

fn serving() -> Observation {
    let node = NodeStatus { state: NodeState::Serving, ready: true, ..NodeStatus::default() };
    Observation { node, ..Observation::default() }
}

#[tokio::test]
async fn every_route_answers() {
    with_server(|address, _| async move {
        let metrics = get(address, "/metrics").await;
        assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
        assert!(metrics.contains(Metrics::CONTENT_TYPE), "{metrics}");
        assert!(metrics.contains("\n# TYPE shoal_"), "{metrics}");
        let page = get(address, "/").await;
        assert!(page.contains("content-security-policy: default-src 'none'"), "{page}");
        assert!(page.contains("x-content-type-options: nosniff"), "{page}");
        assert!(get(address, "/else").await.starts_with("HTTP/1.1 404 "));
        let post = format!("POST /status HTTP/1.1\r\nHost: {address}\r\n\r\n");
        assert!(raw(address, &post).await.starts_with("HTTP/1.1 405 "));
        let status = client::status(address).await.expect("a status");
        assert_eq!(status.node.state, NodeState::Joining);
    })
    .await;
}

#[tokio::test]
async fn a_node_is_ready_while_it_serves_and_until_it_leaves() {
    with_server(|address, status| async move {
        let code = async |path| client::get(address, path).await.expect("answered").code.as_u16();
        assert_eq!((code("/livez").await, code("/readyz").await), (200, 503));
        status.see(serving());
        assert_eq!((code("/livez").await, code("/readyz").await), (200, 200));
        status.note(&RunEvent::Draining { source: "SIGTERM".into() });
        assert_eq!((code("/livez").await, code("/readyz").await), (200, 503));
        let again = RunEvent::Started {
            run: ContentHash([1; 32]),
            seed: 0,
            stages: 1,
            steps: 1,
            tokens_per_step: 1,
            microbatches: 1,
            worker_steps: None,
        };
        status.note(&again);
        status.see(serving());
        assert_eq!(code("/readyz").await, 200);
        status.clear();
        assert_eq!(code("/readyz").await, 503);
    })
    .await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    with_server(|address, _| async move {
        let long = "x".repeat(HEAD_BYTES + 1);
        let answer = raw(address, &format!("GET / HTTP/1.1\r\nHost: a\r\nX: {long}\r\n\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
        let answer = get(address, &format!("/{long}")).await;
        assert!(!answer.contains(" 200 "), "{answer}");
        let many = "X: y\r\n".repeat(100);
        let answer = raw(address, &format!("GET / HTTP/1.1\r\nHost: a\r\n{many}\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    })
    .await;
}

#[tokio::test]
async fn a_foreign_host_name_is_refused() {
    with_server(|address, _| async move {
        let answer = raw(address, "GET /status HTTP/1.1\r\nHost: example.org\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 421 "), "{answer}");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_sends_its_head_slowly_is_disconnected() {
    with_server(|address, _| async move {
        let begun = Instant::now();
        let mut stream = connect(address).await;
        stream.write_all(b"GET /status HTTP/1.1\r\nHost: a\r\nX: ").await.expect("sent");
        let (mut reading, mut writing) = stream.split();
        let drip = async {
            loop {
                tokio::time::sleep(strict().head / 8).await;
                if writing.write_all(b"x").await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let mut bytes = Vec::new();
        tokio::select! {
            _ = reading.read_to_end(&mut bytes) => {}
            () = drip => {}
        }
        assert!(!String::from_utf8_lossy(&bytes).contains(" 200 "));
        let waited = begun.elapsed();
        assert!(waited < strict().whole, "{waited:?}");
    })
    .await;
}

#[tokio::test]
async fn silent_clients_give_way_to_a_probe() {
    with_server(|address, _| async move {
        let mut idle = Vec::new();
        for _ in 0..400 {
            let mut slow = connect(address).await;
            slow.write_all(b"GET / HTTP/1.1\r\nX: ").await.expect("sent");
            idle.push(slow);
        }
        let begun = Instant::now();
        let answer = get(address, "/livez").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(begun.elapsed() < strict().head, "{:?}", begun.elapsed());
        let mut cut_off = 0;
        for stream in &mut idle {
            let mut byte = [0];
            cut_off += usize::from(matches!(stream.try_read(&mut byte), Ok(0) | Err(_)));
        }
        assert!(cut_off > 0);
    })
    .await;
}

#[tokio::test]
async fn a_connection_has_one_answer() {
    with_server(|address, _| async move {
        let one = format!("GET /livez HTTP/1.1\r\nHost: {address}\r\n\r\n");
        let answer = raw(address, &format!("{one}{one}")).await;
        assert_eq!(answer.matches("HTTP/1.1 200 ").count(), 1, "{answer}");
    })
    .await;
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let held = HttpServer::bind(ANY_PORT.into()).await.expect("a free port");
    let address = held.address().expect("bound");
    let error = HttpServer::bind(address).await.expect_err("in use");
    assert_eq!(Exit::of(&error), Exit::Usage);
    let text = crate::exit::one_line(&error);
    assert!(text.contains(&address.to_string()) && text.contains("in use"), "{text}");
}
