//! One connection of whoever asks: one question, within limits.

use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// The most bytes of a question's head.
pub(super) const HEAD_BYTES: usize = 16 << 10;

/// The most lines of a question's head.
const HEAD_LINES: usize = 64;

/// How long what was asked before the node's end may still take.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How much of a node those who ask may take up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at once; more wait for the system to hand them over.
    pub(super) connections: usize,
    /// From the connection to the end of the question's head. Who is slower is cut off.
    pub(super) head: Duration,
    /// From the connection to the end of the answer. Who reads slower is cut off.
    pub(super) whole: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 64, head: Duration::from_secs(2), whole: Duration::from_secs(10) }
    }
}

/// Answers one question. A body that comes with it is not read.
pub(super) async fn answer(
    stream: TcpStream,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let stopped = async {
        stop.cancelled().await;
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        answered = tokio::time::timeout(limits.whole, connection) => match answered {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a question over HTTP had no answer"),
            Err(_) => tracing::debug!("an answer over HTTP was not read in time"),
        },
        () = stopped => {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn who_does_not_read_the_answer_is_cut_off() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let asked = async {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("sent");
            stream
        };
        let (accepted, asking) = tokio::join!(listener.accept(), asked);
        // More than the system keeps for who does not read.
        let router = Router::new().route("/", get(|| async { vec![0u8; 64 << 20] }));
        let limits = Limits { whole: Duration::from_millis(300), ..Limits::default() };
        let (stream, _) = accepted.expect("it came");
        let begun = tokio::time::Instant::now();
        answer(stream, router, limits, CancellationToken::new()).await;
        assert!(begun.elapsed() >= limits.whole, "it was not read");
        drop(asking);
    }
}
