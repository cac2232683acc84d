//! The kinds of rows, and their parsing.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use super::json::{Json, Object};
use super::{RawContent, RawRow, SourceError};

/// The kind of rows that sources are said to have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// The kind that the keys of the first row show.
    #[default]
    Auto,
    /// Rows with `text`.
    Text,
    /// Rows with `messages`.
    Chat,
    /// Rows with `prompt` and `completion`.
    Prompt,
}

impl Format {
    /// The kind of row; `None` if the first row decides.
    #[must_use]
    pub const fn kind(self) -> Option<RowKind> {
        match self {
            Self::Auto => None,
            Self::Text => Some(RowKind::Text),
            Self::Chat => Some(RowKind::Messages),
            Self::Prompt => Some(RowKind::Prompt),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::Chat => "chat",
            Self::Prompt => "prompt",
        })
    }
}

/// The error of a text that names no format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no format: use auto, text, chat or prompt")]
pub struct FormatError(String);

impl FromStr for Format {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let all = [Self::Auto, Self::Text, Self::Chat, Self::Prompt];
        let found = all.into_iter().find(|format| format.to_string() == text);
        found.ok_or_else(|| FormatError(text.to_owned()))
    }
}

/// The kind of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// A text.
    Text,
    /// A chat.
    Messages,
    /// A prompt and its completion.
    Prompt,
}

impl RowKind {
    /// The keys of such a row.
    #[must_use]
    pub const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Text => &["text"],
            Self::Messages => &["messages"],
            Self::Prompt => &["prompt", "completion"],
        }
    }

    /// The kind of a row with these keys.
    #[must_use]
    pub fn of_keys(keys: &[String]) -> Option<Self> {
        let has = |kind: &Self| kind.keys().iter().all(|key| keys.iter().any(|own| own == key));
        [Self::Messages, Self::Prompt, Self::Text].into_iter().find(has)
    }
}

/// The messages of a chat; each is an object with at least a `role`.
pub type Messages = Vec<Object>;

/// A parsed row.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A text, or one block of a long text.
    Text {
        /// The text.
        text: String,
        /// Whether the document begins here.
        starts: bool,
        /// Whether the document ends here.
        ends: bool,
    },
    /// A chat.
    Messages(Messages),
    /// A prompt and its completion.
    Prompt {
        /// Context only.
        prompt: String,
        /// The targets.
        completion: String,
    },
    /// The beginning of a chat and its completion.
    PromptMessages {
        /// Context only.
        prompt: Messages,
        /// The targets.
        completion: Messages,
    },
}

/// The keys of a row; others are passed over.
#[derive(Deserialize, Default)]
struct Columns {
    text: Option<Json>,
    messages: Option<Json>,
    prompt: Option<Json>,
    completion: Option<Json>,
}

/// The only key of a row of text. It avoids a copy of the others.
#[derive(Deserialize)]
struct TextColumn {
    text: Option<String>,
}

impl Row {
    /// Parses a row of the file at `path`.
    ///
    /// # Errors
    /// If it is not JSON, or has not the keys and types of its kind.
    pub fn parse(raw: RawRow, kind: RowKind, path: &Path) -> Result<Self, SourceError> {
        let RawRow { number, content } = raw;
        let json = |error: serde_json::Error| SourceError::Json {
            path: path.to_owned(),
            line: number,
            reason: format!("{error}; each line must be a JSON object"),
        };
        let columns = match content {
            RawContent::Block { text, starts, ends } => {
                return Ok(Self::Text { text, starts, ends });
            }
            RawContent::Line(line) => {
                if kind == RowKind::Text
                    && let Ok(TextColumn { text: Some(text) }) = serde_json::from_slice(&line)
                {
                    return Ok(Self::Text { text, starts: true, ends: true });
                }
                serde_json::from_slice(&line).map_err(json)?
            }
            RawContent::Columns(mut columns) => {
                columns.remove_nulls();
                Columns {
                    text: columns.remove("text"),
                    messages: columns.remove("messages"),
                    prompt: columns.remove("prompt"),
                    completion: columns.remove("completion"),
                }
            }
        };
        columns.into_row(kind, path, number)
    }

    /// Whether the row has nothing to learn from: a text of white space, a chat without messages,
    /// a prompt without a completion.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text { text, starts, ends } => text.trim().is_empty() && *starts && *ends,
            Self::Messages(messages) => messages.is_empty(),
            Self::Prompt { completion, .. } => completion.is_empty(),
            Self::PromptMessages { completion, .. } => completion.is_empty(),
        }
    }
}

impl Columns {
    fn into_row(self, kind: RowKind, path: &Path, row: u64) -> Result<Row, SourceError> {
        let wrong =
            |key, expected| SourceError::WrongType { path: path.to_owned(), row, key, expected };
        let text = |value: Option<Json>, key| match value {
            Some(Json::Text(text)) => Ok(text),
            Some(_) => Err(wrong(key, "a text")),
            None => Err(SourceError::NoKey { path: path.to_owned(), row, key }),
        };
        let messages = |value: Option<Json>, key| {
            let wrong = || wrong(key, "a list of objects with `role` and `content`");
            match value {
                Some(Json::List(list)) => {
                    list.into_iter().map(message).collect::<Option<Messages>>().ok_or_else(wrong)
                }
                Some(_) => Err(wrong()),
                None => Err(SourceError::NoKey { path: path.to_owned(), row, key }),
            }
        };
        match kind {
            RowKind::Text => {
                Ok(Row::Text { text: text(self.text, "text")?, starts: true, ends: true })
            }
            RowKind::Prompt if matches!(self.prompt, Some(Json::List(_))) => {
                Ok(Row::PromptMessages {
                    prompt: messages(self.prompt, "prompt")?,
                    completion: messages(self.completion, "completion")?,
                })
            }
            RowKind::Prompt => Ok(Row::Prompt {
                prompt: text(self.prompt, "prompt")?,
                completion: text(self.completion, "completion")?,
            }),
            RowKind::Messages => messages(self.messages, "messages").map(Row::Messages),
        }
    }
}

/// A message without the keys that are null; `None` if it has no role.
fn message(value: Json) -> Option<Object> {
    let Json::Object(mut message) = value else { return None };
    message.remove_nulls();
    message.get("role").is_some_and(|role| role.as_text().is_some()).then_some(message)
}
