//! The kinds of rows, and their parsing.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use super::dialect::{self, Instruction};
use super::json::{Json, Object};
use super::pair::{split_chats, split_texts};
use super::python;
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
    /// Rows with `chosen` and `rejected`, and perhaps `prompt`.
    Preference,
    /// Rows with `conversations` of `from` and `value`.
    ShareGpt,
    /// Rows with `instruction`, `input` and `output`.
    Alpaca,
}

impl Format {
    const ALL: [Self; 7] = [
        Self::Auto,
        Self::Text,
        Self::Chat,
        Self::Prompt,
        Self::Preference,
        Self::ShareGpt,
        Self::Alpaca,
    ];

    /// The kind of row; `None` if the first row decides.
    #[must_use]
    pub const fn kind(self) -> Option<RowKind> {
        match self {
            Self::Auto => None,
            Self::Text => Some(RowKind::Text),
            Self::Chat => Some(RowKind::Messages),
            Self::Prompt => Some(RowKind::Prompt),
            Self::Preference => Some(RowKind::Pair),
            Self::ShareGpt => Some(RowKind::Conversations),
            Self::Alpaca => Some(RowKind::Instruction),
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
            Self::Preference => "preference",
            Self::ShareGpt => "sharegpt",
            Self::Alpaca => "alpaca",
        })
    }
}

/// The error of a text that names no format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no format: use auto, text, chat, prompt, preference, sharegpt or alpaca")]
pub struct FormatError(String);

impl FromStr for Format {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == text);
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
    /// A prompt with a chosen and a rejected completion.
    Pair,
    /// A chat in ShareGPT's spelling.
    Conversations,
    /// An instruction and its answer, as Alpaca has them.
    Instruction,
}

impl RowKind {
    /// The format of such rows.
    #[must_use]
    pub const fn format(self) -> Format {
        match self {
            Self::Text => Format::Text,
            Self::Messages => Format::Chat,
            Self::Prompt => Format::Prompt,
            Self::Pair => Format::Preference,
            Self::Conversations => Format::ShareGpt,
            Self::Instruction => Format::Alpaca,
        }
    }

    /// The keys of such a row.
    #[must_use]
    pub const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Text => &["text"],
            Self::Messages => &["messages"],
            Self::Prompt => &["prompt", "completion"],
            Self::Pair => &["chosen", "rejected"],
            Self::Conversations => &["conversations"],
            Self::Instruction => &["instruction", "output"],
        }
    }

    /// Further keys that such a row may have and that count, those that are refused included.
    #[must_use]
    pub fn further_keys(self) -> Vec<&'static str> {
        let own: &[&str] = match self {
            Self::Text => return Vec::new(),
            Self::Messages | Self::Prompt => &[],
            Self::Pair => &["prompt"],
            Self::Conversations => &["system"],
            Self::Instruction => &["input", "system", "history"],
        };
        own.iter().copied().chain(ARGUMENTS).chain(REFUSED).collect()
    }

    /// The kind of a row with these keys.
    #[must_use]
    pub fn of_keys(keys: &[String]) -> Option<Self> {
        let has = |kind: &Self| kind.keys().iter().all(|key| keys.iter().any(|own| own == key));
        let kinds = [
            Self::Pair,
            Self::Messages,
            Self::Prompt,
            Self::Conversations,
            Self::Instruction,
            Self::Text,
        ];
        kinds.into_iter().find(has)
    }
}

/// The messages of a chat; each is an object with at least a `role`.
pub type Messages = Vec<Object>;

/// What a row of a chat gives its template besides the messages.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments {
    /// The value of `tools`: null, or the functions that the assistant may call.
    pub tools: Json,
    /// The values of `chat_template_kwargs`.
    pub others: Object,
}

/// Columns that models of other kinds are trained on. What they say cannot be left out in silence.
const REFUSED: [&str; 8] =
    ["images", "image", "videos", "video", "audios", "audio", "functions", "documents"];

/// Columns that chats have besides their own keys.
const ARGUMENTS: [&str; 2] = ["tools", "chat_template_kwargs"];

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
    Messages {
        /// The messages.
        messages: Messages,
        /// What else the template sees.
        arguments: Arguments,
    },
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
        /// What else the template sees.
        arguments: Arguments,
    },
    /// Two rows of the kinds above with the same prompt: the one with the chosen completion, and the one with the
    /// rejected completion.
    Pair(Box<[Self; 2]>),
}

/// The keys of a row; others are passed over.
#[derive(Deserialize, Default)]
struct Columns {
    text: Option<Json>,
    messages: Option<Json>,
    prompt: Option<Json>,
    completion: Option<Json>,
    chosen: Option<Json>,
    rejected: Option<Json>,
    conversations: Option<Json>,
    instruction: Option<Json>,
    input: Option<Json>,
    output: Option<Json>,
    system: Option<Json>,
    history: Option<Json>,
    tools: Option<Json>,
    chat_template_kwargs: Option<Json>,
    images: Option<Presence>,
    image: Option<Presence>,
    videos: Option<Presence>,
    video: Option<Presence>,
    audios: Option<Presence>,
    audio: Option<Presence>,
    functions: Option<Presence>,
    documents: Option<Presence>,
}

/// Whether a value says anything: it is neither null nor an empty text, list or object.
struct Presence(bool);

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Json::deserialize(deserializer).map(|value| Self(!value.is_empty()))
    }
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
                parse_line(&line).map_err(json)?
            }
            RawContent::Columns(columns) => Columns::of(columns),
        };
        columns.into_row(kind, path, number)
    }

    /// Whether the row has nothing to learn from: a text of white space, a chat without messages,
    /// a prompt without a completion.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text { text, starts, ends } => text.trim().is_empty() && *starts && *ends,
            Self::Messages { messages, .. } => messages.is_empty(),
            Self::Prompt { completion, .. } => completion.is_empty(),
            Self::PromptMessages { completion, .. } => completion.is_empty(),
            // An empty completion may be the rejected one.
            Self::Pair(_) => false,
        }
    }
}

/// Parses a line. Numbers that Python writes and JSON does not have become null: whether a value
/// that counts may be null is seen later.
fn parse_line(line: &[u8]) -> Result<Columns, serde_json::Error> {
    serde_json::from_slice(line).or_else(|error| {
        let Some(line) = python::to_json(line) else { return Err(error) };
        let columns: Columns = serde_json::from_slice(&line)?;
        match columns.has(python::HALF) {
            true => Err(serde::de::Error::custom("half a surrogate pair, which is no character")),
            false => Ok(columns),
        }
    })
}

impl Columns {
    /// The columns of a table's row.
    fn of(mut columns: Object) -> Self {
        columns.remove_nulls();
        let mut value = |key| columns.remove(key);
        let full = |value: Json| Presence(!value.is_empty());
        Self {
            text: value("text"),
            messages: value("messages"),
            prompt: value("prompt"),
            completion: value("completion"),
            chosen: value("chosen"),
            rejected: value("rejected"),
            conversations: value("conversations"),
            instruction: value("instruction"),
            input: value("input"),
            output: value("output"),
            system: value("system"),
            history: value("history"),
            tools: value("tools"),
            chat_template_kwargs: value("chat_template_kwargs"),
            images: value("images").map(full),
            image: value("image").map(full),
            videos: value("videos").map(full),
            video: value("video").map(full),
            audios: value("audios").map(full),
            audio: value("audio").map(full),
            functions: value("functions").map(full),
            documents: value("documents").map(full),
        }
    }

    /// Whether a value that counts contains a character.
    fn has(&self, character: char) -> bool {
        let values = [
            &self.text,
            &self.messages,
            &self.prompt,
            &self.completion,
            &self.chosen,
            &self.rejected,
            &self.conversations,
            &self.instruction,
            &self.input,
            &self.output,
            &self.system,
            &self.history,
            &self.tools,
            &self.chat_template_kwargs,
        ];
        values.into_iter().flatten().any(|value| value.contains(character))
    }

    /// The first column that is refused and says something.
    fn refused(&self) -> Option<&'static str> {
        let values = [
            &self.images,
            &self.image,
            &self.videos,
            &self.video,
            &self.audios,
            &self.audio,
            &self.functions,
            &self.documents,
        ];
        let full = |(_, value): &(&str, &Option<Presence>)| value.as_ref().is_some_and(|own| own.0);
        REFUSED.into_iter().zip(values).find(full).map(|(key, _)| key)
    }

    /// What the template of a chat sees besides the messages. A text is the JSON of the value.
    fn arguments(&mut self) -> Result<Arguments, (&'static str, &'static str)> {
        let tools = self.tools.take().map_or(Ok(Json::Null), parsed);
        let tools = tools.ok().filter(|tools| matches!(tools, Json::Null | Json::List(_)));
        let tools = tools.ok_or((ARGUMENTS[0], "a list of functions, or its JSON"))?;
        let tools = if tools.is_empty() { Json::Null } else { tools };
        let others = match self.chat_template_kwargs.take().map_or(Ok(Json::Null), parsed) {
            Ok(Json::Null) => Object::default(),
            Ok(Json::Object(others)) => others,
            _ => return Err((ARGUMENTS[1], "an object, or its JSON")),
        };
        Ok(Arguments { tools, others })
    }

    fn into_row(mut self, kind: RowKind, path: &Path, row: u64) -> Result<Row, SourceError> {
        let path = || path.to_owned();
        if kind != RowKind::Text
            && let Some(key) = self.refused()
        {
            return Err(SourceError::Unused { path: path(), row, key });
        }
        self.content(kind).map_err(|error| match error {
            Wrong::Missing(key) => SourceError::NoKey { path: path(), row, key },
            Wrong::Type(key, expected) => {
                SourceError::WrongType { path: path(), row, key, expected }
            }
        })
    }

    fn content(&mut self, kind: RowKind) -> Result<Row, Wrong> {
        if kind == RowKind::Text {
            let text = text(&mut self.text, "text")?;
            return Ok(Row::Text { text, starts: true, ends: true });
        }
        let arguments = self.arguments().map_err(|(key, expected)| Wrong::Type(key, expected))?;
        Ok(match kind {
            RowKind::Text | RowKind::Messages => {
                Row::Messages { messages: chat(&mut self.messages, "messages")?, arguments }
            }
            RowKind::Conversations | RowKind::Instruction => {
                Row::Messages { messages: self.foreign_chat(kind)?, arguments }
            }
            RowKind::Pair => {
                let columns = [self.prompt.take(), self.chosen.take(), self.rejected.take()];
                pair(columns, arguments)?
            }
            RowKind::Prompt if matches!(self.prompt, Some(Json::List(_) | Json::Object(_))) => {
                Row::PromptMessages {
                    prompt: chat(&mut self.prompt, "prompt")?,
                    completion: chat(&mut self.completion, "completion")?,
                    arguments,
                }
            }
            RowKind::Prompt if arguments != Arguments::default() => {
                let expected = "a list of messages where a row has tools or template arguments";
                return Err(Wrong::Type("prompt", expected));
            }
            RowKind::Prompt => Row::Prompt {
                prompt: text(&mut self.prompt, "prompt")?,
                completion: text(&mut self.completion, "completion")?,
            },
        })
    }

    /// The messages of a chat in another spelling.
    fn foreign_chat(&mut self, kind: RowKind) -> Result<Messages, Wrong> {
        let messages = if kind == RowKind::Conversations {
            let spoken = |message| dialect::spoken(message).map_err(Some);
            list(&mut self.conversations, "conversations", spoken, dialect::MESSAGES)?
        } else {
            let row = Instruction {
                instruction: text(&mut self.instruction, "instruction")?,
                input: self.input.take(),
                output: text(&mut self.output, "output")?,
                history: self.history.take(),
            };
            row.into_messages().map_err(|(key, expected)| Wrong::Type(key, expected))?
        };
        let messages = dialect::with_system(self.system.take(), messages);
        messages.map_err(|expected| Wrong::Type("system", expected))
    }
}

/// The pair in the columns `prompt`, `chosen` and `rejected`.
fn pair(columns: [Option<Json>; 3], arguments: Arguments) -> Result<Row, Wrong> {
    let [mut prompt, mut chosen, mut rejected] = columns;
    let is_chat = |value: &Option<Json>| matches!(value, Some(Json::List(_) | Json::Object(_)));
    if is_chat(&chosen) || is_chat(&rejected) {
        let own = is_chat(&prompt).then(|| chat(&mut prompt, "prompt")).transpose()?;
        let both = [chat(&mut chosen, "chosen")?, chat(&mut rejected, "rejected")?];
        let (prompt, both) = split_chats(own, both);
        for (key, completion) in ["chosen", "rejected"].into_iter().zip(&both) {
            if completion.is_empty() {
                return Err(Wrong::Type(key, "a list with at least one message"));
            }
        }
        return Ok(Row::Pair(Box::new(both.map(|completion| Row::PromptMessages {
            prompt: prompt.clone(),
            completion,
            arguments: arguments.clone(),
        }))));
    }
    if arguments != Arguments::default() {
        let expected = "a list of messages where a row has tools or template arguments";
        return Err(Wrong::Type("chosen", expected));
    }
    let own = prompt.is_some().then(|| text(&mut prompt, "prompt")).transpose()?;
    let both = [text(&mut chosen, "chosen")?, text(&mut rejected, "rejected")?];
    let (prompt, both) = split_texts(own, both);
    let row = |completion| Row::Prompt { prompt: prompt.clone(), completion };
    Ok(Row::Pair(Box::new(both.map(row))))
}

/// What is wrong with a row's columns.
enum Wrong {
    /// A key is missing.
    Missing(&'static str),
    /// A key has another value than the one that is expected.
    Type(&'static str, &'static str),
}

fn text(value: &mut Option<Json>, key: &'static str) -> Result<String, Wrong> {
    match value.take() {
        Some(Json::Text(text)) => Ok(text),
        Some(_) => Err(Wrong::Type(key, "a text")),
        None => Err(Wrong::Missing(key)),
    }
}

/// The messages of a chat.
fn chat(value: &mut Option<Json>, key: &'static str) -> Result<Messages, Wrong> {
    list(value, key, message, "a list of objects with `role` and `content`")
}

fn list(
    value: &mut Option<Json>,
    key: &'static str,
    parse: Parse,
    expected: &'static str,
) -> Result<Messages, Wrong> {
    let value = value.take().ok_or(Wrong::Missing(key))?;
    messages(value, parse).map_err(|own| Wrong::Type(key, own.unwrap_or(expected)))
}

/// Reads a message; the error says what must be there instead.
type Parse = fn(Object) -> Result<Object, Option<&'static str>>;

/// The messages of a list of objects.
fn messages(value: Json, parse: Parse) -> Result<Messages, Option<&'static str>> {
    let message = |value| match value {
        Json::Object(message) => parse(message),
        _ => Err(None),
    };
    listed(value).ok_or(None)?.into_iter().map(message).collect()
}

/// A value, or the one whose JSON a text is.
fn parsed(value: Json) -> Result<Json, serde_json::Error> {
    match value {
        Json::Text(text) if text.trim().is_empty() => Ok(Json::Null),
        Json::Text(text) => serde_json::from_str(&text),
        value => Ok(value),
    }
}

/// The items of a list: also of one that is written as a text, and of an object of lists, as which
/// older tables have a list of objects.
fn listed(value: Json) -> Option<Vec<Json>> {
    match parsed(value).ok()? {
        Json::List(list) => Some(list),
        Json::Object(columns) => {
            let mut rows: Vec<Object> = Vec::new();
            let count = columns.iter().next().and_then(|(_, column)| column.as_list())?.len();
            rows.resize(count, Object::default());
            for (key, column) in columns.iter() {
                let column = column.as_list().filter(|column| column.len() == count)?;
                for (row, value) in rows.iter_mut().zip(column) {
                    row.insert(key.to_owned(), value.clone());
                }
            }
            Some(rows.into_iter().map(Json::Object).collect())
        }
        _ => None,
    }
}

/// A message without the keys that are null, if it has a role.
fn message(mut message: Object) -> Result<Object, Option<&'static str>> {
    message.remove_nulls();
    let has_role = message.get("role").is_some_and(|role| role.as_text().is_some());
    if has_role { Ok(message) } else { Err(None) }
}
