//! Checkpoints of another run in the way of a run's own.

use serde_json::Value;
use shoal_protocol::ids::RunId;
use shoal_protocol::manifest::Manifest;

/// Most differences between two manifests that an error names.
const NAMED: usize = 4;

/// Another run has its checkpoints where those of this run are to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} belongs to another run, {other}, and this one is {run}: {difference}; give another folder (--out, --archive), \
     move that one away, or go on with the other run's run.toml"
)]
pub(crate) struct OtherRun {
    /// The checkpoint that was found.
    place: String,
    other: RunId,
    run: RunId,
    /// What differs between the two.
    difference: String,
}

impl OtherRun {
    /// Refuses a checkpoint of another run.
    ///
    /// # Errors
    /// If its manifest is that of another run.
    pub(crate) fn refuse(place: &str, found: &Manifest, mine: &Manifest) -> Result<(), Self> {
        let (other, run) = (found.run_id(), mine.run_id());
        if other == run {
            return Ok(());
        }
        Err(Self { place: place.to_owned(), other, run, difference: difference(found, mine) })
    }
}

/// Names what differs between two manifests.
pub(crate) fn difference(theirs: &Manifest, mine: &Manifest) -> String {
    let mut all = Vec::new();
    if let (Ok(theirs), Ok(mine)) = (serde_json::to_value(theirs), serde_json::to_value(mine)) {
        compare("", &theirs, &mine, &mut all);
    }
    let more = all.len().saturating_sub(NAMED);
    all.truncate(NAMED);
    match (all.is_empty(), more) {
        (true, _) => "its text is not the same".to_owned(),
        (_, 0) => all.join(", "),
        _ => format!("{}, and {more} more", all.join(", ")),
    }
}

/// Adds the keys at which two values differ, with both values where they are short.
fn compare(key: &str, theirs: &Value, mine: &Value, out: &mut Vec<String>) {
    if let (Value::Object(theirs), Value::Object(mine)) = (theirs, mine) {
        let keys: std::collections::BTreeSet<&String> = theirs.keys().chain(mine.keys()).collect();
        for name in keys {
            let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let value =
                |of: &serde_json::Map<String, Value>| of.get(name).cloned().unwrap_or_default();
            compare(&path, &value(theirs), &value(mine), out);
        }
    } else if theirs != mine {
        let short = |value: &Value| match value {
            Value::Number(_) | Value::Bool(_) | Value::Null => Some(value.to_string()),
            Value::String(text) if text.len() < 32 => Some(value.to_string()),
            _ => None,
        };
        out.push(match (short(theirs), short(mine)) {
            (Some(theirs), Some(mine)) => format!("{key} is {theirs} there and {mine} here"),
            _ => format!("{key} differs"),
        });
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::example;

    use super::*;

    #[test]
    fn what_differs_is_named_with_both_values() {
        let (theirs, mut mine) = (example::small(), example::small());
        assert_eq!(OtherRun::refuse("out", &theirs, &mine), Ok(()));
        mine.training.steps = theirs.training.steps + 7;
        let error = OtherRun::refuse("out", &theirs, &mine).expect_err("another run").to_string();
        let steps = (theirs.training.steps, mine.training.steps);
        let named = format!("training.steps is {} there and {} here", steps.0, steps.1);
        assert!(
            error.contains(&named) && error.starts_with("out belongs to another run"),
            "{error}"
        );
        assert!(!error.contains("seed"), "{error}");
        mine.training.seed += 1;
        let error = OtherRun::refuse("out", &theirs, &mine).expect_err("another run").to_string();
        assert!(error.contains("training.seed is"), "{error}");
    }
}
