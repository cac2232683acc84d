//! Generates the reference of the commands.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory};
use shoal_node::cli::Cli;
use shoal_node::exit::Exit;

/// The commands that run a peer.
const PEERS: [&str; 2] = ["start", "join"];

/// The whole page.
pub(crate) fn text() -> String {
    let mut root = Cli::command();
    // Adds global flags and `help` to the commands.
    root.build();
    let mut text = String::from(
        "# Commands\n\n`cargo run -p shoal-node --example reference` generates this page from the command \
         line. `shoal COMMAND --help`\nprints the same text, `shoal man DIR` writes it as man pages, and \
         `shoal completion SHELL` prints a completion script.\n",
    );
    text.push_str("\n## Global flags\n\n");
    flags(&mut text, root.get_arguments().filter(|arg| arg.is_global_set()));
    let shared = shared(&root);
    text.push_str(
        "\n## Flags of a peer\n\n`shoal start` and `shoal join` have these, beside their own.\n\n",
    );
    table(&mut text, &shared);
    for command in root.get_subcommands() {
        describe(&mut text, command, &shared);
    }
    write!(text, "\n## Exit codes\n\n```text\n{}\n```\n", Exit::HELP)
        .expect("a String accepts writes");
    text
}

/// Describes a command and its subcommands.
fn describe(text: &mut String, command: &Command, shared: &[String]) {
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let name = command.get_bin_name().unwrap_or(command.get_name());
    write!(text, "\n## {name}\n\n{}.\n", about.trim_end_matches('.'))
        .expect("a String accepts writes");
    if command.has_subcommands() {
        command.get_subcommands().for_each(|below| describe(text, below, shared));
        return;
    }
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").split_whitespace().collect::<Vec<_>>();
    let usage = usage.join(" ");
    text.push('\n');
    if usage != format!("{name} [OPTIONS]") {
        write!(text, "    {usage}\n\n").expect("a String accepts writes");
    }
    let is_peer = PEERS.iter().any(|peer| name == format!("shoal {peer}"));
    if !is_peer {
        return flags(text, command.get_arguments().filter(|arg| !arg.is_global_set()));
    }
    text.push_str("It also has the [flags of a peer](#flags-of-a-peer).\n\n");
    let mut own = rows(command.get_arguments().filter(|arg| !arg.is_global_set()));
    own.retain(|row| !shared.contains(row));
    table(text, &own);
}

/// The rows of the flags that all commands of a peer have.
fn shared(root: &Command) -> Vec<String> {
    let rows_of = |name: &str| {
        let command = root.find_subcommand(name).expect("the command exists");
        rows(command.get_arguments().filter(|arg| !arg.is_global_set()))
    };
    let [start, join] = PEERS.map(rows_of);
    start.into_iter().filter(|row| join.contains(row)).collect()
}

/// A table of flags and arguments.
fn flags<'a>(text: &mut String, all: impl Iterator<Item = &'a Arg>) {
    table(text, &rows(all));
}

fn rows<'a>(all: impl Iterator<Item = &'a Arg>) -> Vec<String> {
    let own =
        |arg: &&Arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str());
    all.filter(own).map(row).collect()
}

fn table(text: &mut String, rows: &[String]) {
    if !rows.is_empty() {
        text.push_str("|flag|default|meaning|\n|---|---|---|\n");
        text.extend(rows.iter().map(String::as_str));
    }
}

fn row(arg: &Arg) -> String {
    let values: Vec<String> =
        arg.get_value_names().into_iter().flatten().map(ToString::to_string).collect();
    let value = if arg.get_action().takes_values() { values.join(" ") } else { String::new() };
    let shown = match arg.get_long() {
        Some(long) => format!("--{long} {value}").trim_end().to_owned(),
        None => value,
    };
    let default: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    // The default depends on the user.
    let home = arg.get_id() == "data_dir";
    let default = if home { "~/.local/share/shoal".to_owned() } else { default.join(" ") };
    let takes = arg.get_action().takes_values() && !default.is_empty();
    let default = if takes { format!("`{default}`") } else { String::new() };
    let meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|_| arg.get_action().takes_values())
        .map(|value| {
            let help = value
                .get_help()
                .map(|help| format!(" ({})", help.to_string().trim_end_matches('.')));
            format!("`{}`{}", value.get_name(), help.unwrap_or_default())
        })
        .collect();
    let choices =
        if choices.is_empty() { String::new() } else { format!(": {}", choices.join(", ")) };
    let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let meaning = cell(&format!("{}{choices}", meaning.trim_end_matches('.')));
    format!("|`{}`|{}|{meaning}|\n", cell(&shown), cell(&default))
}
