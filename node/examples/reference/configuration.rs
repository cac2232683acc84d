//! Every key of a run's configuration.

use std::fmt::Write as _;

use shoal_node::config::RunConfig;

const HEAD: &str = "# Configuration\n\n\
`shoal init` writes `run.toml`; this is what is in it, written by `cargo run -p shoal-node --example reference`\n\
from the file itself. All of it is part of the run: peers train together only where every value is the same. What\n\
one peer may choose for itself are flags ([commands.md](commands.md)). An unknown key and one of the wrong\n\
kind are refused with their line, one that lacks and a value that no run can have by name, with what would do.\n";

/// The whole document.
pub(crate) fn text() -> String {
    let mut text = HEAD.to_owned();
    // What comments above a section or a key say.
    let mut above: Vec<&str> = Vec::new();
    let file = RunConfig::default().to_toml();
    // What comes before the first section is about the file.
    let sections = file.find("\n\n").map_or(&file[..], |end| &file[end..]);
    for line in sections.lines() {
        let key = key_in(line);
        let unset = line.strip_prefix("# ").and_then(key_in);
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            write!(text, "\n## [{name}]\n\n").expect("a String takes it");
            if !above.is_empty() {
                write!(text, "{}\n\n", above.join("\n")).expect("a String takes it");
            }
            text.push_str("| key | default | meaning |\n|---|---|---|\n");
            above.clear();
        } else if let Some((name, value)) = key {
            let (value, comment) = value.split_once(" # ").unwrap_or((value, ""));
            text.push_str(&row(name, &format!("`{}`", value.trim()), &above, comment));
            above.clear();
        } else if let Some((name, value)) = unset {
            text.push_str(&row(name, "none", &above, &format!("Written as `{name} = {value}`.")));
            above.clear();
        } else if let Some(comment) = line.strip_prefix("# ") {
            above.push(comment);
        }
    }
    text
}

/// The key that a line sets, and what to.
fn key_in(line: &str) -> Option<(&str, &str)> {
    line.split_once(" = ").filter(|(name, _)| !name.contains(char::is_whitespace))
}

fn row(name: &str, default: &str, above: &[&str], comment: &str) -> String {
    let above = above.join(" ");
    let meaning = [above.as_str(), comment]
        .iter()
        .filter(|text| !text.is_empty())
        .copied()
        .collect::<Vec<_>>();
    format!("| `{name}` | {default} | {} |\n", meaning.join(" ").replace('|', "\\|"))
}
