//! Settings of the client, from the environment variables of the Hub's own tools.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;
use crate::origin::Origin;

/// The Hub that is used if `HF_ENDPOINT` names none.
pub(crate) const PUBLIC_ENDPOINT: &str = "https://huggingface.co";

/// The longest token, in bytes.
const LONGEST_TOKEN: u64 = 4096;

/// Settings of the client.
#[derive(Debug, Clone)]
pub struct HubConfig {
    /// The URL of the Hub, without a `/` at its end.
    pub endpoint: String,
    /// The access token; `None` reads public repositories only.
    pub token: Option<Token>,
    /// The folder of the cache, which has a folder for each repository.
    pub cache: PathBuf,
    /// Whether only the cache is read, without any request.
    pub offline: bool,
    /// Whether connections go through the proxy that `ALL_PROXY`, `HTTPS_PROXY` or `HTTP_PROXY`
    /// names, except for the hosts in `NO_PROXY`.
    pub use_proxy: bool,
    /// A PEM file of certificate authorities, which replaces the built-in ones.
    pub certificates: Option<PathBuf>,
    /// The ends of all waits.
    pub timeouts: Timeouts,
    /// Retries of failed requests.
    pub retry: RetryPolicy,
}

/// The ends of all waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Longest time to resolve a host and to connect, for each of the two.
    pub connect: Duration,
    /// Longest time from a request to the headers of its answer, and to the end of an answer that
    /// is no file.
    pub response: Duration,
    /// Longest time without progress of a file.
    pub stall: Duration,
    /// Longest time to wait for another process that uses the same repository in the cache.
    pub lock: Duration,
}

/// Retries of failed requests: their number and the pauses between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Failures in a row after which a request fails.
    pub attempts: u32,
    /// Pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// The longest pause that a server can ask for with `Retry-After`.
    pub longest_retry_after: Duration,
}

/// An access token, which no debug output shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token of this text, without the space around it.
    ///
    /// # Errors
    /// If it is empty, too long or has characters that no header can carry.
    pub fn new(text: &str) -> Result<Self, HubError> {
        let text = text.trim();
        let fits = !text.is_empty() && text.len() as u64 <= LONGEST_TOKEN;
        if !fits || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(HubError::BadToken);
        }
        Ok(Self(text.to_owned()))
    }

    /// The value of the `Authorization` header.
    pub(crate) fn authorization(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(...)")
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            response: Duration::from_secs(120),
            stall: Duration::from_secs(120),
            lock: Duration::from_secs(3600),
        }
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(30),
            longest_retry_after: Duration::from_secs(300),
        }
    }
}

impl HubConfig {
    /// Settings for this endpoint and cache, with neither a token nor a proxy.
    ///
    /// # Errors
    /// If the endpoint is no URL.
    pub fn new(endpoint: &str, cache: &Path) -> Result<Self, HubError> {
        let endpoint = endpoint.trim_end_matches('/');
        if Origin::of(endpoint).is_none() || endpoint.contains(['?', '#']) {
            return Err(HubError::BadEndpoint { endpoint: endpoint.to_owned() });
        }
        Ok(Self {
            endpoint: endpoint.to_owned(),
            token: None,
            cache: cache.to_owned(),
            offline: false,
            use_proxy: false,
            certificates: None,
            timeouts: Timeouts::default(),
            retry: RetryPolicy::default(),
        })
    }

    /// Settings from the environment variables `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `SSL_CERT_FILE` and those of proxies.
    ///
    /// # Errors
    /// If a value is not usable, the token file cannot be read, or there is no home folder.
    pub fn from_environment() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Settings from variables that `read` looks up by their names.
    ///
    /// # Errors
    /// As [`HubConfig::from_environment`].
    pub fn from_variables(read: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let variable = |name: &str| read(name).filter(|value| !value.trim().is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let path = |text: String| expand(&text, home.as_deref());
        let cache_home = variable("XDG_CACHE_HOME")
            .map(path)
            .or_else(|| home.as_ref().map(|home| home.join(".cache")));
        let hub_home = variable("HF_HOME")
            .map(path)
            .or_else(|| cache_home.map(|folder| folder.join("huggingface")));
        let below_home = |name: &str| hub_home.as_ref().map(|folder| folder.join(name));
        let cache = variable("HF_HUB_CACHE")
            .or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
            .map(path)
            .or_else(|| below_home("hub"))
            .ok_or(HubError::NoCache)?;

        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_ENDPOINT.to_owned());
        let mut config = Self::new(&endpoint, &cache)?;
        config.token = match variable("HF_TOKEN") {
            Some(token) => Some(Token::new(&token)?),
            None => variable("HF_TOKEN_PATH")
                .map(path)
                .or_else(|| below_home("token"))
                .map_or(Ok(None), |file| read_token(&file))?,
        };
        config.offline = variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value));
        config.use_proxy = true;
        config.certificates = variable("SSL_CERT_FILE").map(path);
        Ok(config)
    }
}

/// The token in a file, if the file exists and is not empty.
fn read_token(file: &Path) -> Result<Option<Token>, HubError> {
    let mut text = String::new();
    let read = File::open(file)
        .and_then(|opened| opened.take(LONGEST_TOKEN + 2).read_to_string(&mut text));
    match read {
        Ok(_) if text.trim().is_empty() => Ok(None),
        Ok(_) => Token::new(&text).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(HubError::io(file)(error)),
    }
}

/// The path, with `~` at its start replaced by the home folder.
fn expand(text: &str, home: Option<&Path>) -> PathBuf {
    match (text.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => {
            home.join(rest.trim_start_matches('/'))
        }
        _ => PathBuf::from(text),
    }
}

/// Whether the Hub's own tools read the value as true.
fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&value.trim().to_uppercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<HubConfig, HubError> {
        HubConfig::from_variables(|name| {
            let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
            Some((*value).to_owned())
        })
    }

    #[test]
    fn the_defaults_are_those_of_the_hubs_own_tools() {
        let config = config(&[("HOME", "/no/such/home")]).expect("valid");
        assert_eq!(config.endpoint, "https://huggingface.co");
        assert_eq!(config.cache, Path::new("/no/such/home/.cache/huggingface/hub"));
        assert_eq!(config.token, None);
        assert!(!config.offline);
    }

    #[test]
    fn variables_replace_the_defaults() {
        let config = config(&[
            ("HOME", "/home/me"),
            ("HF_ENDPOINT", "http://localhost:8080/"),
            ("HF_HOME", "~/hf"),
            ("HF_TOKEN", " hf_secret\n"),
            ("HF_HUB_OFFLINE", "yes"),
            ("SSL_CERT_FILE", "/etc/ssl/ca.pem"),
        ])
        .expect("valid");
        assert_eq!(config.endpoint, "http://localhost:8080");
        assert_eq!(config.cache, Path::new("/home/me/hf/hub"));
        assert_eq!(config.token, Some(Token("hf_secret".to_owned())));
        assert!(config.offline);
        assert_eq!(config.certificates.as_deref(), Some(Path::new("/etc/ssl/ca.pem")));
        assert!(!format!("{config:?}").contains("secret"));
    }

    #[test]
    fn the_token_file_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = folder.path().to_str().expect("a path");
        assert_eq!(config(&[("HF_HOME", home)]).expect("valid").token, None);
        std::fs::write(folder.path().join("token"), "hf_file\n").expect("written");
        let read = config(&[("HF_HOME", home), ("HF_HUB_CACHE", "/cache")]).expect("valid");
        assert_eq!(read.token, Some(Token("hf_file".to_owned())));
        assert_eq!(read.cache, Path::new("/cache"));
        std::fs::write(folder.path().join("token"), "two words").expect("written");
        assert!(matches!(config(&[("HF_HOME", home)]), Err(HubError::BadToken)));
    }

    #[test]
    fn values_that_are_not_usable_are_refused() {
        assert!(matches!(config(&[]), Err(HubError::NoCache)));
        for endpoint in ["huggingface.co", "ftp://host", "https://", "https://host/?x"] {
            let refused = config(&[("HOME", "/"), ("HF_ENDPOINT", endpoint)]);
            assert!(matches!(refused, Err(HubError::BadEndpoint { .. })), "{endpoint}");
        }
        let refused = config(&[("HOME", "/"), ("HF_TOKEN", "a\nb")]);
        assert!(matches!(refused, Err(HubError::BadToken)));
    }
}
