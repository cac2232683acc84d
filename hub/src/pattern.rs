//! Patterns that select files of a repository.

use std::fmt;

use globset::{GlobBuilder, GlobMatcher};

/// A path, a folder or a pattern, which selects files of a repository.
///
/// `*` stands for any characters, `/` included, as in Python's `huggingface_hub`; `?` stands for
/// one character, `[abc]` and `[!abc]` for one of a set, and `{a,b}` for one of several texts. A pattern that names a folder
/// selects all files below it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pattern(String);

impl Pattern {
    /// A pattern of this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether the pattern selects the file at a path. It is read once for all paths.
    pub fn selects(&self) -> impl Fn(&str) -> bool + '_ {
        let folder = self.0.trim_end_matches('/');
        let glob = self.glob();
        move |path| {
            path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                || glob.as_ref().is_some_and(|glob| glob.is_match(path))
        }
    }

    /// What it stands for, unless a bracket is left open.
    fn glob(&self) -> Option<GlobMatcher> {
        let glob =
            GlobBuilder::new(&self.0).literal_separator(false).backslash_escape(false).build();
        glob.ok().map(|glob| glob.compile_matcher())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_selects_files_folders_and_globs() {
        for (pattern, path, selected) in [
            ("config.json", "config.json", true),
            ("config.json", "config.json.bak", false),
            ("data", "data/a.parquet", true),
            ("data/", "data/a.parquet", true),
            ("data", "database", false),
            ("*.safetensors", "sub/model.safetensors", true),
            ("model-?.bin", "model-1.bin", true),
            ("model-?.bin", "model-12.bin", false),
            ("model-[0-3].bin", "model-2.bin", true),
            ("model-[!0-3].bin", "model-2.bin", false),
            ("a[b", "a[b", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("*", "", true),
            ("**", "any/thing", true),
        ] {
            assert_eq!(Pattern::new(pattern).selects()(path), selected, "{pattern} {path}");
        }
    }

    #[test]
    fn many_stars_take_no_exponential_time() {
        let pattern = Pattern::new("*a".repeat(200));
        assert!(!pattern.selects()(&"a".repeat(199)));
        assert!(!pattern.selects()(&format!("{}b", "a".repeat(5000))));
    }
}
