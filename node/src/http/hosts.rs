//! The names by which a node may be asked.
//!
//! A page that a person has open can ask any address under a name of its own: it points the name at
//! this machine after it was loaded (DNS rebinding), and the browser takes the answer for the page's.
//! So an answer depends on the `Host` of the request.

use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN, REFERER, USER_AGENT};
use axum::http::{HeaderMap, HeaderName};

/// Routes of probes, which reveal nothing: every name gets an answer.
const PROBES: [&str; 2] = ["/livez", "/readyz"];
/// The route of Prometheus, which asks by the names of its list of peers.
const METRICS: &str = "/metrics";
/// Ends of names that no stranger can register. Docker, Kubernetes and local networks use them.
const PRIVATE: [&str; 6] = [".localhost", ".local", ".internal", ".home.arpa", ".svc", ".lan"];
/// Headers that browsers send. Some are sent over HTTPS only, and a page can leave others away.
const OF_BROWSERS: [HeaderName; 5] = [
    ORIGIN,
    REFERER,
    HeaderName::from_static("sec-fetch-site"),
    HeaderName::from_static("sec-fetch-mode"),
    HeaderName::from_static("accept-language"),
];

/// The names of a node.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    /// Whether only this machine can connect: then even names that no stranger can register are refused.
    pub(super) only_here: bool,
    /// The names that the operator allows.
    pub(super) allowed: Vec<String>,
}

impl Hosts {
    /// Checks a request.
    ///
    /// # Errors
    /// The name, if a stranger may have chosen it.
    pub(super) fn check<'a>(&self, path: &str, headers: &'a HeaderMap) -> Result<(), &'a str> {
        let Some(host) = headers.get(HOST) else { return Ok(()) };
        let Ok(host) = host.to_str() else { return Err("a name that is no text") };
        let name = name_of(host);
        if is_address(name) || self.allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
        {
            return Ok(());
        }
        let served = !self.only_here
            && (is_private(name)
                || PROBES.contains(&path)
                || path == METRICS && !is_browser(headers));
        if served { Ok(()) } else { Err(name) }
    }
}

/// A host without its port and the dot that ends a full name.
fn name_of(host: &str) -> &str {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}

/// Whether a name is an IP address or localhost.
fn is_address(name: &str) -> bool {
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

/// Whether no stranger can register a name: it has no dot, as those of containers, or a private end.
fn is_private(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    !name.is_empty() && (!name.contains('.') || PRIVATE.iter().any(|end| name.ends_with(end)))
}

fn is_browser(headers: &HeaderMap) -> bool {
    let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
    agent.is_some_and(|agent| agent.starts_with("Mozilla/"))
        || OF_BROWSERS.iter().any(|header| headers.contains_key(header))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(host: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static(host));
        headers
    }

    fn hosts(only_here: bool) -> Hosts {
        Hosts { only_here, allowed: vec!["shoal.example.org".to_owned()] }
    }

    #[test]
    fn foreign_names_are_refused() {
        let own = [
            "127.0.0.1:80",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "localhost:9",
            "LOCALHOST",
            "shoal.example.org",
            "Shoal.Example.org.:9464",
        ];
        let foreign =
            ["example.org", "example.org:80", "localhost.example.org", "", "127.0.0.1.x:1"];
        for only_here in [false, true] {
            for path in ["/", "/status"] {
                let is_served = |host| hosts(only_here).check(path, &headers(host)).is_ok();
                assert!(own.iter().all(|host| is_served(host)), "{only_here}");
                assert!(!foreign.iter().any(|host| is_served(host)), "{only_here}");
            }
        }
        assert!(hosts(true).check("/", &HeaderMap::new()).is_ok());
    }

    #[test]
    fn containers_and_prometheus_ask_by_name() {
        let open = hosts(false);
        for host in
            ["peer:9464", "shoal-1", "peer-0.shoal.default.svc.cluster.local:9464", "a.local"]
        {
            assert!(open.check("/status", &headers(host)).is_ok(), "{host}");
            assert!(hosts(true).check("/status", &headers(host)).is_err(), "{host}");
        }
        let mut scrape = headers("gpu1.example.org:9464");
        scrape.insert(USER_AGENT, HeaderValue::from_static("Prometheus/3.5.0"));
        assert!(open.check(METRICS, &scrape).is_ok());
        assert_eq!(open.check("/status", &scrape), Err("gpu1.example.org"));
        // A page that rebinds its name reads none of them but the probes, which have one word.
        for (header, value) in [
            (USER_AGENT, "Mozilla/5.0 (X11; Linux x86_64)"),
            (ORIGIN, "http://evil.example"),
            (HeaderName::from_static("sec-fetch-site"), "same-origin"),
            (HeaderName::from_static("accept-language"), "en"),
        ] {
            let mut browser = headers("evil.example:9464");
            browser.insert(header, HeaderValue::from_static(value));
            assert!(open.check(METRICS, &browser).is_err() && open.check("/", &browser).is_err());
            assert!(open.check("/livez", &browser).is_ok());
        }
    }
}
