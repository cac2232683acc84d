//! Patterns of paths.

use std::path::PathBuf;

/// Whether a text is a pattern.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// The folder in which all matches of a pattern are: its components before the first with a
/// wildcard.
pub(super) fn fixed_folder(pattern: &str) -> PathBuf {
    let wild = pattern.find(['*', '?', '[']).unwrap_or(pattern.len());
    match pattern[..wild].rfind('/') {
        Some(0) => PathBuf::from("/"),
        Some(end) => PathBuf::from(&pattern[..end]),
        None => PathBuf::from("."),
    }
}

/// Whether a path matches a pattern. `*` stands for any characters of one component, `?` for one,
/// `[abc]`, `[a-z]` and `[!a-z]` for one of a set, and a component `**` for any number of
/// components.
#[must_use]
pub fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.strip_prefix("./").unwrap_or(pattern).split('/').collect();
    let path: Vec<&str> = path.strip_prefix("./").unwrap_or(path).split('/').collect();
    // reachable[i]: the components of the pattern so far match the first i of the path.
    let mut reachable = vec![false; path.len() + 1];
    reachable[0] = true;
    for component in pattern {
        let mut next = vec![false; path.len() + 1];
        for at in 0..=path.len() {
            next[at] = if component == "**" {
                reachable[at] || at > 0 && next[at - 1]
            } else {
                at > 0 && reachable[at - 1] && component_matches(component, path[at - 1])
            };
        }
        reachable = next;
    }
    reachable[path.len()]
}

/// One part of the pattern of a component.
enum Part {
    Any,
    One,
    Character(char),
    Set { negated: bool, ranges: Vec<(char, char)> },
}

fn parts(component: &str) -> Vec<Part> {
    let characters: Vec<char> = component.chars().collect();
    let mut parts = Vec::new();
    let mut at = 0;
    while at < characters.len() {
        let character = characters[at];
        at += 1;
        parts.push(match character {
            '*' => Part::Any,
            '?' => Part::One,
            '[' => {
                // A `]` directly behind the opening belongs to the set.
                let negated = matches!(characters.get(at), Some('!' | '^'));
                let start = at + usize::from(negated);
                let end = (start + 1..characters.len()).find(|end| characters[*end] == ']');
                let Some(end) = end else {
                    parts.push(Part::Character('['));
                    continue;
                };
                at = end + 1;
                Part::Set { negated, ranges: ranges(&characters[start..end]) }
            }
            other => Part::Character(other),
        });
    }
    parts
}

fn ranges(set: &[char]) -> Vec<(char, char)> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < set.len() {
        if set.get(at + 1) == Some(&'-') && at + 2 < set.len() {
            ranges.push((set[at], set[at + 2]));
            at += 3;
        } else {
            ranges.push((set[at], set[at]));
            at += 1;
        }
    }
    ranges
}

fn component_matches(pattern: &str, text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    let mut reachable = vec![false; text.len() + 1];
    reachable[0] = true;
    for part in parts(pattern) {
        let mut next = vec![false; text.len() + 1];
        for at in 0..=text.len() {
            next[at] = if matches!(part, Part::Any) {
                reachable[at] || at > 0 && next[at - 1]
            } else {
                at > 0 && reachable[at - 1] && part.takes(text[at - 1])
            };
        }
        reachable = next;
    }
    reachable[text.len()]
}

impl Part {
    fn takes(&self, character: char) -> bool {
        match self {
            Self::Any | Self::One => true,
            Self::Character(own) => *own == character,
            Self::Set { negated, ranges } => {
                ranges.iter().any(|(from, to)| (*from..=*to).contains(&character)) != *negated
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        let yes = [
            ("*.jsonl", "a.jsonl"),
            ("a/*.jsonl", "a/b.jsonl"),
            ("./a/?.jsonl", "a/b.jsonl"),
            ("a/**/*.jsonl", "a/b.jsonl"),
            ("a/**/*.jsonl", "a/b/c/d.jsonl"),
            ("**", "a/b"),
            ("train-[0-9][0-9].parquet", "train-07.parquet"),
            ("[!a]b", "cb"),
            ("[]]b", "]b"),
            ("a[b", "a[b"),
            ("/data/*-of-*", "/data/1-of-2"),
        ];
        for (pattern, path) in yes {
            assert!(matches(pattern, path), "{pattern} {path}");
        }
        let no = [
            ("*.jsonl", "a/b.jsonl"),
            ("*.jsonl", "a.json"),
            ("a/**/x", "b/x"),
            ("[!a]b", "ab"),
            ("?", ""),
            ("a*", "/a"),
        ];
        for (pattern, path) in no {
            assert!(!matches(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn the_fixed_folder_is_before_the_first_wildcard() {
        assert_eq!(fixed_folder("a/b/*.txt"), PathBuf::from("a/b"));
        assert_eq!(fixed_folder("*.txt"), PathBuf::from("."));
        assert_eq!(fixed_folder("/*.txt"), PathBuf::from("/"));
        assert_eq!(fixed_folder("/data/x[0-9]/y"), PathBuf::from("/data"));
    }
}
