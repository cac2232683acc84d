//! The splits of a data set, as `datasets` names them.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A part of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Split {
    /// What is to be trained on.
    Train,
    /// What is held out while a model is chosen.
    Validation,
    /// What is held out until the end.
    Test,
    /// All of them.
    All,
}

/// The words in the name of a file or folder that name a split.
const WORDS: [(&str, Split); 10] = [
    ("train", Split::Train),
    ("training", Split::Train),
    ("validation", Split::Validation),
    ("valid", Split::Validation),
    ("dev", Split::Validation),
    ("val", Split::Validation),
    ("test", Split::Test),
    ("testing", Split::Test),
    ("eval", Split::Test),
    ("evaluation", Split::Test),
];

impl Split {
    /// The split of a file, by its path in the folder of a data set: the last part that names one.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        path.iter().rev().find_map(|part| {
            let part = part.to_string_lossy().to_lowercase();
            part.split(|character: char| !character.is_alphabetic()).find_map(|word| {
                WORDS.iter().find(|(name, _)| *name == word).map(|(_, split)| *split)
            })
        })
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
            Self::All => "all",
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error of a text that names no split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no split: use train, validation, test or all")]
pub struct SplitError(String);

impl FromStr for Split {
    type Err = SplitError;

    fn from_str(text: &str) -> Result<Self, SplitError> {
        let all = [Self::Train, Self::Validation, Self::Test, Self::All];
        let found = all.into_iter().find(|split| split.name() == text);
        found.ok_or_else(|| SplitError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Split;

    #[test]
    fn splits_are_named_by_words_of_paths() {
        let of = |path: &str| Split::of(Path::new(path));
        assert_eq!(of("data/train-00000-of-00001.parquet"), Some(Split::Train));
        assert_eq!(of("my_training.v2.jsonl"), Some(Split::Train));
        assert_eq!(of("train/test_1.jsonl"), Some(Split::Test));
        assert_eq!(of("dev/a.jsonl"), Some(Split::Validation));
        assert_eq!(of("trained/contest.jsonl"), None);
    }
}
