//! `shoal data reference`: adds a base's log-probabilities to prepared pairs.

use std::num::NonZeroUsize;
use std::ops::Range;

use anyhow::anyhow;
use shoal_data::Class;
use shoal_data::pack::Row;
use shoal_data::prepared::Index;
use shoal_data::reference::{ReferenceError, add_reference};
use shoal_engine::{BaseIndex, Device, EngineError, Scorer};

use crate::cli::DataReferenceArgs;
use crate::exit::{Exit, ExitWith};
use crate::progress;
use crate::terminal::outln;

/// Writes the pairs again, with the log-probability of each completion.
///
/// # Errors
/// If the data is no pairs, the base is another or damaged, or a file cannot be written.
pub(super) fn run(args: &DataReferenceArgs) -> anyhow::Result<()> {
    let index = Index::read(&args.data).exit_with(Exit::Usage)?;
    let (base, name) = BaseIndex::read(&args.model).exit_with(Exit::Usage)?;
    let tokenizer = base.others.iter().find(|file| file.name == "tokenizer.json");
    if tokenizer.is_some_and(|file| file.hash != index.tokenizer) {
        let folder = args.data.display();
        let problem = anyhow!("{folder} was prepared with another tokenizer than the base's");
        return Err(problem).exit_with(Exit::Usage);
    }
    let dtype = args.dtype.into();
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let device = Device::open(args.device, threads).exit_with(Exit::Usage)?;
    let scorer =
        Scorer::open(&args.model, index.context, dtype, device).exit_with(Exit::Corrupt)?;
    let bar = progress::row_bar("reference", index.train_totals.rows + index.held_out_totals.rows);
    let added = add_reference(&args.data, &args.out, (name.index, dtype), &mut |row| {
        let found = log_probabilities(&scorer, row);
        bar.inc(1);
        found
    });
    bar.finish_and_clear();
    let index = added.or_else(|error| {
        let exit = match &error {
            ReferenceError::Write(_) => Exit::Failed,
            ReferenceError::Shard(_) | ReferenceError::NoPair { .. } => Exit::Corrupt,
            _ => Exit::Usage,
        };
        Err(error).exit_with(exit)
    })?;
    let (model, out) = (args.model.display(), args.out.display());
    let pairs = index.train_totals.rows + index.held_out_totals.rows;
    outln!("{out}: {pairs} pairs with the log-probabilities of {model}");
    outln!("train on it: shoal init --loss dpo --from {model} --data {out} -o run.toml");
    Ok(())
}

/// The log-probabilities of the chosen and the rejected completion of a row.
fn log_probabilities(scorer: &Scorer, row: &Row) -> Result<[f64; 2], EngineError> {
    let [chosen, rejected] = row.pair().expect("rows are checked to be pairs");
    let of = |tokens: Range<usize>| {
        let counts = row.classes[tokens.clone()].iter().map(|class| *class == Class::Target);
        scorer.log_probability(&row.tokens[tokens], &counts.collect::<Vec<_>>())
    };
    Ok([of(chosen)?, of(rejected)?])
}
