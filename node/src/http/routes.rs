//! The routes of the HTTP server.

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};
use shoal_metrics::{Metrics, Severity};

use super::Shown;
use super::hosts::Hosts;
use crate::logging;
use crate::terminal::visible;

/// The web page: one file that loads nothing from elsewhere.
const PAGE: &str = include_str!("page.html");

/// The page's content security policy: a browser runs only the page's own script and style, named
/// by their hashes, and connects only to this node.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |open, close| BASE64_STANDARD.encode(Sha256::digest(between(PAGE, open, close)));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash("<script>", "</script>"),
        hash("<style>", "</style>"),
    );
    HeaderValue::from_str(&policy).expect("base64 is plain text")
});

/// Most characters of a refused name that the answer shows.
const HOST_SHOWN: usize = 100;

/// All routes. Requests with a foreign `Host` are refused, so that a foreign page cannot read this node
/// by DNS rebinding.
pub(super) fn router(shown: Shown, hosts: Hosts) -> Router {
    let router = Router::new()
        .route("/", get(page))
        .route("/status", get(status))
        .route("/metrics", get(exposition))
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .with_state(shown);
    let refusal = middleware::from_fn_with_state(Arc::new(hosts), refuse_names);
    router.layer(refusal).layer(middleware::map_response(harden))
}

async fn page() -> Response {
    let headers: [(HeaderName, HeaderValue); 2] = [
        (CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (CONTENT_SECURITY_POLICY, POLICY.clone()),
    ];
    (headers, PAGE).into_response()
}

async fn status(State(shown): State<Shown>) -> Response {
    match shown.status.status().to_json() {
        Ok(text) => ([(CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn exposition(State(shown): State<Shown>) -> Response {
    shown.machine.update(&shown.metrics.machine);
    count_logged(&shown.metrics);
    match shown.metrics.encode() {
        Ok(text) => ([(CONTENT_TYPE, Metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Sets the counters of logged warnings and errors, which the logger counts for the whole process.
fn count_logged(metrics: &Metrics) {
    let (warnings, errors) = logging::counted();
    for (severity, count) in [(Severity::Warning, warnings), (Severity::Error, errors)] {
        let counter = metrics.node.logged.of(severity);
        counter.inc_by(count.saturating_sub(counter.get()));
    }
}

/// The states of a node's health: live or not, ready or not.
pub(crate) const STATES: [&str; 4] = ["live", "stalled", "ready", "not ready"];

async fn live(State(shown): State<Shown>) -> Response {
    health(shown.status.health().live, STATES[0], STATES[1])
}

async fn ready(State(shown): State<Shown>) -> Response {
    health(shown.status.health().ready, STATES[2], STATES[3])
}

fn health(good: bool, yes: &'static str, no: &'static str) -> Response {
    let (code, text) =
        if good { (StatusCode::OK, yes) } else { (StatusCode::SERVICE_UNAVAILABLE, no) };
    (code, format!("{text}\n")).into_response()
}

/// Forbids caches, content sniffing and referrers.
async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

async fn refuse_names(State(hosts): State<Arc<Hosts>>, request: Request, next: Next) -> Response {
    let refused = match hosts.check(request.uri().path(), request.headers()) {
        Ok(()) => None,
        Err(name) => Some(name.chars().take(HOST_SHOWN).collect::<String>()),
    };
    match refused {
        None => next.run(request).await,
        Some(name) => {
            let name = visible(&name).into_owned();
            let text = format!(
                "this node does not answer to {name:?}, which may be a page's own name for it: use its IP address, \
                 or start the peer with --http-host NAME\n"
            );
            (StatusCode::MISDIRECTED_REQUEST, text).into_response()
        }
    }
}

/// The text between two markers.
fn between<'a>(text: &'a str, open: &str, close: &str) -> &'a str {
    let (_, rest) = text.split_once(open).expect("the page has such a part");
    let (inner, _) = rest.split_once(close).expect("the part has an end");
    inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_loads_nothing_from_elsewhere() {
        assert_eq!(PAGE.matches("<script").count(), 1);
        assert_eq!(PAGE.matches("<style").count(), 1);
        let policy = POLICY.to_str().expect("text");
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        // Data from peers is inserted as text, never as HTML.
        for unsafe_call in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
        {
            assert!(!PAGE.contains(unsafe_call), "{unsafe_call}");
        }
        let elsewhere = PAGE.replace("http://www.w3.org/2000/svg", "");
        for scheme in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!elsewhere.contains(scheme), "{scheme}");
        }
    }
}
