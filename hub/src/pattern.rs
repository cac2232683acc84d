//! Patterns that select files of a repository.

use std::fmt;

/// A path, a folder or a pattern with `*` and `?`, which selects files of a repository.
///
/// `*` stands for any characters, `/` included, as in Python's `huggingface_hub`; `?` stands for
/// one character. A pattern that names a folder selects all files below it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pattern(String);

impl Pattern {
    /// A pattern of this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether the pattern selects the file at this path.
    pub fn matches(&self, path: &str) -> bool {
        let folder = self.0.trim_end_matches('/');
        path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            || matches(self.0.as_bytes(), path.as_bytes())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Matches in time proportional to the product of the lengths: on a mismatch, only the last `*`
/// takes one byte more.
fn matches(pattern: &[u8], path: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while from < path.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(&byte) if byte == b'?' || byte == path[from] => {
                at += 1;
                from += 1;
            }
            _ => {
                let Some((star_at, taken)) = star else { return false };
                star = Some((star_at, taken + 1));
                at = star_at + 1;
                from = taken + 1;
            }
        }
    }
    pattern[at..].iter().all(|&byte| byte == b'*')
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
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("*", "", true),
            ("**", "any/thing", true),
        ] {
            assert_eq!(Pattern::new(pattern).matches(path), selected, "{pattern} {path}");
        }
    }

    #[test]
    fn many_stars_take_no_exponential_time() {
        let pattern = Pattern::new("*a".repeat(200));
        assert!(!pattern.matches(&"a".repeat(199)));
        assert!(!pattern.matches(&format!("{}b", "a".repeat(5000))));
    }
}
