//! Chats in other people's spelling: ShareGPT's conversations, and Alpaca's instructions.

use super::json::{Json, Object};
use super::row::Messages;

/// Names of the speakers of a conversation, and the roles of chat templates that they stand for.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("function_response", "tool"),
    ("function", "tool"),
    ("observation", "tool"),
];

/// What must be there instead.
type Expected = &'static str;

/// A message of ShareGPT with `role` and `content`, its other keys unchanged. One that has a `role`
/// is taken as it is.
pub(super) fn spoken(mut message: Object) -> Result<Object, Expected> {
    message.remove_nulls();
    if message.get("role").is_some() {
        let has_role = message.get("role").is_some_and(|role| role.as_text().is_some());
        return if has_role { Ok(message) } else { Err(MESSAGES) };
    }
    let (Some(Json::Text(speaker)), value) = (message.remove("from"), message.remove("value"))
    else {
        return Err(MESSAGES);
    };
    let role = SPEAKERS.iter().find(|(own, _)| own.eq_ignore_ascii_case(&speaker));
    let (_, role) = role.ok_or(
        "of known speakers: `from` is human, gpt, system or tool (or user, chatgpt, assistant, model, bot, observation, function, function_response)",
    )?;
    let content = value.unwrap_or_else(|| Json::Text(String::new()));
    let head = [("role", text(role)), ("content", content)];
    let head = head.into_iter().map(|(key, value)| (key.to_owned(), value));
    let rest = message.iter().map(|(key, value)| (key.to_owned(), value.clone()));
    Ok(head.chain(rest).collect())
}

/// What a conversation is.
pub(super) const MESSAGES: Expected = "a list of objects with `from` and `value`";

/// Puts the system message of a row before its chat, which may not have one of its own.
pub(super) fn with_system(
    system: Option<Json>,
    mut messages: Messages,
) -> Result<Messages, Expected> {
    let system = match system {
        None | Some(Json::Null) => return Ok(messages),
        Some(Json::Text(system)) if system.trim().is_empty() => return Ok(messages),
        Some(Json::Text(system)) => system,
        Some(_) => return Err("a text"),
    };
    let first = messages.first().and_then(|message| message.get("role")?.as_text());
    if first == Some("system") {
        return Err("left out where the chat begins with a system message");
    }
    if !messages.is_empty() {
        messages.insert(0, message("system", system));
    }
    Ok(messages)
}

/// The values of a row of Alpaca.
pub(super) struct Instruction {
    pub(super) instruction: String,
    pub(super) input: Option<Json>,
    pub(super) output: String,
    pub(super) history: Option<Json>,
}

impl Instruction {
    /// The row as a chat: earlier questions and answers, the instruction with its input in the next
    /// line, and the output. It is empty if there is no output.
    pub(super) fn into_messages(self) -> Result<Messages, (&'static str, Expected)> {
        let input = match self.input {
            None | Some(Json::Null) => String::new(),
            Some(Json::Text(input)) => input,
            Some(_) => return Err(("input", "a text")),
        };
        let mut messages = Vec::new();
        for turn in earlier(self.history)
            .ok_or(("history", "a list of pairs of texts: a question and its answer"))?
        {
            let [question, answer] = turn;
            messages.extend([message("user", question), message("assistant", answer)]);
        }
        if self.output.trim().is_empty() {
            return Ok(Vec::new());
        }
        let parts = [self.instruction, input];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.trim().is_empty()).collect();
        messages.push(message("user", parts.join("\n")));
        messages.push(message("assistant", self.output));
        Ok(messages)
    }
}

/// Earlier questions and answers; `None` if the value is something else.
fn earlier(history: Option<Json>) -> Option<Vec<[String; 2]>> {
    let turns = match history {
        None | Some(Json::Null) => return Some(Vec::new()),
        Some(Json::List(turns)) => turns,
        Some(_) => return None,
    };
    let pair = |turn: Json| match turn {
        Json::List(pair) => match <[Json; 2]>::try_from(pair).ok()? {
            [Json::Text(question), Json::Text(answer)] => Some([question, answer]),
            _ => None,
        },
        _ => None,
    };
    turns.into_iter().map(pair).collect()
}

fn message(role: &str, content: String) -> Object {
    [("role".to_owned(), text(role)), ("content".to_owned(), Json::Text(content))]
        .into_iter()
        .collect()
}

fn text(text: &str) -> Json {
    Json::Text(text.to_owned())
}
