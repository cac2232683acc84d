//! Turns a row of a source into the tokens of a document.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::class::Class;
use crate::source::{Arguments, Json, Messages, Row};
use crate::template::{ChatTemplate, TemplateError, assistant_mask};
use crate::tokenizer::{TextTokenizer, TokenizerError};

/// The tokens of one document, or of one block of a long text, and the class of each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// As many classes as tokens.
    pub classes: Vec<Class>,
}

/// The tokens that are targets in chats, and in prompts with a completion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TrainOn {
    /// The assistant's text, or the completion.
    #[default]
    Responses,
    /// All tokens.
    All,
}

impl fmt::Display for TrainOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Responses => "responses",
            Self::All => "all",
        })
    }
}

/// The error of a text that names no choice of targets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no choice of targets: use responses or all")]
pub struct TrainOnError(String);

impl FromStr for TrainOn {
    type Err = TrainOnError;

    fn from_str(text: &str) -> Result<Self, TrainOnError> {
        match text {
            "responses" => Ok(Self::Responses),
            "all" => Ok(Self::All),
            other => Err(TrainOnError(other.to_owned())),
        }
    }
}

/// Why a row cannot become a document.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The tokenizer refuses the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// There is no token to end a text with.
    #[error(
        "the tokenizer has no token that ends a text: name one as eos_token in tokenizer_config.json"
    )]
    NoEos,
    /// A row with messages, but no chat template.
    #[error(
        "a row has messages, but the model has no chat template: give one with --chat-template FILE"
    )]
    NoTemplate,
    /// A chat template that renders a prompt otherwise when the completion follows.
    #[error(
        "the chat template renders the prompt otherwise when the completion follows: use --train-on all, or another template via --chat-template FILE"
    )]
    PromptChanges,
    /// A message with a weight that is not used.
    #[error(
        "message {number} has {key} = {value}: an answer of the assistant may have 0 or 1 (false or true), another message 0; take the key out, or the message"
    )]
    Weight {
        /// The message, from 1.
        number: usize,
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// Weights of answers that the template does not mark one by one.
    #[error(
        "its {answers} answers have weights, but the chat template marks {parts} parts of it: leave the weights out, or give a template that marks each answer once with --chat-template FILE"
    )]
    WeightOfParts {
        /// Parts that the template marks.
        parts: usize,
        /// Messages of the assistant.
        answers: usize,
    },
    /// A weight of 0 where all tokens are trained on.
    #[error(
        "an answer has the weight 0, and --train-on all trains on everything: take one of the two out"
    )]
    WeightOfAll,
    /// A weight of 0 in a completion.
    #[error(
        "a message of `completion` has the weight 0, but all of it is trained on: move it to `prompt`, or use `messages`"
    )]
    WeightOfCompletion,
    /// An id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}: check config.json")]
    Vocabulary {
        /// The id.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
}

/// Turns rows into documents.
///
/// - A text has the tokens that the tokenizer adds before a text, its own, and `eos`. All are
///   targets.
/// - A chat has the tokens of the rendered template, and nothing else. The assistant's are targets.
/// - A prompt and its completion are encoded as one text, with the tokens around it as for a text.
///   Targets are the tokens that begin in the completion, and `eos`. If both are messages, they are
///   rendered as one chat, and targets are the tokens behind the rendered prompt.
/// - A pair has the tokens of both its rows, the chosen one first.
///
/// The first token of a document has the class [`Class::First`].
#[derive(Clone)]
pub struct Encoder {
    tokenizer: TextTokenizer,
    template: Option<Arc<ChatTemplate>>,
    train_on: TrainOn,
}

impl Encoder {
    /// An encoder. It needs a template only for messages.
    #[must_use]
    pub fn new(
        tokenizer: TextTokenizer,
        template: Option<ChatTemplate>,
        train_on: TrainOn,
    ) -> Self {
        Self { tokenizer, template: template.map(Arc::new), train_on }
    }

    /// The tokenizer.
    #[must_use]
    pub const fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The template of chats, if the rows need one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// The document of a row.
    ///
    /// # Errors
    /// If the template refuses a chat, or the tokenizer a text.
    pub fn encode(&self, row: &Row) -> Result<Document, DocumentError> {
        Ok(self.encode_noting(row)?.0)
    }

    /// The document of a row, and the messages whose role the template does not know.
    ///
    /// # Errors
    /// If the template refuses a chat, or the tokenizer a text.
    pub(crate) fn encode_noting(
        &self,
        row: &Row,
    ) -> Result<(Document, Vec<OddRole>), DocumentError> {
        let mut odd = Vec::new();
        let document = match row {
            Row::Text { text, starts, ends } => self.encode_text(text, *starts, *ends)?,
            Row::Messages { messages, arguments } => {
                self.encode_chat(messages, arguments, &mut odd)?
            }
            Row::Prompt { prompt, completion } => self.encode_prompt(prompt, completion)?,
            Row::PromptMessages { prompt, completion, arguments } => {
                self.encode_chat_prompt((prompt, completion), arguments, &mut odd)?
            }
            Row::Pair(pair) => {
                let [chosen, rejected] = pair.as_ref();
                let (mut both, of_chosen) = self.encode_noting(chosen)?;
                let (rejected, of_rejected) = self.encode_noting(rejected)?;
                both.tokens.extend(rejected.tokens);
                both.classes.extend(rejected.classes);
                odd.extend(of_chosen.into_iter().chain(of_rejected));
                both
            }
        };
        let vocabulary = self.tokenizer.vocabulary();
        match document.tokens.iter().find(|token| **token >= vocabulary) {
            Some(token) => Err(DocumentError::Vocabulary { token: *token, vocabulary }),
            None => Ok((document, odd)),
        }
    }

    fn encode_text(&self, text: &str, starts: bool, ends: bool) -> Result<Document, DocumentError> {
        let content = self.tokenizer.encode(text, false)?;
        let mut tokens = Vec::with_capacity(content.len() + 2);
        // A text that has them itself begins and ends once.
        if starts && !self.begins(&content) {
            tokens.extend_from_slice(self.tokenizer.starts());
        }
        tokens.extend(content);
        if ends {
            self.end(&mut tokens)?;
        }
        let mut document = Document { classes: vec![Class::Target; tokens.len()], tokens };
        if starts {
            document.begin();
        }
        Ok(document)
    }

    fn encode_chat(
        &self,
        messages: &Messages,
        arguments: &Arguments,
        odd: &mut Vec<OddRole>,
    ) -> Result<Document, DocumentError> {
        let template = self.template.as_ref().ok_or(DocumentError::NoTemplate)?;
        let (messages, trained) = weights(messages)?;
        let is_weighted = trained.contains(&false);
        let mut document = if self.train_on == TrainOn::All {
            if is_weighted {
                return Err(DocumentError::WeightOfAll);
            }
            let text = template.render(&messages, arguments)?;
            odd.extend(odd_roles(&messages, &text, template));
            let tokens = self.tokenizer.encode(&text, false)?;
            Document { classes: vec![Class::Target; tokens.len()], tokens }
        } else {
            let mut rendered = template.render_masked(&messages, arguments)?;
            odd.extend(odd_roles(&messages, &rendered.text, template));
            let encoded = self.tokenizer.encode_with_offsets(&rendered.text, false)?;
            if is_weighted {
                let (parts, answers) = (rendered.generated.len(), trained.len());
                if parts != answers {
                    return Err(DocumentError::WeightOfParts { parts, answers });
                }
                let mut trained = trained.iter();
                rendered.generated.retain(|_| trained.next() == Some(&true));
            }
            let mask = assistant_mask(&encoded, &rendered.generated);
            let classes = mask.into_iter().map(class_of).collect();
            Document { tokens: encoded.tokens, classes }
        };
        document.begin();
        Ok(document)
    }

    fn encode_prompt(&self, prompt: &str, completion: &str) -> Result<Document, DocumentError> {
        let mut document = Document::default();
        self.encode_behind(&format!("{prompt}{completion}"), prompt, &mut document)?;
        if !self.begins(&document.tokens) {
            let starts = self.tokenizer.starts();
            document.tokens.splice(..0, starts.iter().copied());
            let class = class_of(self.train_on == TrainOn::All);
            document.classes.splice(..0, starts.iter().map(|_| class));
        }
        self.end(&mut document.tokens)?;
        document.classes.resize(document.tokens.len(), Class::Target);
        document.begin();
        Ok(document)
    }

    fn encode_chat_prompt(
        &self,
        (prompt, completion): (&Messages, &Messages),
        arguments: &Arguments,
        odd: &mut Vec<OddRole>,
    ) -> Result<Document, DocumentError> {
        let template = self.template.as_ref().ok_or(DocumentError::NoTemplate)?;
        let ((prompt, _), (completion, trained)) = (weights(prompt)?, weights(completion)?);
        if trained.contains(&false) {
            return Err(DocumentError::WeightOfCompletion);
        }
        let chat = [prompt.as_slice(), &completion].concat();
        let text = template.render(&chat, arguments)?;
        odd.extend(odd_roles(&chat, &text, template));
        let prompt = template.render_prompt(&prompt, arguments)?;
        if self.train_on == TrainOn::Responses && !text.starts_with(&prompt) {
            return Err(DocumentError::PromptChanges);
        }
        let mut document = Document::default();
        self.encode_behind(&text, &prompt, &mut document)?;
        document.begin();
        Ok(document)
    }

    /// Appends the tokens of a text. Those that begin behind its prompt are targets.
    fn encode_behind(
        &self,
        text: &str,
        prompt: &str,
        document: &mut Document,
    ) -> Result<(), DocumentError> {
        let border = prompt.chars().count();
        let encoded = self.tokenizer.encode_with_offsets(text, false)?;
        for (token, (start, _)) in encoded.tokens.iter().zip(&encoded.offsets) {
            document.push(*token, class_of(self.train_on == TrainOn::All || *start >= border));
        }
        Ok(())
    }

    /// Whether a text has the tokens itself that the tokenizer adds before one.
    fn begins(&self, content: &[u32]) -> bool {
        let starts = self.tokenizer.starts();
        !starts.is_empty() && content.starts_with(starts)
    }

    /// Appends the tokens behind a text, unless it ends with them itself: those that the tokenizer adds,
    /// and `eos` if it is not among them.
    fn end(&self, tokens: &mut Vec<u32>) -> Result<(), DocumentError> {
        let mut end = self.tokenizer.ends().to_vec();
        let eos = self.tokenizer.eos().ok_or(DocumentError::NoEos)?;
        if end.last() != Some(&eos) {
            end.push(eos);
        }
        if !tokens.ends_with(&end) {
            tokens.extend(end);
        }
        Ok(())
    }
}

/// Most messages of a chat that are noted, and most characters of a role.
const MOST_ODD: usize = 8;
pub(crate) const ROLE_CHARACTERS: usize = 32;

/// Roles that chat templates know, some by another name.
const ROLES: [&str; 7] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// A message with a role that the template does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OddRole {
    pub(crate) role: String,
    /// Whether the message's text is not in the rendered chat.
    pub(crate) is_left_out: bool,
}

/// The messages whose text is not in the rendered chat, and those whose role neither models nor the template's
/// source know. Results of tools may be written in another form, and reasoning may be left out.
fn odd_roles(messages: &Messages, rendered: &str, template: &ChatTemplate) -> Vec<OddRole> {
    let mut odd = Vec::new();
    let mut from = 0;
    for message in messages {
        let text = |key| message.get(key).and_then(Json::as_text);
        let (Some(role), Some(content)) = (text("role"), text("content")) else { continue };
        if ["tool", "ipython", "function"].contains(&role) {
            continue;
        }
        let content = content.rsplit("</think>").next().unwrap_or_default().trim();
        // Messages follow one another, so that a search goes on where the last one ended.
        let found = rendered[from..].find(content).map(|place| from + place);
        let found = found.or_else(|| rendered.find(content));
        let is_left_out = found.is_none();
        from = found.map_or(from, |place| place + content.len());
        if is_left_out || !(ROLES.contains(&role) || template.source().contains(role)) {
            let role = role.chars().take(ROLE_CHARACTERS).collect();
            odd.push(OddRole { role, is_left_out });
        }
        if odd.len() == MOST_ODD {
            break;
        }
    }
    odd
}

/// The keys with which a message says whether it is trained on, as OpenAI and axolotl have them.
const WEIGHTS: [&str; 2] = ["weight", "train"];

/// The messages without their weights, and whether each of the assistant's is trained on.
fn weights(messages: &Messages) -> Result<(Messages, Vec<bool>), DocumentError> {
    let mut trained = Vec::new();
    let mut plain = messages.clone();
    for (number, message) in plain.iter_mut().enumerate() {
        let is_answer = message.get("role").and_then(Json::as_text) == Some("assistant");
        let mut own = true;
        for key in WEIGHTS {
            let Some(value) = message.remove(key) else { continue };
            let weight = match &value {
                Json::Bool(flag) => Some(*flag),
                Json::Number(number) if number.as_f64() == Some(0.0) => Some(false),
                Json::Number(number) if number.as_f64() == Some(1.0) => Some(true),
                _ => None,
            };
            own &= match weight {
                Some(weight) if is_answer || !weight => weight,
                _ => {
                    let value = serde_json::to_string(&value).unwrap_or_default();
                    return Err(DocumentError::Weight { number: number + 1, key, value });
                }
            };
        }
        if is_answer {
            trained.push(own);
        }
    }
    Ok((plain, trained))
}

const fn class_of(target: bool) -> Class {
    if target { Class::Target } else { Class::Masked }
}

impl Document {
    /// Whether nothing is learnt from it. A document that begins in another block may have targets
    /// there.
    pub(crate) fn has_no_target(&self) -> bool {
        !self.classes.contains(&Class::Target)
    }

    fn push(&mut self, token: u32, class: Class) {
        self.tokens.push(token);
        self.classes.push(class);
    }

    fn begin(&mut self) {
        if let Some(first) = self.classes.first_mut() {
            *first = Class::First;
        }
    }
}
