//! Generates the reference of a run's configuration.

use std::fmt::Write as _;

use shoal_formats::config::RunConfig;

const HEAD: &str = "# Configuration\n\n\
`shoal init` writes a `run.toml` with these keys. All of them are part of the run: peers train together only if\n\
every value is equal. Settings of a single peer are flags ([commands.md](commands.md)). The error for an unknown\n\
key or a wrong type names the line; the error for a missing key or a value out of range names the key and, where\n\
it helps, the range.\n\n\
`cargo run -p shoal-node --example reference` generates this page from the file that `shoal init` writes.\n";

/// The whole page.
pub(crate) fn text() -> String {
    let mut text = HEAD.to_owned();
    // Comments above a section or a key.
    let mut above: Vec<&str> = Vec::new();
    let file = RunConfig::default().to_toml();
    // Comments before the first section describe the file.
    let sections = file.find("\n\n").map_or(&file[..], |end| &file[end..]);
    for line in sections.lines() {
        let key = key_in(line);
        let unset = line.strip_prefix("# ").and_then(key_in);
        // A section that is not there by default is a comment.
        let bare = line.strip_prefix("# ").unwrap_or(line);
        if let Some(name) = bare.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            write!(text, "\n## [{name}]\n\n").expect("a String accepts writes");
            if !above.is_empty() {
                write!(text, "{}\n\n", above.join("\n")).expect("a String accepts writes");
            }
            text.push_str("|key|default|meaning|\n|---|---|---|\n");
            above.clear();
        } else if let Some((name, value)) = key {
            let (value, comment) = value.split_once(" # ").unwrap_or((value, ""));
            text.push_str(&row(name, &format!("`{}`", value.trim()), &above, comment));
            above.clear();
        } else if let Some((name, value)) = unset {
            let (value, comment) = value.split_once(" # ").unwrap_or((value, ""));
            let example = format!("`{name} = {}` {comment}", value.trim());
            text.push_str(&row(name, "none", &above, example.trim_end()));
            above.clear();
        } else if let Some(comment) = line.strip_prefix("# ") {
            above.push(comment);
        }
    }
    text
}

/// The key and the value that a line sets.
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
    format!("|`{name}`|{default}|{}|\n", meaning.join(" ").replace('|', "\\|"))
}
