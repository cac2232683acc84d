//! Chat templates, rendered as transformers' `apply_chat_template` renders them.

mod date;
mod generation;
mod json;
mod limits;
mod python;
mod translate;
mod turns;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use crate::source::{Arguments, Messages, Object};
use crate::tokenizer::{Encoded, TokenizerError, read_json};

pub use date::{Date, DateError};
pub use limits::SOURCE_BYTES;

/// The file of a checkpoint with the chat template of the training, if that is not the base's own.
pub const TRAINED_FILE: &str = "trained_chat_template.jinja";

/// Name of the template in the environment.
const NAME: &str = "chat";

/// Why a chat cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The file cannot be read.
    #[error("{path}: {source}; name a file with a Jinja template", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The tokenizer's configuration cannot be read.
    #[error(transparent)]
    Config(#[from] TokenizerError),
    /// The folder has no template.
    #[error(
        "{base} has no chat template, neither chat_template.jinja nor in tokenizer_config.json: give one with --chat-template FILE", base = base.display()
    )]
    Missing {
        /// The model's folder.
        base: PathBuf,
    },
    /// The template is not valid.
    #[error("the chat template is invalid: {0}; give another with --chat-template FILE")]
    Syntax(String),
    /// The template is larger than any of a known model.
    #[error(
        "the chat template has {found} {what}, and may have {most}: give another with --chat-template FILE"
    )]
    Large {
        /// What is counted.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// The cap.
        most: u64,
    },
    /// The template works too long on a chat.
    #[error(
        "the chat template takes more than {fuel} units of work for the chat: shorten the row, or give another template with --chat-template FILE"
    )]
    Work {
        /// The cap.
        fuel: u64,
    },
    /// The template does not end.
    #[error(
        "the chat template takes more than {seconds} s for the chat: shorten the row, or give another template with --chat-template FILE"
    )]
    Time {
        /// The cap.
        seconds: u64,
    },
    /// The template makes too much text of a chat.
    #[error(
        "the chat template makes more than {most} bytes of the chat: shorten the row, or give another template with --chat-template FILE"
    )]
    Output {
        /// The cap.
        most: u64,
    },
    /// The system gives no thread to render in.
    #[error(
        "no thread for the chat template: {0}; raise the limits of memory (ulimit -v) or threads (ulimit -u)"
    )]
    Thread(std::io::Error),
    /// A turn of the assistant that the template does not mark, and that is not found.
    #[error(
        "the chat template has no {{% generation %}} to mark the assistant's text with, and where message {number} lies is not certain: {reason}; use --train-on all, or a template with the mark via --chat-template FILE"
    )]
    Turn {
        /// The message, from 1.
        number: usize,
        /// Why it is not found.
        reason: String,
    },
    /// The template refuses a chat.
    #[error("the chat template refuses the chat: {0}; mend the row, or use another template")]
    Render(String),
    /// The template asks for today's date.
    #[error("the chat template asks for the date: give one with --date YYYY-MM-DD")]
    Date,
}

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The ranges of the assistant's text, in characters: those between the template's generation
    /// tags, or the turns of the assistant where the template has no tags.
    pub generated: Vec<Range<usize>>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    marked: bool,
    /// Whether marked text may be captured, and then be changed or measured.
    captures: bool,
    special: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles a template. `special` are the texts of special tokens by their names in the
    /// template, such as `bos_token`. `date` is the date of `strftime_now`; without one the template
    /// has no such function.
    ///
    /// # Errors
    /// If the template is not valid Jinja.
    pub fn new(
        source: &str,
        special: &BTreeMap<String, String>,
        date: Option<Date>,
    ) -> Result<Self, TemplateError> {
        limits::check_source(source)?;
        limits::with_deep_stack(|| Self::compile(source, special, date))
    }

    fn compile(
        source: &str,
        special: &BTreeMap<String, String>,
        date: Option<Date>,
    ) -> Result<Self, TemplateError> {
        // Python's Jinja has one kind of line end, whatever the file has.
        let unified = source.replace("\r\n", "\n").replace('\r', "\n");
        let (translated, marked) = generation::translate(&unified);
        let translated = translate::translate(&translated);
        // Only what is captured can be changed after its tags were replaced by markers.
        let captures = ["endmacro", "endcall", "endset", "endfilter"];
        let captures = marked && captures.iter().any(|tag| unified.contains(tag));
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::Syntax(describe(&error)))?);
        environment.set_formatter(format);
        environment.set_unknown_method_callback(python::call_method);
        environment.add_filter(generation::FILTER, generation::mark);
        environment.add_filter(translate::COUNTED, translate::counted);
        environment.add_filter("tojson", json::tojson);
        environment.add_filter("indent", python::indent);
        environment.add_filter("float", python::float);
        environment.add_filter("int", python::int);
        environment.add_filter("string", python::string);
        environment.add_filter("escape", python::escape);
        environment.add_filter("e", python::escape);
        environment.add_test("sequence", is_sequence);
        environment.add_test("iterable", is_iterable);
        environment.add_function("raise_exception", raise_exception);
        if let Some(date) = date {
            environment.add_function("strftime_now", move |format: &str| date.format(format));
        }
        environment
            .add_template_owned(NAME, translated)
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        let (source, special) = (source.to_owned(), special.clone());
        Ok(Self { environment, source, marked, captures, special })
    }

    /// The source of a model's chat template: the file that is given, or [`TRAINED_FILE`] of a checkpoint,
    /// or `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`. Of a list of templates it
    /// is the one named `default`.
    ///
    /// # Errors
    /// If a file cannot be read, or there is no template.
    pub fn find(base: &Path, file: Option<&Path>) -> Result<String, TemplateError> {
        if let Some(file) = file {
            return read(file)
                .map_err(|source| TemplateError::Read { path: file.to_owned(), source });
        }
        for name in [TRAINED_FILE, "chat_template.jinja"] {
            if let Some(source) = Self::in_file(base.join(name))? {
                return Ok(source);
            }
        }
        let config = read_json(&base.join("tokenizer_config.json"))?;
        let source = config.get("chat_template").and_then(|template| match template {
            serde_json::Value::String(source) => Some(source.as_str()),
            serde_json::Value::Array(list) => {
                list.iter().find(|one| one["name"] == "default")?.get("template")?.as_str()
            }
            _ => None,
        });
        let missing = || TemplateError::Missing { base: base.to_owned() };
        source.map(str::to_owned).ok_or_else(missing)
    }

    /// The source of the template that a checkpoint's model was trained with, if its base has another.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn trained(checkpoint: &Path) -> Result<Option<String>, TemplateError> {
        Self::in_file(checkpoint.join(TRAINED_FILE))
    }

    fn in_file(path: PathBuf) -> Result<Option<String>, TemplateError> {
        match read(&path) {
            Ok(source) => Ok(Some(source)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(TemplateError::Read { path, source }),
        }
    }

    /// The source of the template.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether a template's source marks the assistant's text.
    #[must_use]
    pub fn marks(source: &str) -> bool {
        generation::translate(source).1
    }

    /// The text of a chat.
    ///
    /// # Errors
    /// If the template refuses the chat.
    pub fn render(
        &self,
        messages: &Messages,
        arguments: &Arguments,
    ) -> Result<String, TemplateError> {
        self.render_plain(messages, arguments, false)
    }

    /// The text of the beginning of a chat, up to where the assistant goes on.
    ///
    /// # Errors
    /// If the template refuses the chat.
    pub fn render_prompt(
        &self,
        messages: &Messages,
        arguments: &Arguments,
    ) -> Result<String, TemplateError> {
        self.render_plain(messages, arguments, true)
    }

    /// The text of a chat, and the ranges of the assistant's text. A template without generation tags
    /// renders parts of the chat too, which show where each turn lies.
    ///
    /// # Errors
    /// If the template refuses the chat, or a turn cannot be found.
    pub fn render_masked(
        &self,
        messages: &Messages,
        arguments: &Arguments,
    ) -> Result<Rendered, TemplateError> {
        if self.marked {
            return self.render_marked(messages, arguments);
        }
        let renderer = self.renderer(messages, arguments);
        limits::until_deadline(move || {
            let text = renderer.render(&renderer.messages, false)?;
            let turns = turns::find(&renderer, &text)?;
            let generated = generation::in_characters(&text, turns);
            Ok(Rendered { text, generated })
        })
    }

    fn render_plain(
        &self,
        messages: &Messages,
        arguments: &Arguments,
        prompt: bool,
    ) -> Result<String, TemplateError> {
        let renderer = self.renderer(messages, arguments);
        limits::until_deadline(move || renderer.render(&renderer.messages, prompt))
    }

    fn render_marked(
        &self,
        messages: &Messages,
        arguments: &Arguments,
    ) -> Result<Rendered, TemplateError> {
        let renderer = self.renderer(messages, arguments);
        let captures = self.captures;
        limits::until_deadline(move || {
            let markers = &renderer.markers;
            let rendered =
                markers.extract(&renderer.render_with(&renderer.messages, (Some(markers), false))?);
            if captures && renderer.render(&renderer.messages, false)? != rendered.text {
                let reason = "text between {% generation %} and {% endgeneration %} is captured by set, filter, macro \
                              or call, and changed or measured afterwards, so that where it lies is not certain";
                return Err(TemplateError::Render(reason.to_owned()));
            }
            Ok(rendered)
        })
    }

    fn renderer(&self, messages: &Messages, arguments: &Arguments) -> Renderer {
        let texts = messages.iter().chain([&arguments.others]).flat_map(Object::iter);
        let bytes: u64 = texts.map(|(key, value)| (key.len() + value.text_bytes()) as u64).sum();
        // Of tools, templates print the keys too.
        let bytes = bytes.saturating_add(arguments.tools.all_bytes() as u64);
        let fuel = limits::fuel(bytes);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let messages: Vec<_> = messages.iter().map(alias_reasoning).collect();
        let markers = generation::Markers::unused_in(&messages, arguments);
        Renderer {
            environment,
            special: self.special.clone(),
            messages,
            arguments: arguments.clone(),
            markers,
            fuel,
            most: limits::output(bytes),
        }
    }
}

/// Renders a chat and parts of it.
struct Renderer {
    environment: Environment<'static>,
    special: BTreeMap<String, String>,
    messages: Vec<Object>,
    arguments: Arguments,
    markers: generation::Markers,
    /// Most work for one rendering.
    fuel: u64,
    /// Most bytes of one rendering.
    most: u64,
}

impl Renderer {
    /// All messages of the chat.
    fn messages(&self) -> &[Object] {
        &self.messages
    }

    /// The text of a special token.
    fn special(&self, name: &str) -> Option<&str> {
        self.special.get(name).map(String::as_str)
    }

    /// The text of some messages, with the prompt for an answer or without.
    fn render(&self, messages: &[Object], prompt: bool) -> Result<String, TemplateError> {
        self.render_with(messages, (None, prompt))
    }

    /// Like [`Self::render`], with markers around the assistant's text if there are any.
    fn render_with(
        &self,
        messages: &[Object],
        how: (Option<&generation::Markers>, bool),
    ) -> Result<String, TemplateError> {
        let (fuel, most) = (self.fuel, self.most);
        let context = context(&self.special, messages, &self.arguments, how);
        let mut out = limits::Rendering { bytes: Vec::new(), most };
        let template = self.environment.get_template(NAME);
        let rendered = template
            .and_then(|template| template.render_captured_to(context, &mut out).map(|_| ()));
        rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => TemplateError::Work { fuel },
            ErrorKind::WriteFailure => TemplateError::Output { most },
            ErrorKind::UnknownFunction if describe(&error).contains("strftime_now") => {
                TemplateError::Date
            }
            _ => TemplateError::Render(describe(&error)),
        })?;
        Ok(String::from_utf8_lossy(&out.bytes).into_owned())
    }
}

/// The variables of a template.
fn context(
    special: &BTreeMap<String, String>,
    messages: &[Object],
    arguments: &Arguments,
    (markers, prompt): (Option<&generation::Markers>, bool),
) -> BTreeMap<String, Value> {
    let mut context: BTreeMap<String, Value> =
        special.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))).collect();
    let own = [
        ("messages", Value::from(Serde(messages))),
        ("tools", Value::from(Serde(&arguments.tools))),
        ("documents", Value::from(())),
        ("add_generation_prompt", Value::from(prompt)),
    ];
    context.extend(own.map(|(name, value)| (name.to_owned(), value)));
    if let Some(markers) = markers {
        let pair = [(generation::OPEN, markers.open), (generation::CLOSE, markers.close)];
        context
            .extend(pair.map(|(name, marker)| (name.to_owned(), Value::from(marker.to_string()))));
    }
    let others = arguments.others.iter();
    context.extend(others.map(|(name, value)| (name.to_owned(), Value::from(Serde(value)))));
    context
}

/// The tokens that the assistant generates: as transformers' `return_assistant_tokens_mask`, from
/// the token with the first character of a range to the token with its last.
#[must_use]
pub fn assistant_mask(encoded: &Encoded, generated: &[Range<usize>]) -> Vec<bool> {
    let mut mask = vec![false; encoded.tokens.len()];
    // Ranges are in order, so that a search goes on where the last one ended: in a long chat a search
    // from the beginning for each range would take time with the square of its length.
    let mut from = 0;
    let mut token_at = |character: usize| {
        let has = |(start, end): &(usize, usize)| (*start..*end).contains(&character);
        let offsets = &encoded.offsets;
        let found = offsets[from..].iter().position(has).map(|place| from + place);
        let found = found.or_else(|| offsets.iter().position(has));
        from = found.unwrap_or(from);
        found
    };
    for range in generated {
        let Some(first) = token_at(range.start) else { break };
        let last = range.end.checked_sub(1).and_then(&mut token_at).filter(|last| *last > 0);
        let end = last.map_or(mask.len(), |last| last + 1);
        if first < end {
            mask[first..end].fill(true);
        }
    }
    mask
}

/// The names under which a message's reasoning is passed, the first the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Fills the names under which templates look for a message's reasoning.
fn alias_reasoning(message: &Object) -> Object {
    let Some(reasoning) = REASONING.iter().find_map(|name| message.get(name)).cloned() else {
        return message.clone();
    };
    // As in transformers, `thinking` comes first unless the message has it.
    let thinking = [("thinking".to_owned(), reasoning.clone())].into_iter();
    let own = message.iter().map(|(key, value)| (key.to_owned(), value.clone()));
    let mut message: Object = thinking.chain(own).collect();
    message.insert(REASONING[0].to_owned(), reasoning);
    message
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut source = String::new();
    // One more byte than is allowed, so that a larger file is refused by its size.
    fs::File::open(path)?.take(limits::SOURCE_BYTES + 1).read_to_string(&mut source)?;
    Ok(source)
}

/// Writes a value as Python does.
fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.write_str("None").map_err(Error::from),
        ValueKind::Bool => {
            out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from)
        }
        ValueKind::Number => out.write_str(&json::printed(value)).map_err(Error::from),
        ValueKind::String => minijinja::escape_formatter(out, state, value),
        _ => {
            json::refuse_unlike(state, value)?;
            limits::write_value(out, state, value)
        }
    }
}

/// Whether a value has a length and items, as Jinja2 asks: of texts and objects too.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
    )
}

/// Whether a value can be looped over: an undefined one can, `none` cannot.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

fn raise_exception(message: &str, _rest: Rest<Value>, _named: Kwargs) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// One line with the error and its cause.
fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line})"));
    }
    text
}

#[cfg(test)]
mod tests;
