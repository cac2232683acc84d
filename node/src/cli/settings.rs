//! Flags of a peer from its file and from the environment.
//!
//! Every flag of `shoal start` and `shoal join` may also be a variable, as `SHOAL_MEMORY=8GiB`, or a key of `peer.toml` in
//! the peer's data directory, as `memory = "8GiB"`. The command line goes before the environment, which goes before the
//! file. Flags are declared once: what is read here is passed to clap as if it had been typed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use shoal_formats::config::read_text;
use shoal_formats::near_name::closest;
use shoal_protocol::limits;
use thiserror::Error;
use toml::{Table, Value};

use super::Cli;

/// The commands whose flags may be set so.
const COMMANDS: [&str; 2] = ["start", "join"];

/// The file in a data directory.
const FILE: &str = "peer.toml";

/// The key of the folder with that file, which cannot be in it.
const DATA_DIR: &str = "data_dir";

/// What the names of the variables begin with.
const PREFIX: &str = "SHOAL_";

/// Why the arguments of a process are refused.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The command line is, or asks for help.
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no TOML.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A key or variable is close to a flag, or the file has one that is no flag.
    #[error("{place}: there is no flag for `{name}`{hint}")]
    Unknown {
        /// The file, or the environment.
        place: String,
        /// The key or variable.
        name: String,
        /// What was probably meant.
        hint: String,
    },
    /// A value has a type that its flag does not take.
    #[error("{place}: `{name}` takes {wanted}")]
    Kind {
        /// The file or the variable.
        place: String,
        /// The key.
        name: String,
        /// What would do.
        wanted: &'static str,
    },
    /// A value is refused by its flag, or does not go with another.
    #[error("{reason} (from {place})")]
    Value {
        /// The refusal of the flag.
        reason: String,
        /// The file, the variables, or both.
        place: String,
    },
}

/// Parses the arguments of this process, with the flags of a peer from `environment` and from its file.
///
/// # Errors
/// If they ask for help, or are refused.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Cli, Refusal> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut command = Cli::command();
    command.build();
    let typed = command.try_get_matches_from_mut(&arguments)?;
    let Some((name, of_command)) = typed.subcommand().filter(|(name, _)| COMMANDS.contains(name))
    else {
        return Ok(Cli::from_arg_matches(&typed)?);
    };
    let variables = variables(&command, environment)?;
    let data_dir = of_command.get_one::<PathBuf>(DATA_DIR).cloned().unwrap_or_default();
    let file = data_dir.join(FILE);
    let keys = keys(&command, &file)?;
    let mut settings = Settings::default();
    for flag in flags(&command, name).filter(|flag| !is_typed(of_command, flag)) {
        let key = key(flag);
        if key == DATA_DIR {
            continue; // its default is the variable
        }
        if let Some(value) = variables.get(&key) {
            settings.add_text(flag, value)?;
        } else if let Some(value) = keys.get(&key) {
            settings.add_value(flag, value, &file)?;
        }
    }
    if settings.arguments.is_empty() {
        return Ok(Cli::from_arg_matches(&typed)?);
    }
    let all = insert(arguments, std::mem::take(&mut settings.arguments));
    let parsed = Cli::command().try_get_matches_from(all);
    let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| settings.refusal(&error))
}

/// Arguments that were not typed.
#[derive(Default)]
struct Settings {
    arguments: Vec<OsString>,
    /// Where those of each flag are from.
    places: Vec<(String, String)>,
}

impl Settings {
    /// Adds the value of a variable: of several values with commas between them.
    fn add_text(&mut self, flag: &Arg, value: &OsStr) -> Result<(), Refusal> {
        let place = format!("{PREFIX}{}", key(flag).to_uppercase());
        match (flag.get_action(), value.to_str()) {
            (ArgAction::SetTrue, Some("true" | "1")) => self.push(flag, None),
            (ArgAction::SetTrue, Some("false" | "0")) => {}
            (ArgAction::SetTrue, _) => {
                return Err(Refusal::Kind { place, name: key(flag), wanted: "true or false" });
            }
            (ArgAction::Append, Some(text)) => {
                text.split(',').for_each(|one| self.push(flag, Some(OsStr::new(one.trim()))));
            }
            _ => self.push(flag, Some(value)),
        }
        self.place(flag, place);
        Ok(())
    }

    /// Adds the value of a key.
    fn add_value(&mut self, flag: &Arg, value: &Value, file: &Path) -> Result<(), Refusal> {
        let is_switch = matches!(flag.get_action(), ArgAction::SetTrue);
        let is_list = matches!(flag.get_action(), ArgAction::Append);
        let refused = |wanted| {
            let place = file.display().to_string();
            Refusal::Kind { place, name: key(flag), wanted }
        };
        if is_switch {
            if value.as_bool().ok_or_else(|| refused("true or false"))? {
                self.push(flag, None);
            }
        } else {
            let wanted = if is_list { "a text or a list of texts" } else { "a text or a number" };
            let values = match value {
                Value::Array(values) if is_list => values.as_slice(),
                value => std::slice::from_ref(value),
            };
            for value in values {
                let value = plain(value).ok_or_else(|| refused(wanted))?;
                self.push(flag, Some(OsStr::new(&value)));
            }
        }
        self.place(flag, file.display().to_string());
        Ok(())
    }

    fn push(&mut self, flag: &Arg, value: Option<&OsStr>) {
        let mut argument = OsString::from(format!("--{}", flag.get_long().unwrap_or_default()));
        if let Some(value) = value {
            argument.push("=");
            argument.push(value);
        }
        self.arguments.push(argument);
    }

    fn place(&mut self, flag: &Arg, place: String) {
        self.places.push((flag.get_long().unwrap_or_default().to_owned(), place));
    }

    /// Clap's refusal in one line, with the places of the flags that it names.
    fn refusal(&self, error: &clap::Error) -> Refusal {
        let reason = error.to_string().lines().next().unwrap_or("").replacen("error: ", "", 1);
        let named = |flag: &str| {
            let after = |text: &str| text.starts_with([' ', '\'']);
            reason.split(&format!("'--{flag}")).skip(1).any(after)
        };
        // A refusal that names none may be due to any.
        let names_none = !self.places.iter().any(|(flag, _)| named(flag));
        let blamed = self.places.iter().filter(|(flag, _)| names_none || named(flag));
        let places: BTreeSet<&str> = blamed.map(|(_, place)| place.as_str()).collect();
        let place = places.into_iter().collect::<Vec<_>>().join(" and ");
        Refusal::Value { reason, place }
    }
}

/// A value as it would be typed.
fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The flags of a command.
fn flags<'a>(command: &'a Command, name: &str) -> impl Iterator<Item = &'a Arg> {
    let flags = command.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
    flags.filter(|flag| {
        let is_value = !matches!(
            flag.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        );
        flag.get_long().is_some() && is_value && !flag.is_hide_set()
    })
}

/// A flag as a key.
fn key(flag: &Arg) -> String {
    flag.get_long().unwrap_or_default().replace('-', "_")
}

fn is_typed(matches: &ArgMatches, flag: &Arg) -> bool {
    matches.value_source(flag.get_id().as_str()) == Some(ValueSource::CommandLine)
}

/// All keys of a peer, whichever command it began with.
fn all_keys(command: &Command) -> Vec<String> {
    COMMANDS.iter().flat_map(|name| flags(command, name)).map(key).collect()
}

/// The variables that are flags, by key. One that is set to nothing is none.
fn variables(
    command: &Command,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<BTreeMap<String, OsString>, Refusal> {
    let known = all_keys(command);
    let mut found = BTreeMap::new();
    for (name, value) in environment.into_iter().filter(|(_, value)| !value.is_empty()) {
        let Some(name) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let key = name.to_lowercase();
        if known.contains(&key) {
            found.insert(key, value);
        } else if let Some(meant) = closest(&key, known.iter().map(String::as_str)) {
            return Err(Refusal::Unknown {
                place: "the environment".to_owned(),
                name: format!("{PREFIX}{name}"),
                hint: format!(": did you mean `{PREFIX}{}`?", meant.to_uppercase()),
            });
        }
    }
    Ok(found)
}

/// The keys of the file, if it is there.
fn keys(command: &Command, path: &Path) -> Result<Table, Refusal> {
    let text = match read_text(path, limits::MANIFEST) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Table::new()),
        read => read.map_err(|source| Refusal::Unreadable { path: path.to_owned(), source })?,
    };
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        let reason = format!("line {line}: {}", error.message());
        Refusal::Malformed { path: path.to_owned(), reason }
    })?;
    let known = all_keys(command);
    let is_known = |name: &String| name != DATA_DIR && known.contains(name);
    if let Some(name) = table.keys().find(|name| !is_known(name)) {
        let meant = closest(name, known.iter().map(String::as_str)).filter(|meant| meant != name);
        return Err(Refusal::Unknown {
            place: path.display().to_string(),
            name: name.clone(),
            hint: meant.map_or_else(String::new, |meant| format!(": did you mean `{meant}`?")),
        });
    }
    Ok(table)
}

/// Adds arguments at the end of the flags.
fn insert(mut typed: Vec<OsString>, more: Vec<OsString>) -> Vec<OsString> {
    let end = typed.iter().position(|argument| argument == "--").unwrap_or(typed.len());
    typed.splice(end..end, more);
    typed
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cli::{Command, JoinArgs, StageChoice};

    const NOTHING: [(&str, &str); 0] = [];

    /// The options of a line, with variables and a file.
    fn parsed<const N: usize>(
        line: &str,
        variables: [(&str, &str); N],
        file: &str,
    ) -> Result<Cli, Refusal> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join(FILE), file).expect("it can be written");
        let typed = line.split(' ').map(OsString::from);
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let data_dir = [OsString::from("--data-dir"), folder.path().into()];
        parse(typed.chain(data_dir), variables)
    }

    fn joins<const N: usize>(line: &str, variables: [(&str, &str); N], file: &str) -> JoinArgs {
        match parsed(line, variables, file).map(|cli| cli.command) {
            Ok(Command::Join(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    fn refusal<const N: usize>(line: &str, variables: [(&str, &str); N], file: &str) -> String {
        parsed(line, variables, file).expect_err("it is refused").to_string()
    }

    #[test]
    fn flags_come_from_the_line_then_variables_then_the_file() {
        let file = "stage = 1\nno_mdns = true\nhttp = \"none\"\nprice = 0.5\nlisten = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\nout = \"of start\"\n";
        let variables =
            [("SHOAL_STAGE", "2"), ("SHOAL_HTTP_HOST", "a.example, b.example"), ("SHOAL_NAME", "")];
        let args = joins("shoal join @a --stage 3", variables, file);
        let span = |text: &str| StageChoice::Span(text.parse().expect("it is a stage"));
        assert_eq!(args.choice(), span("3"));
        assert_eq!(args.peer.http_hosts, ["a.example", "b.example"]);
        assert!(args.peer.no_mdns && args.listen_at().len() == 2);
        let args = joins("shoal join @a", [("SHOAL_STAGE", "2"), ("SHOAL_NO_MDNS", "false")], file);
        assert_eq!(args.choice(), span("2"));
        assert!(!args.peer.no_mdns, "a variable goes before the file");
        let Ok(Cli { command: Command::Start(args), .. }) =
            parsed("shoal start run.toml", NOTHING, file)
        else {
            panic!("it is accepted")
        };
        assert_eq!(args.out, Some("of start".into()));
    }

    #[test]
    fn variables_of_others_are_left_alone() {
        let others = ["ARGS", "ADDRESS", "IMAGE", "DIE_AT", "MKL_AVX512", "PORT", "SERVICE_HOST"];
        let others = others.map(|name| (format!("{PREFIX}{name}").into(), "x".into()));
        let typed = "shoal join @a --data-dir nowhere".split(' ').map(OsString::from);
        assert!(parse(typed, others).is_ok());
    }

    #[test]
    fn other_commands_read_no_file() {
        assert!(parsed("shoal status", [("SHOAL_STAGE", "x")], "nonsense").is_ok());
    }

    #[test]
    fn wrong_settings_are_named_with_their_place() {
        let join = "shoal join @a";
        let cases = [
            (refusal(join, NOTHING, "memroy = 1"), "did you mean `memory`?"),
            (refusal(join, NOTHING, "colour = 1"), "there is no flag for `colour`"),
            (refusal(join, NOTHING, "data_dir = \"x\""), "there is no flag for `data_dir`"),
            (refusal(join, NOTHING, "anchor = 1"), "`anchor` takes true or false"),
            (refusal(join, NOTHING, "memory = true"), "`memory` takes a text or a number"),
            (refusal(join, NOTHING, "memory = [\"1GiB\"]"), "`memory` takes a text or a number"),
            (refusal(join, NOTHING, "listen = [1, true]"), "`listen` takes a text or a list"),
            (refusal(join, NOTHING, "memory = \"1\nx"), "peer.toml: line 2"),
            (refusal(join, NOTHING, "memory = \"much\""), "peer.toml)"),
            (
                refusal(join, NOTHING, "memory = \"much\""),
                "invalid value 'much' for '--memory <SIZE>'",
            ),
            (refusal(join, [("SHOAL_MEMORY", "much")], ""), "(from SHOAL_MEMORY)"),
            (refusal(join, [("SHOAL_MEMORY", "much")], "name = \"a\""), "(from SHOAL_MEMORY)"),
            (refusal(join, [("SHOAL_MEMROY", "1")], ""), "did you mean `SHOAL_MEMORY`?"),
            (refusal(join, [("SHOAL_ANCHOR", "maybe")], ""), "`anchor` takes true or false"),
            (refusal("shoal join @a --observer", NOTHING, "anchor = true"), "cannot be used with"),
        ];
        for (told, wanted) in cases {
            assert!(told.contains(wanted) && !told.contains('\n'), "{told} lacks {wanted}");
        }
    }
}
