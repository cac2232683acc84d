//! Origins of URLs: the boundary that a token never crosses.

use ureq::http::Uri;

/// Scheme, host and port of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    secure: bool,
    host: String,
    port: u16,
}

impl Origin {
    /// The origin of an `http` or `https` URL without a user name.
    pub(crate) fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        let secure = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return None;
        }
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        Some(Self { secure, host: authority.host().to_ascii_lowercase(), port })
    }

    /// The host.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Whether a redirect to the other origin keeps the encryption that this one has.
    pub(crate) fn may_lead_to(&self, other: &Self) -> bool {
        other.secure || !self.secure
    }
}

/// The URL without its query, which may have a signature: for messages.
pub(crate) fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or(url)
}

/// The URL that a `Location` header names, relative to the URL of the request.
pub(crate) fn join(base: &str, location: &str) -> Option<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Origin::of(location).map(|_| location.to_owned());
    }
    let scheme = base.split_once("://")?.0;
    let joined = if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else {
        let rest = location.strip_prefix('/')?;
        let after = &base[scheme.len() + 3..];
        let authority = after.split(['/', '?', '#']).next()?;
        format!("{scheme}://{authority}/{rest}")
    };
    Origin::of(&joined).map(|_| joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_ports_and_upper_case_make_no_difference() {
        assert_eq!(Origin::of("https://Hub.example/a"), Origin::of("https://hub.example:443"));
        assert_ne!(Origin::of("http://hub.example"), Origin::of("https://hub.example"));
        assert_ne!(Origin::of("https://hub.example"), Origin::of("https://hub.example.org"));
        assert_ne!(Origin::of("https://hub.example"), Origin::of("https://hub.example:444"));
        for url in ["https://me@hub.example", "/path", "file:///x", "https://", ""] {
            assert_eq!(Origin::of(url), None, "{url}");
        }
    }

    #[test]
    fn locations_are_joined() {
        let base = "https://hub.example:8/a/b?c";
        let joined = |location| join(base, location);
        assert_eq!(joined("/x?y").as_deref(), Some("https://hub.example:8/x?y"));
        assert_eq!(joined("//cdn.example/x").as_deref(), Some("https://cdn.example/x"));
        assert_eq!(joined("http://cdn.example/x").as_deref(), Some("http://cdn.example/x"));
        for location in ["", "x", "ftp://cdn.example/x", "https://a b/"] {
            assert_eq!(joined(location), None, "{location}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_location_is_joined_to_a_url_or_refused(location in "[/:?#@a.é%\\[\\] ]{0,20}|.{0,20}") {
            if let Some(joined) = join("https://hub.example/a", &location) {
                assert!(Origin::of(&joined).is_some());
                assert!(joined.starts_with(shown(&joined)));
            }
        }
    }

    #[test]
    fn a_redirect_never_gives_up_encryption() {
        let origin = |url| Origin::of(url).expect("an origin");
        assert!(!origin("https://a").may_lead_to(&origin("http://a")));
        assert!(origin("https://a").may_lead_to(&origin("https://b")));
        assert!(origin("http://a").may_lead_to(&origin("http://b")));
    }
}
