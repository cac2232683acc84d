//! `shoal import --check`: does transformers compute the same logits and token ids from a model as this program does?
//!
//! [`python`] runs transformers, [`difference`] compares logits. Without a Python that has transformers, the losses of the
//! tokens are printed, for a comparison by hand.

mod difference;
mod python;

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use shoal_data::tokenizer::TextTokenizer;
use shoal_engine::DeviceChoice;

use self::difference::{Difference, losses};
use self::python::{Answer, PythonError, Request};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;
use crate::text_model;

/// Tokens whose logits are compared.
const TOKENS: usize = 64;

/// The largest difference of a logit, as a share of the largest logit, that counts as equal. In f32 two orders of the same
/// sums differ by about 1e-6, and by 1e-5 in a large model.
const TOLERANCE: f64 = 1e-4;

/// The time that Python may take. A model of 10^10 weights takes a disk some minutes.
const DEADLINE: Duration = Duration::from_secs(30 * 60);

/// The text whose first tokens are read: long enough for 65 tokens of any tokenizer.
const TEXT: &str = "\
The heron waits at the river while small fish swim past the reeds, and the water is calm. At 7:45 a boat with red sails
left the harbour before the storm; nobody saw it return that winter. Its owner, a widow of sixty-three years, had sold
two nets, nine lines and an old anchor for $1,250.50 to a merchant from the north. \"Will you go back?\" he asked. She
laughed, because the answer was written in the sand: no one goes back, and everybody returns.

def count(words):
    return {word: words.count(word) for word in set(words)}  # quadratic, but short
";

/// Texts whose ids are compared, beside [`TEXT`].
const TEXTS: [&str; 8] = [
    "Hello, world!",
    "  two spaces before,\tand a tab\r\n\r\nbehind\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "日本語の文章と漢字。 한국어 문장입니다. नमस्ते दुनिया",
    "Съешь же ещё этих мягких французских булок 🐟🐠👩‍👩‍👧‍👦",
    "3.14159 x 1000000 = 3,141,590; 0xFF, 1e-6 and 2024-02-29",
    "if (a <= b && c != d) { return a->b[0] + \"\\n\"; }",
    "I'm sure they'd say it's what we've seen, e\u{301} \u{a0} ﬁ ½ ∑",
];

/// Compares a base with its model in Hugging Face's format, and prints the result under a name.
///
/// # Errors
/// If they differ (exit code 1), the base is damaged, or the Python that was named gives no comparison.
pub(crate) fn run(
    name: &str,
    base: &Path,
    model: &Path,
    python: Option<&Path>,
) -> anyhow::Result<()> {
    let mut generator = text_model::generator(base, None, DeviceChoice::Cpu)?;
    let tokenizer = match base.join("tokenizer.json").exists() {
        true => Some(TextTokenizer::load(base).exit_with(Exit::Corrupt)?),
        false => None,
    };
    let vocabulary = generator.vocabulary();
    let ids = ids_to_read(tokenizer.as_ref(), vocabulary, generator.positions())?;
    let tokens = &ids[..ids.len().min(TOKENS).min(generator.positions())];
    let ours = generator.logits(tokens)?;
    // Two models in memory would be one too many.
    drop(generator);
    let texts = if tokenizer.is_some() { [&[TEXT], &TEXTS[..]].concat() } else { Vec::new() };
    let folder = tempfile::Builder::new().prefix("shoal-check-").tempdir()?;
    let logits = folder.path().join("logits");
    let model = fs::canonicalize(model).with_context(|| model.display().to_string())?;
    let request = Request { model: &model, tokens, texts: &texts, logits: &logits };
    let answer = match ask(python, &request, folder.path())? {
        Ok(answer) => answer,
        Err(reasons) => {
            print_losses(name, &ids, &losses(&ours, &ids, vocabulary as usize), &reasons);
            return Ok(());
        }
    };
    let theirs = fs::read(&logits).with_context(|| logits.display().to_string())?;
    let shape = [tokens.len(), vocabulary as usize];
    if answer.shape != shape || theirs.len() != 4 * ours.len() {
        bail!("transformers has logits of the shape {:?} instead of {shape:?}", answer.shape);
    }
    let difference = Difference::of(&ours, &theirs, shape[1]);
    report(name, &answer.version, &difference, tokens)?;
    let encoded = match &tokenizer {
        Some(tokenizer) => compare_ids(tokenizer, &texts, &answer)?,
        None => "no tokenizer.json: fixed ids were read, and no texts compared".to_owned(),
    };
    outln!("{name}: {encoded}");
    Ok(())
}

/// The tokens to read and the one behind them: those of a text, or some of the vocabulary without a tokenizer.
fn ids_to_read(
    tokenizer: Option<&TextTokenizer>,
    vocabulary: u32,
    positions: usize,
) -> anyhow::Result<Vec<u32>> {
    let count = TOKENS.min(positions) + 1;
    let mut ids = match tokenizer {
        Some(tokenizer) => tokenizer.encode(TEXT, true)?,
        None => (0..count as u32).map(|place| (place * 7919 + 11) % vocabulary).collect(),
    };
    ids.truncate(count);
    // A tokenizer may have more tokens than the model has rows.
    ids.retain(|id| *id < vocabulary);
    match ids.is_empty() {
        true => Err(anyhow!("the tokenizer has no token of the model for an English text")),
        false => Ok(ids),
    }
}

/// Asks the named Python, or those that may be there: the answer, or why none of them has transformers.
fn ask(
    named: Option<&Path>,
    request: &Request<'_>,
    folder: &Path,
) -> anyhow::Result<Result<Answer, Vec<PythonError>>> {
    if let Some(python) = named {
        let answer = python::ask(python, request, folder, DEADLINE).or_else(|error| {
            let exit = if error.is_of_python() { Exit::Usage } else { Exit::Failed };
            Err(error).exit_with(exit)
        });
        return answer.map(Ok);
    }
    let mut reasons = Vec::new();
    for python in python::candidates() {
        match python::ask(&python, request, folder, DEADLINE) {
            Ok(answer) => return Ok(Ok(answer)),
            Err(error) if error.is_of_python() => reasons.push(error),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Err(reasons))
}

/// Prints that the logits are equal, or fails where they are not.
fn report(name: &str, version: &str, found: &Difference, tokens: &[u32]) -> anyhow::Result<()> {
    let (share, count) = (found.share(), tokens.len());
    let measure = format!(
        "largest difference of a logit of {count} tokens, relative to the largest logit, {:.3}; \
         up to {TOLERANCE:.0e} is equal",
        found.largest_logit
    );
    if share <= TOLERANCE {
        outln!("{name}: equal to transformers {version}: {} ({measure})", short(share));
        return Ok(());
    }
    bail!(
        "{name} is not equal to transformers {version}: {} ({measure}). After token {} ({}) the logit of {} is {} here \
         and {} there. If the base or the model has changed since the import, import the model again; otherwise report \
         its config.json",
        short(share),
        found.row,
        tokens[found.row],
        found.column,
        found.ours,
        found.theirs,
    )
}

/// A number with one digit, `3e-6`.
fn short(share: f64) -> String {
    if share == 0.0 { "0".to_owned() } else { format!("{share:.0e}") }
}

/// Compares the ids of texts; the result in words.
fn compare_ids(
    tokenizer: &TextTokenizer,
    texts: &[&str],
    answer: &Answer,
) -> anyhow::Result<String> {
    if let Some(reason) = &answer.no_tokenizer {
        return Ok(format!("the ids of texts were not compared: {reason}"));
    }
    if answer.ids.len() != texts.len() || answer.plain.len() != texts.len() {
        bail!("transformers has encoded {} of {} texts", answer.ids.len(), texts.len());
    }
    let mut others = 0;
    for (text, (theirs, plain)) in texts.iter().zip(answer.ids.iter().zip(&answer.plain)) {
        let ours = tokenizer.encode(text, true)?;
        if ours == *theirs {
            continue;
        }
        // A class of transformers may leave out steps of tokenizer.json, which the model was trained with.
        if ours == *plain {
            others += 1;
            continue;
        }
        bail!(
            "the tokens of {text:?} are not equal to those of transformers {}: {ours:?} here and {theirs:?} there; \
             report the files of the tokenizer",
            answer.version
        );
    }
    let count = texts.len();
    Ok(match others {
        0 => format!("{count} texts have the token ids of transformers"),
        _ => format!(
            "{} of {count} texts have the token ids of transformers, and {others} those of tokenizer.json alone, whose \
             steps its class leaves out",
            count - others
        ),
    })
}

/// Prints the loss of each token, and what would give the comparison.
fn print_losses(name: &str, ids: &[u32], losses: &[f64], reasons: &[PythonError]) {
    outln!("{name}: not compared with transformers, as no Python has it:");
    for reason in reasons {
        outln!("  {reason}");
    }
    let mean = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    outln!("{name}: tokens, and the loss of each after those before it, in nats (mean {mean:.4}):");
    outln!("  {} (first)", ids[0]);
    for (ids, losses) in ids[1..].chunks(8).zip(losses.chunks(8)) {
        let pairs = ids.iter().zip(losses).map(|(id, loss)| format!("{id} {loss:.4}"));
        outln!("  {}", pairs.collect::<Vec<_>>().join("  "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ids: &[u32], plain: &[u32]) -> Answer {
        Answer {
            version: "5.0".to_owned(),
            shape: [1, 1],
            ids: vec![ids.to_vec()],
            plain: vec![plain.to_vec()],
            no_tokenizer: None,
        }
    }

    /// A tokenizer with a token for each of two words.
    fn tokenizer(folder: &Path) -> TextTokenizer {
        let json = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}}"#;
        fs::write(folder.join("tokenizer.json"), json).expect("writable");
        TextTokenizer::load(folder).expect("a tokenizer")
    }

    #[test]
    fn ids_are_those_of_transformers_or_of_the_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tokenizer = tokenizer(folder.path());
        let of = |answer: &Answer| compare_ids(&tokenizer, &["a b"], answer);
        let equal = of(&answer(&[0, 1], &[0, 1])).expect("equal");
        assert_eq!(equal, "1 texts have the token ids of transformers");
        let plain = of(&answer(&[7], &[0, 1])).expect("those of the file");
        assert!(plain.contains("0 of 1") && plain.contains("1 those of tokenizer.json"), "{plain}");
        let error = of(&answer(&[7], &[8])).expect_err("neither").to_string();
        assert!(error.contains("[0, 1] here and [7] there"), "{error}");
        let none = Answer { no_tokenizer: Some("no".to_owned()), ..answer(&[], &[]) };
        assert_eq!(of(&none).expect("a note"), "the ids of texts were not compared: no");
        let short = Answer { ids: Vec::new(), ..answer(&[], &[]) };
        assert!(of(&short).expect_err("no ids").to_string().contains("0 of 1 texts"));
    }

    #[test]
    fn tokens_are_those_of_the_model() {
        let ids = ids_to_read(None, 50, 1000).expect("fixed ids");
        assert!(ids.len() == TOKENS + 1 && ids.iter().all(|id| *id < 50), "{ids:?}");
        assert_eq!(ids_to_read(None, 50, 8).expect("fixed ids").len(), 9);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tokenizer = tokenizer(folder.path());
        let ids = ids_to_read(Some(&tokenizer), 2, 64).expect("a text");
        assert_eq!(ids.len(), TOKENS + 1, "the text is long enough");
        let error = ids_to_read(Some(&tokenizer), 0, 64).expect_err("no token is known");
        assert!(error.to_string().contains("has no token of the model"), "{error}");
    }

    #[test]
    fn only_equal_logits_are_reported_as_equal() {
        let base = "base";
        let difference = |ours: [f32; 2]| {
            let theirs: Vec<u8> = [1.0f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
            Difference::of(&ours, &theirs, 2)
        };
        report(base, "5.0", &difference([1.0, -2.0001]), &[4]).expect("within the tolerance");
        let error = report(base, "5.0", &difference([1.0, -2.1]), &[4]).expect_err("not equal");
        let text = error.to_string();
        assert!(text.contains("is not equal to transformers 5.0: 5e-2"), "{text}");
        assert!(
            text.contains("After token 0 (4) the logit of 1 is -2.1 here and -2 there"),
            "{text}"
        );
        let broken = report(base, "5.0", &difference([f32::NAN, -2.0]), &[4]);
        assert!(broken.expect_err("not a number").to_string().contains("NaN here"));
    }
}
