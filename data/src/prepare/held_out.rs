//! The share of the documents that is held out unless one is given.

use super::{PrepareError, PrepareOptions};
use crate::source::{self, Container, RawContent, ReadOptions};

/// Fewest documents of which some are held out by default.
pub const FEWEST: u64 = 20;
/// Number of documents from which on [`SHARE`] is held out.
const MANY: u64 = 1000;
const SHARE: f64 = 0.01;
/// Of fewer than [`MANY`] documents, every twentieth is held out.
const ONE_OF: u64 = 20;

/// The share that is held out where no other is given: none of fewer than [`FEWEST`] documents, one in
/// twenty of fewer than a thousand, and one in a hundred of more. At most a thousand rows are read.
///
/// # Errors
/// If a source cannot be read.
pub fn default_held_out(options: &PrepareOptions) -> Result<f64, PrepareError> {
    let documents = count(options)?;
    if documents >= MANY {
        return Ok(SHARE);
    }
    if documents < FEWEST {
        return Ok(0.0);
    }
    let mut fractions: Vec<f64> = (0..documents).map(PrepareOptions::fraction).collect();
    fractions.sort_by(f64::total_cmp);
    // The share that holds out exactly this number of documents.
    Ok(fractions[(documents / ONE_OF) as usize])
}

/// Documents of the sources, up to [`MANY`]; a text file is one.
fn count(options: &PrepareOptions) -> Result<u64, PrepareError> {
    let read = ReadOptions { line_bytes: options.line_bytes, ..ReadOptions::default() };
    let files = source::find(&options.sources, options.split.as_ref())?.files;
    let kind = source::detect(&files, options.format, &read)?;
    let mut documents = 0;
    for file in &files {
        if file.container == Container::Text {
            documents += 1;
        } else {
            for row in source::open(file, kind, 0, &read)? {
                documents += u64::from(!matches!(row?.content, RawContent::Block { .. }));
                if documents >= MANY {
                    break;
                }
            }
        }
        if documents >= MANY {
            break;
        }
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_documents_are_held_out_in_an_exact_number() {
        let folder = tempfile::tempdir().expect("writable");
        let path = folder.path().join("a.jsonl");
        let held_out = |documents: usize| {
            std::fs::write(&path, "{\"text\": \"a\"}\n".repeat(documents)).expect("writable");
            let source = path.to_str().expect("UTF-8").to_owned();
            let mut options = PrepareOptions::new(vec![source], "base".into(), 8);
            options.held_out = default_held_out(&options).expect("readable");
            (0..documents as u64).filter(|number| options.holds_out(*number)).count()
        };
        assert_eq!([0, 12, 19].map(held_out), [0; 3]);
        assert_eq!([20, 39, 40, 100, 999].map(held_out), [1, 1, 2, 5, 49]);
        assert!((10..60).contains(&held_out(3000)));
    }
}
