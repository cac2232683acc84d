//! Checks the environment's settings of an object store before its client reads them: the client panics at some of
//! them, and at others fails with every request.

use std::ffi::{OsStr, OsString};

use super::url::Scheme;

/// Ends of names whose values are paths, names of profiles or JSON.
const FREE_TEXTS: [&str; 6] =
    ["_FILE", "_PATH", "_PROFILE", "_CREDENTIALS", "_SERVICE_ACCOUNT", "_SERVICE_ACCOUNT_KEY"];

/// Ends of names whose values are addresses of servers.
const ENDPOINTS: [&str; 5] =
    ["_ENDPOINT", "_ENDPOINT_URL", "_ENDPOINT_URL_S3", "_BASE_URL", "_AUTHORITY_HOST"];

/// Checks the variables of a store. The error names the variable and what to do, and never its value.
pub(super) fn check(
    scheme: Scheme,
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<(), String> {
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(scheme.variables())) else {
            continue;
        };
        if !FREE_TEXTS.iter().any(|end| name.ends_with(end)) {
            check_value(name, &value)?;
        }
    }
    Ok(())
}

fn check_value(name: &str, value: &OsStr) -> Result<(), String> {
    let text = value.to_str().ok_or_else(|| format!("{name} is no text"))?;
    if text.contains(['\n', '\r']) {
        return Err(format!(
            "{name} has a line break: remove it (as in {name}=\"$(cat FILE)\", which drops the last one)"
        ));
    }
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("{name} has a space or another character that no such setting has"));
    }
    let host = ["http://", "https://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    let is_address = host.is_some_and(|host| {
        host.starts_with(|first: char| first.is_alphanumeric() || first == '[')
    });
    if ENDPOINTS.iter().any(|end| name.ends_with(end)) && !text.is_empty() && !is_address {
        return Err(format!(
            "{name} is no address: write it with its scheme, as https://HOST or http://HOST:PORT"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    fn checked(scheme: Scheme, name: &str, value: &str) -> Result<(), String> {
        check(scheme, [(name.into(), value.into())].into_iter())
    }

    #[test]
    fn settings_that_the_client_cannot_use_are_named_without_their_values() {
        for (name, value, problem) in [
            ("AWS_SECRET_ACCESS_KEY", "secret\n", "line break"),
            ("AWS_ACCESS_KEY_ID", "sec ret", "space"),
            ("AWS_SESSION_TOKEN", "secr\u{e9}t", "another character"),
            ("AWS_REGION", "secret\r", "line break"),
            ("AWS_ENDPOINT_URL", "secret:9000", "scheme"),
            ("AWS_ENDPOINT", "ftp://secret", "scheme"),
            ("AWS_ENDPOINT_URL_S3", "http://", "scheme"),
            ("AWS_ENDPOINT_URL", "http:///secret", "scheme"),
        ] {
            let error = checked(Scheme::S3, name, value).expect_err(name);
            assert!(error.contains(name) && error.contains(problem), "{error}");
            assert!(!error.contains("secr"), "{error}");
        }
        let azure = checked(Scheme::Az, "AZURE_STORAGE_ENDPOINT", "localhost:10000");
        assert!(azure.is_err_and(|error| error.contains("AZURE_STORAGE_ENDPOINT")));
        let bytes = OsString::from_vec(vec![0xff]);
        assert!(check(Scheme::S3, [("AWS_REGION".into(), bytes)].into_iter()).is_err());
    }

    #[test]
    fn usable_settings_and_those_of_others_pass() {
        for (name, value) in [
            ("AWS_SECRET_ACCESS_KEY", "a/b+c="),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_ENDPOINT_URL", "https://[::1]:9000"),
            ("AWS_ENDPOINT_URL", ""),
            ("AWS_PROFILE", "my profile"),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/my files/token"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "not\nours"),
            ("HOME", "/my home\n"),
        ] {
            assert_eq!(checked(Scheme::S3, name, value), Ok(()), "{name}");
        }
        let json = checked(Scheme::Gs, "GOOGLE_SERVICE_ACCOUNT_KEY", "{\n}");
        assert_eq!(json, Ok(()));
    }
}
