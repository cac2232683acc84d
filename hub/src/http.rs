//! Requests over HTTP, with redirects, retries and the boundary of the token.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::aws_lc_rs;
use ureq::http::{self, HeaderMap};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy, SendBody};

use crate::config::{HubConfig, Timeouts};
use crate::error::{HubError, printable};
use crate::origin::{Origin, join, shown};
use crate::refusal::{self, Subject};
use crate::retry::{Failure, Retry};

/// Redirects of one request that are followed.
const REDIRECTS: usize = 5;

/// The longest file of certificate authorities, in bytes.
const LONGEST_CERTIFICATES: u64 = 8 << 20;

/// The client of HTTP.
#[derive(Debug)]
pub(crate) struct Http {
    agent: Agent,
    config: HubConfig,
    home: Option<Origin>,
}

/// The method of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Post,
    Put,
}

/// The body of a request, which can be sent again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Payload<'a> {
    /// No body.
    None,
    /// Bytes in memory.
    Bytes(&'a [u8]),
    /// A part of a file.
    File {
        /// The file.
        path: &'a Path,
        /// Where the part begins.
        start: u64,
        /// Length of the part.
        length: u64,
    },
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// The method.
    pub(crate) method: Method,
    /// The URL.
    pub(crate) url: String,
    /// Headers besides those of the connection and the token.
    pub(crate) headers: Vec<(String, String)>,
    /// The body.
    pub(crate) payload: Payload<'a>,
    /// Whether the endpoint receives the token; other hosts never do.
    pub(crate) with_token: bool,
}

impl<'a> Request<'a> {
    /// A request of the Hub, with the token if there is one.
    pub(crate) fn new(method: Method, url: String, payload: Payload<'a>) -> Self {
        Self { method, url, headers: Vec::new(), payload, with_token: true }
    }

    /// The same request with a further header.
    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

/// An answer whose body is not read yet.
#[derive(Debug)]
pub(crate) struct Response {
    url: String,
    status: u16,
    headers: HeaderMap,
    body: Body,
    longest: Duration,
}

impl Response {
    /// The HTTP status.
    pub(crate) fn status(&self) -> u16 {
        self.status
    }

    /// The URL that has answered, after redirects and without its query.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The value of a header, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The length of the body, if it is announced.
    pub(crate) fn length(&self) -> Option<u64> {
        self.body.content_length()
    }

    /// The body.
    pub(crate) fn into_reader(self) -> impl Read {
        self.body.into_with_config().limit(u64::MAX).reader()
    }

    /// The start of the body, as far as it arrives.
    pub(crate) fn read_start(&mut self, cap: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let limited = self.body.with_config().limit(cap.saturating_add(1)).reader();
        // A message that breaks off is still a message.
        let _ = read_until(&mut limited.take(cap), &mut bytes, self.longest);
        bytes
    }

    /// The whole body, of at most `cap` bytes.
    pub(crate) fn read(self, cap: u64) -> Result<Vec<u8>, Failure> {
        let url = self.url;
        if self.body.content_length().is_some_and(|length| length > cap) {
            return Err(HubError::TooLong { url, cap }.into());
        }
        let mut bytes = Vec::new();
        let mut reader = self.body.into_with_config().limit(u64::MAX).reader().take(cap + 1);
        read_until(&mut reader, &mut bytes, self.longest)
            .map_err(|error| Failure::Lost { url: url.clone(), reason: error.to_string() })?;
        if bytes.len() as u64 > cap {
            return Err(HubError::TooLong { url, cap }.into());
        }
        Ok(bytes)
    }
}

/// Reads all, if that takes no longer than `longest`.
fn read_until(reader: &mut impl Read, bytes: &mut Vec<u8>, longest: Duration) -> io::Result<()> {
    let start = Instant::now();
    let mut buffer = [0; 16 << 10];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
        if start.elapsed() > longest {
            return Err(io::Error::new(ErrorKind::TimedOut, "the answer takes too long"));
        }
    }
}

/// Counts the bytes that are read.
struct Counted<'a, R> {
    reader: R,
    count: u64,
    report: &'a mut dyn FnMut(u64),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.count += read as u64;
        (self.report)(self.count);
        Ok(read)
    }
}

impl Http {
    /// A client with these settings.
    ///
    /// # Errors
    /// If the certificates cannot be read.
    pub(crate) fn new(config: HubConfig) -> Result<Self, HubError> {
        let Timeouts { connect, response, stall, .. } = config.timeouts;
        let proxy = if config.use_proxy { Proxy::try_from_env() } else { None };
        let roots = match &config.certificates {
            Some(path) => certificates(path)?,
            None => RootCerts::WebPki,
        };
        let tls = TlsConfig::builder()
            .root_certs(roots)
            .unversioned_rustls_crypto_provider(Arc::new(aws_lc_rs::default_provider()))
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .proxy(proxy)
            .user_agent(concat!("shoal/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(connect))
            .timeout_connect(Some(connect))
            .timeout_send_request(Some(response))
            .timeout_recv_response(Some(response))
            .timeout_per_read(Some(stall))
            .timeout_per_write(Some(stall))
            .build()
            .new_agent();
        let home = Origin::of(&config.endpoint);
        Ok(Self { agent, config, home })
    }

    /// The settings.
    pub(crate) fn config(&self) -> &HubConfig {
        &self.config
    }

    /// The retries of a new request.
    pub(crate) fn retry(&self) -> Retry {
        Retry::new(self.config.retry)
    }

    /// Whether the URL has the origin of the endpoint.
    pub(crate) fn is_home(&self, url: &str) -> bool {
        self.home.is_some() && Origin::of(url) == self.home
    }

    /// Sends a request, with retries, and reads an answer of at most `cap` bytes.
    pub(crate) fn call(
        &self,
        request: &Request<'_>,
        subject: Subject<'_>,
        cap: u64,
        report: &mut dyn FnMut(u64),
    ) -> Result<(HeaderMap, Vec<u8>), HubError> {
        let mut retry = self.retry();
        loop {
            let answer = self.send(request, subject, report).and_then(|response| {
                let headers = response.headers.clone();
                Ok((headers, response.read(cap)?))
            });
            match answer {
                Ok(answer) => return Ok(answer),
                Err(failure) => retry.pause(failure)?,
            }
        }
    }

    /// Sends a request once and follows its redirects, to an answer of success.
    pub(crate) fn send(
        &self,
        request: &Request<'_>,
        subject: Subject<'_>,
        report: &mut dyn FnMut(u64),
    ) -> Result<Response, Failure> {
        let mut url = request.url.clone();
        for _ in 0..=REDIRECTS {
            let with_token = request.with_token && self.is_home(&url);
            let response = self.send_to(&url, request, with_token, report)?;
            match response.status {
                200..=299 => return Ok(response),
                301 | 302 | 303 | 307 | 308 => {
                    url = redirect(&url, request.method, &response)?;
                }
                416 if request.headers.iter().any(|(name, _)| name == "range") => {
                    return Ok(response);
                }
                429 => {
                    let seconds = response.header("retry-after").and_then(|text| text.parse().ok());
                    let retry_after = seconds.map(Duration::from_secs);
                    return Err(Failure::Limited { url: shown(&url).to_owned(), retry_after });
                }
                status @ (408 | 500..=599) => {
                    return Err(Failure::Server { url: shown(&url).to_owned(), status });
                }
                _ => {
                    let with_token = with_token && self.config.token.is_some();
                    let endpoint = &self.config.endpoint;
                    // Only the endpoint knows about repositories and tokens.
                    let subject = if self.is_home(&url) { subject } else { subject.plain() };
                    return Err(refusal::error(response, subject, endpoint, with_token).into());
                }
            }
        }
        let location = printable(shown(&url));
        Err(HubError::Redirect { url: shown(&request.url).to_owned(), location }.into())
    }

    fn send_to(
        &self,
        url: &str,
        request: &Request<'_>,
        with_token: bool,
        report: &mut dyn FnMut(u64),
    ) -> Result<Response, Failure> {
        let mut builder = http::Request::builder().uri(url).method(match request.method {
            Method::Get => "GET",
            Method::Post => "POST",
            Method::Put => "PUT",
        });
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if let Some(token) = self.config.token.as_ref().filter(|_| with_token) {
            builder = builder.header("authorization", token.authorization());
        }
        let malformed = |error: http::Error| Failure::from(HubError::malformed(url, error));
        let answer = match request.payload {
            Payload::None => self.agent.run(builder.body(()).map_err(malformed)?),
            Payload::Bytes(bytes) => self.agent.run(builder.body(bytes).map_err(malformed)?),
            Payload::File { path, start, length } => {
                let mut file = File::open(path).map_err(HubError::io(path))?;
                file.seek(SeekFrom::Start(start)).map_err(HubError::io(path))?;
                let mut reader = Counted { reader: file.take(length), count: 0, report };
                let body = SendBody::from_reader(&mut reader);
                let builder = builder.header("content-length", length);
                self.agent.run(builder.body(body).map_err(malformed)?)
            }
        };
        let (parts, body) = answer.map_err(|error| failure(url, error))?.into_parts();
        Ok(Response {
            url: shown(url).to_owned(),
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
            longest: self.config.timeouts.response,
        })
    }
}

/// The URL to which an answer redirects, if it is followed.
fn redirect(url: &str, method: Method, response: &Response) -> Result<String, HubError> {
    let location = response.header("location").unwrap_or_default();
    let keeps_method = method == Method::Get || matches!(response.status, 307 | 308);
    let followed = join(url, location).filter(|target| {
        let safe = match (Origin::of(url), Origin::of(target)) {
            (Some(from), Some(to)) => from.may_lead_to(&to),
            _ => false,
        };
        safe && keeps_method
    });
    followed
        .ok_or_else(|| HubError::Redirect { url: url.to_owned(), location: printable(location) })
}

/// The failure that an error of the library stands for.
fn failure(url: &str, error: ureq::Error) -> Failure {
    let text = error.to_string();
    let owned = shown(url).to_owned();
    let host = || Origin::of(url).map_or_else(|| url.to_owned(), |origin| origin.host().to_owned());
    match error {
        ureq::Error::HostNotFound => HubError::NoSuchHost { host: host() }.into(),
        // The standard library has no kind for this error.
        ureq::Error::Io(error) if error.to_string().contains("failed to lookup address") => {
            HubError::NoSuchHost { host: host() }.into()
        }
        ureq::Error::Io(error) if error.kind() == ErrorKind::InvalidData => {
            HubError::Untrusted { url: owned, reason: error.to_string() }.into()
        }
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => {
            HubError::Untrusted { url: owned, reason: text }.into()
        }
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::LargeResponseHeader(..) => {
            HubError::malformed(url, text).into()
        }
        _ => Failure::Lost { url: owned, reason: text },
    }
}

/// The certificate authorities in a PEM file.
fn certificates(path: &PathBuf) -> Result<RootCerts, HubError> {
    let unusable =
        |reason: String| HubError::Certificates { path: path.clone(), reason: printable(&reason) };
    let mut pem = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LONGEST_CERTIFICATES).read_to_end(&mut pem))
        .map_err(|error| unusable(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(unusable(error.to_string())),
        }
    }
    if found.is_empty() {
        return Err(unusable("it has no certificate".to_owned()));
    }
    Ok(RootCerts::new_with_certs(&found))
}
