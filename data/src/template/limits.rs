//! Limits on what a chat template, which may be a stranger's, costs.
//!
//! The engine counts its work in fuel: one for an instruction, and one for 64 bytes that it makes or
//! reads. What it does not count is counted here: methods of texts that read them, values that contain
//! one another many times over, and the depth of sources and values, which recursions follow.

use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use minijinja::{Error, ErrorKind, Output, State, Value};

use super::TemplateError;

/// Largest source of a template, in bytes. Those of known models have up to 40,000.
pub const SOURCE_BYTES: u64 = 256 << 10;
/// Largest tag or expression in a template, in bytes: the compiler recurses over its operators.
const TAG_BYTES: usize = 16 << 10;
/// Most tags and expressions in a template: the compiler recurses over the branches of a condition.
const TAGS: usize = 10_000;
/// Fuel for one chat. Templates of known models take 5,000 for a chat of ten messages.
const FUEL: u64 = 1_000_000;
/// Bytes of a chat for each further fuel: enough to copy the chat eight times.
const CHAT_BYTES_PER_FUEL: u64 = 8;
/// Most bytes of a rendered chat, beside [`OUTPUT_RATIO`] times the chat itself.
const OUTPUT_BYTES: u64 = 16 << 20;
const OUTPUT_RATIO: u64 = 4;
/// Stack of the thread that compiles or renders: no source or value within the limits is so deep
/// that it would overflow. It takes memory only as far as it is used.
const STACK_BYTES: usize = 512 << 20;
/// Longest time for one chat. The engine does not count comparisons of values that contain one another
/// many times over, nor their texts in `~` and filters.
const DEADLINE: Duration = Duration::from_secs(20);
/// Bytes that one fuel pays for.
const BYTES_PER_FUEL: usize = 64;

/// Fuel for a chat of so many bytes.
pub(super) const fn fuel(chat_bytes: u64) -> u64 {
    FUEL + chat_bytes / CHAT_BYTES_PER_FUEL
}

/// Most bytes of a rendered chat of so many bytes.
pub(super) const fn output(chat_bytes: u64) -> u64 {
    OUTPUT_BYTES.saturating_add(chat_bytes.saturating_mul(OUTPUT_RATIO))
}

/// Checks the size and the tags of a template.
pub(super) fn check_source(source: &str) -> Result<(), TemplateError> {
    let large = |what, found: usize, most: u64| {
        Err(TemplateError::Large { what, found: found as u64, most })
    };
    if source.len() as u64 > SOURCE_BYTES {
        return large("bytes", source.len(), SOURCE_BYTES);
    }
    let mut tags = 0;
    let mut rest = source;
    while let Some(start) = rest.find(['{']) {
        rest = &rest[start + 1..];
        let end = match rest.bytes().next() {
            Some(b'%') => "%}",
            Some(b'{') => "}}",
            _ => continue,
        };
        tags += 1;
        let length = rest.find(end).unwrap_or(rest.len());
        if length > TAG_BYTES {
            return large("bytes in one tag", length, TAG_BYTES as u64);
        }
        rest = &rest[length..];
    }
    if tags > TAGS { large("tags", tags, TAGS as u64) } else { Ok(()) }
}

/// Runs something where deep recursion is no error, for at most [`DEADLINE`]. What takes longer is
/// left alone: no thread can be stopped from outside, and the program ends with the error.
pub(super) fn until_deadline<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send + 'static,
) -> Result<T, TemplateError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let run = move || drop(sender.send(work()));
    let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn(run);
    thread.map_err(TemplateError::Thread)?;
    receiver.recv_timeout(DEADLINE).unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => Err(TemplateError::Time { seconds: DEADLINE.as_secs() }),
        RecvTimeoutError::Disconnected => Err(failed()),
    })
}

fn failed() -> TemplateError {
    TemplateError::Render("the template engine failed".to_owned())
}

/// Runs something where deep recursion is no error.
pub(super) fn with_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(TemplateError::Thread)?;
        thread.join().unwrap_or_else(|_| Err(failed()))
    })
}

/// The writer of a rendered chat.
pub(super) struct Rendering {
    pub(super) bytes: Vec<u8>,
    pub(super) most: u64,
}

impl Write for Rendering {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Pays for the reading or making of so many bytes.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64 + 1)
}

/// Writes a value, and pays for each part of it: a list that holds another ten times is small, and its
/// text is not.
pub(super) fn write_value(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    let mut paid = Paid { out, state };
    fmt::Write::write_fmt(&mut paid, format_args!("{value}"))
        .map_err(|_| Error::from(ErrorKind::OutOfFuel))
}

struct Paid<'a, 'b> {
    out: &'a mut Output<'b>,
    state: &'a State<'a, 'a>,
}

impl fmt::Write for Paid<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(self.state, text.len()).map_err(|_| fmt::Error)?;
        self.out.write_str(text)
    }
}
