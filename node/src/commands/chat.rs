//! `shoal chat`: a conversation on stdin and stdout.

use std::io::{self, BufRead, IsTerminal, Read};

use anyhow::anyhow;
use shoal_data::source::Arguments;
use shoal_data::source::{Json, Messages, Object};
use shoal_data::template::ChatTemplate;
use shoal_engine::{Ending, Sampling};

use super::{bucket, generate};
use crate::cli::ChatArgs;
use crate::exit::{Exit, ExitWith};
use crate::terminal::{print_line, print_model_text};
use crate::text_model::TextModel;

/// Most bytes of a line of input.
const MOST_BYTES: u64 = 1 << 20;

/// Answers each line of stdin.
///
/// # Errors
/// If the folder has no model with a chat template, a file is damaged, or the template refuses the
/// conversation.
pub(super) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let mut chat = Chat::open(args)?;
    let mut input = io::stdin().lock();
    let interactive = input.is_terminal();
    loop {
        if interactive {
            print_model_text("> ")?;
        }
        let Some(line) = read_line(&mut input)? else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/exit" => return Ok(()),
            "/reset" => chat.reset(),
            question => chat.answer(question)?,
        }
    }
}

/// The next line; `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut line = Vec::new();
    input.by_ref().take(MOST_BYTES).read_until(b'\n', &mut line)?;
    if line.len() as u64 == MOST_BYTES {
        let problem = anyhow!("a line has {MOST_BYTES} bytes or more: shorten it");
        return Err(problem).exit_with(Exit::Usage);
    }
    let text = String::from_utf8_lossy(&line).into_owned();
    Ok(Some(text).filter(|_| !line.is_empty()))
}

/// A conversation with a model.
struct Chat {
    model: TextModel,
    template: ChatTemplate,
    sampling: Sampling,
    system: Option<String>,
    messages: Messages,
}

impl Chat {
    fn open(args: &ChatArgs) -> anyhow::Result<Self> {
        let folder = &bucket::model_folder(&args.model)?;
        let model = TextModel::open(folder, args.base.as_deref())?;
        let Some(tokenizer) = model.codec().tokenizer() else {
            let problem = anyhow!(
                "{} was trained on bytes of plain text and has no chat template: continue a text with \
                 `shoal generate`, or fine-tune a model that has one (`shoal import`)",
                folder.display()
            );
            return Err(problem).exit_with(Exit::Usage);
        };
        let source = ChatTemplate::find(folder, args.chat_template.as_deref());
        let source = source.exit_with(Exit::Usage)?;
        let template = ChatTemplate::new(&source, tokenizer.special(), args.date);
        let template = template.exit_with(Exit::Usage)?;
        let sampling = generate::sampling(args.tokens, args.sampling, model.codec());
        let system = args.system.clone();
        let mut chat = Self { model, template, sampling, system, messages: Vec::new() };
        chat.reset();
        Ok(chat)
    }

    /// Begins a new conversation.
    fn reset(&mut self) {
        self.messages = self.system.iter().map(|text| message("system", text)).collect();
    }

    /// Prints the answer to a message, and adds both to the conversation.
    fn answer(&mut self, question: &str) -> anyhow::Result<()> {
        self.messages.push(message("user", question));
        let prompt = self.prompt()?;
        let positions = self.model.positions();
        if prompt.len() >= positions {
            self.messages.pop();
            print_line(&format!(
                "the conversation would have {} tokens, and the model reads at most {positions}: \
                 shorten the message, or begin a new conversation with /reset",
                prompt.len()
            ));
            return Ok(());
        }
        let written = self.model.write(&prompt, self.sampling.clone(), print_model_text)?;
        print_model_text("\n")?;
        match written.ending {
            Ending::EndToken => {}
            Ending::Tokens => {
                print_line(&format!("the answer ends at --tokens {}", self.sampling.tokens));
            }
            Ending::Positions => print_line(&format!(
                "the conversation fills the model's {positions} positions: begin a new one with /reset"
            )),
        }
        self.messages.push(message("assistant", &written.text));
        // Equal messages may get different answers.
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
        Ok(())
    }

    /// The tokens of the conversation, up to where the assistant goes on.
    fn prompt(&self) -> anyhow::Result<Vec<u32>> {
        let text = self
            .template
            .render_prompt(&self.messages, &Arguments::default())
            .exit_with(Exit::Usage)?;
        let tokenizer = self.model.codec().tokenizer().expect("a chat has a tokenizer");
        // The template has the tokens around the text.
        Ok(tokenizer.encode(&text, false)?)
    }
}

fn message(role: &str, content: &str) -> Object {
    let text = |text: &str| Json::Text(text.to_owned());
    Object::from_iter([("role".to_owned(), text(role)), ("content".to_owned(), text(content))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_with_the_input_and_have_a_limit() {
        let mut input: &[u8] = b"one\n\ntw\xffo";
        let mut next = || read_line(&mut input).expect("short lines");
        assert_eq!(next().as_deref(), Some("one\n"));
        assert_eq!(next().as_deref(), Some("\n"));
        assert_eq!(next().as_deref(), Some("tw\u{fffd}o"));
        assert_eq!(next(), None);
        let long = vec![b'a'; MOST_BYTES as usize + 1];
        let error = read_line(&mut long.as_slice()).expect_err("too long");
        assert_eq!(Exit::of(&error), Exit::Usage);
    }
}
