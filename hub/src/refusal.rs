//! The meaning of a status that refuses a request.

use serde::Deserialize;

use crate::error::{HubError, printable};
use crate::http::Response;
use crate::reference::Repository;

/// The longest message of a server that is read, in bytes.
const LONGEST_MESSAGE: u64 = 16 << 10;

/// What a request is about, which an error names.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject<'a> {
    /// A repository.
    Repository(&'a Repository),
    /// A revision of a repository.
    Revision(&'a Repository, &'a str),
    /// A file of a repository.
    File(&'a Repository, &'a str),
    /// A file of a mirror or a storage, by its name in messages.
    Plain(&'a str),
}

impl<'a> Subject<'a> {
    /// The same, for a host other than the endpoint.
    pub(crate) fn plain(self) -> Self {
        match self {
            Self::File(_, file) => Self::Plain(file),
            Self::Revision(_, name) => Self::Plain(name),
            Self::Repository(repository) => Self::Plain(repository.name()),
            Self::Plain(file) => Self::Plain(file),
        }
    }

    fn repository(self) -> Option<&'a Repository> {
        match self {
            Self::Repository(repository)
            | Self::Revision(repository, _)
            | Self::File(repository, _) => Some(repository),
            Self::Plain(_) => None,
        }
    }
}

/// The message in the body of a refusal.
#[derive(Deserialize)]
struct Message {
    error: String,
}

/// The error that a status stands for.
pub(crate) fn error(
    mut response: Response,
    subject: Subject<'_>,
    endpoint: &str,
    with_token: bool,
) -> HubError {
    let status = response.status();
    let url = response.url().to_owned();
    let code = response.header("x-error-code").unwrap_or_default().to_owned();
    let header = response.header("x-error-message").map(str::to_owned);
    let reason = header.or_else(|| {
        let body = response.read_start(LONGEST_MESSAGE);
        let parsed = serde_json::from_slice::<Message>(&body).map(|message| message.error);
        parsed.ok().or_else(|| String::from_utf8(body).ok().filter(|text| !text.is_empty()))
    });
    let reason = printable(reason.as_deref().unwrap_or("no reason is given"));
    let Some(named) = subject.repository() else {
        return match subject {
            Subject::Plain(file) if status == 404 || status == 410 => {
                HubError::NoSuchFile { file: file.to_owned(), url }
            }
            _ => HubError::Refused { url, status, reason },
        };
    };
    let repository = named.to_string();
    let page = format!("{endpoint}/{named}");
    match (status, code.as_str()) {
        (401 | 403, "GatedRepo") => HubError::Gated { repository, url: page },
        (401, _) if !with_token => HubError::NeedsToken { repository },
        (401, "RepoNotFound") => HubError::NoSuchRepository { repository, url: page },
        (401, _) => HubError::InvalidToken { repository },
        (403, _) => HubError::Forbidden { repository, reason },
        (404, _) => missing(&code, subject, named, page, url),
        (412, _) => HubError::Conflict { repository, url: page },
        _ => HubError::Refused { url, status, reason },
    }
}

/// What is missing: as the server's code says, else what the request is about.
fn missing(
    code: &str,
    subject: Subject<'_>,
    repository: &Repository,
    page: String,
    url: String,
) -> HubError {
    let missing_revision = |revision: &str| HubError::NoSuchRevision {
        repository: repository.to_string(),
        revision: revision.to_owned(),
        url: format!("{page}/tree/main"),
    };
    match (code, subject) {
        ("RepoNotFound", _) => {
            HubError::NoSuchRepository { repository: repository.to_string(), url: page }
        }
        (_, Subject::Revision(_, revision)) => missing_revision(revision),
        (_, Subject::File(_, file)) => HubError::NoSuchFile { file: file.to_owned(), url },
        _ => HubError::NoSuchRepository { repository: repository.to_string(), url: page },
    }
}
