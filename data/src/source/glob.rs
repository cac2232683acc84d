//! Patterns of paths.

use std::path::PathBuf;

use globset::{GlobBuilder, GlobMatcher};

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

/// The paths that match a pattern. `*` stands for any characters of one component, `?` for one, `[abc]`, `[a-z]` and `[!a-z]`
/// for one of a set, a component `**` for any number of components, and `{a,b}` for one of several texts. Where a bracket is
/// left open, all brackets stand for themselves.
pub(super) struct Paths(GlobMatcher);

impl Paths {
    pub(super) fn matching(pattern: &str) -> Self {
        let text = pattern.strip_prefix("./").unwrap_or(pattern);
        let glob = |text: &str| {
            GlobBuilder::new(text).literal_separator(true).backslash_escape(false).build()
        };
        let glob = glob(text).or_else(|_| glob(&escape(text)));
        Self(glob.expect("text without brackets is a pattern").compile_matcher())
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.0.is_match(path.strip_prefix("./").unwrap_or(path))
    }
}

/// A pattern whose brackets stand for themselves.
fn escape(pattern: &str) -> String {
    pattern.replace('[', "[[]").replace('{', "[{]").replace('}', "[}]")
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
            ("a[b*.{x", "a[bc.{x"),
            ("/data/*-of-*", "/data/1-of-2"),
            ("a.{json,jsonl}", "a.jsonl"),
        ];
        for (pattern, path) in yes {
            assert!(Paths::matching(pattern).has(path), "{pattern} {path}");
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
            assert!(!Paths::matching(pattern).has(path), "{pattern} {path}");
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
