//! The line of a value in `run.toml`, and the likely meaning of a misspelt key.

use shoal_protocol::manifest::{ManifestError, PreferenceError};

use crate::near_name::closest;

/// The line of the value that an error names, from 1. `None` if the error names none, or the value has its default.
pub(crate) fn line_of_error(text: &str, error: &ManifestError) -> Option<usize> {
    let key = match error {
        ManifestError::OutOfRange { key, .. } => key,
        ManifestError::MoreStagesThanLayers { .. } => "training.stages",
        ManifestError::NothingHeldOut { .. } => "evaluation.every",
        ManifestError::BoundaryOfOneStage => "model.boundary",
        ManifestError::Mixture(_) => "data.sources",
        ManifestError::Preference(PreferenceError::OtherReference { .. }) => "data.prepared",
        ManifestError::Preference(_) => "training.loss",
        _ => return None,
    };
    line_of_key(text, key)
}

/// The line of `section.key`, from 1.
fn line_of_key(text: &str, key: &str) -> Option<usize> {
    let (wanted, key) = key.split_once('.')?;
    let mut section = "";
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            section = name.trim();
        }
        let named = line.split_once('=').is_some_and(|(name, _)| name.trim() == key);
        if section == wanted && named {
            return Some(index + 1);
        }
    }
    None
}

/// Describes a refusal of the parser in the words of a file's author: keys instead of fields and, where a name is close
/// to one that is known, that one instead of all.
pub(crate) fn describe(message: &str) -> String {
    let message = message.replace("unknown field", "unknown key");
    let message = message.replace("missing field", "missing key");
    let Some((head, known)) = message.split_once(", expected ") else { return message };
    let given = head.split('`').nth(1);
    // Every second part is between two backquotes.
    let known = known.split('`').skip(1).step_by(2).filter(|name| !name.is_empty());
    match given.and_then(|given| closest(given, known)) {
        Some(meant) => format!("{head}: did you mean `{meant}`?"),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_is_told_the_one_that_is_meant() {
        let list = "expected one of `steps`, `epochs`, `stages`";
        let told = describe(&format!("unknown field `stpes`, {list}"));
        assert_eq!(told, "unknown key `stpes`: did you mean `steps`?");
        // What is near to none shows all.
        let told = describe(&format!("unknown field `wombat`, {list}"));
        assert_eq!(told, format!("unknown key `wombat`, {list}"));
        let told = describe("unknown variant `adam`, expected `adamw` or `sgd`");
        assert_eq!(told, "unknown variant `adam`: did you mean `adamw`?");
        assert_eq!(describe("missing field `steps`"), "missing key `steps`");
        assert_eq!(describe("unknown field `a`, expected `"), "unknown key `a`, expected `");
    }

    #[test]
    fn a_key_is_found_in_its_section() {
        let text =
            "[one]\nsteps = 1\n\n[ two ] # the second\n# steps = 2\n  steps=3\nstepsize = 4\n";
        assert_eq!(line_of_key(text, "two.steps"), Some(6));
        assert_eq!(line_of_key(text, "one.steps"), Some(2));
        assert_eq!(
            (line_of_key(text, "one.stepsize"), line_of_key(text, "three.steps")),
            (None, None)
        );
    }
}
