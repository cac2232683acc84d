//! The metrics in a query.

use std::collections::BTreeSet;

/// The names of Shoal's metrics in a text, including recorded ones: words with `shoal_` at
/// their beginning or after a colon.
pub(crate) fn names(text: &str) -> BTreeSet<String> {
    let in_name = |character: char| character.is_ascii_alphanumeric() || "_:".contains(character);
    text.split(|character| !in_name(character))
        .filter(|word| word.starts_with("shoal_") || word.contains(":shoal_"))
        .map(|word| word.trim_end_matches(':').to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_queries() {
        let query = r#"max by (run) (rate(shoal_a_total{run="shoal"}[5m])) / run:shoal_b:max"#;
        let found: Vec<_> = names(query).into_iter().collect();
        assert_eq!(found, ["run:shoal_b:max", "shoal_a_total"]);
    }
}
