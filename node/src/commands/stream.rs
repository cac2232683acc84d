//! `shoal data prepare --stream`: data whose rows are made while a run reads them.

use std::path::Path;

use anyhow::anyhow;
use shoal_data::PrepareOptions;
use shoal_data::prepare::default_held_out;
use shoal_data::prepared::{INDEX_FILE, StreamedFile};
use shoal_data::source::Split;
use shoal_data::stream::{StreamOptions, begin_stream};
use shoal_hub::{FileHash, Reference, RemoteFile, RepositoryKind};
use shoal_protocol::ids::ContentHash;

use super::hub;
use crate::cli::DataPrepareArgs;
use crate::exit::{Exit, ExitWith};
use crate::progress;
use crate::terminal::outln;

/// Lists a repository's files, makes the rows of the first, and writes what a run needs to make the others.
///
/// # Errors
/// If the source is no data set of the Hub, its files have no SHA-256, or the first cannot become rows.
pub(super) fn run(args: &DataPrepareArgs, options: PrepareOptions) -> anyhow::Result<()> {
    let [source] = &args.sources[..] else {
        let problem = anyhow!("--stream takes one source, hf:datasets/OWNER/NAME[:PATTERN]");
        return Err(problem).exit_with(Exit::Usage);
    };
    if args.out.join(INDEX_FILE).exists() {
        let problem = anyhow!(
            "{} holds prepared data: name another folder, or remove it",
            args.out.display()
        );
        return Err(problem).exit_with(Exit::Usage);
    }
    let reference: Reference = source.parse().exit_with(Exit::Usage)?;
    if reference.repository().kind() != RepositoryKind::Dataset {
        let problem = anyhow!("{source} is no data set: name one as hf:datasets/OWNER/NAME");
        return Err(problem).exit_with(Exit::Usage);
    }
    let client = hub::hub()?;
    let repository = reference.repository();
    let commit = client.resolve(repository, reference.revision()).exit_with(Exit::Failed)?;
    let listed = client.list(repository, &commit).exit_with(Exit::Failed)?;
    let files = files_of(&listed, &reference, args.split).exit_with(Exit::Usage)?;
    let Some(first) = files.first().cloned() else {
        let problem = anyhow!("{source} selects no file that can be read");
        return Err(problem).exit_with(Exit::Usage);
    };
    std::fs::create_dir_all(&args.out)?;
    let name = Path::new(&first.path).file_name().unwrap_or_default();
    let local = args.out.join(name);
    let bar = progress::byte_bar("fetching the first file");
    let wanted = (first.sha256.0, first.bytes);
    let fetched =
        client.fetch_file((repository, &commit), &first.path, &local, wanted, &mut |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.bytes);
        });
    bar.finish_and_clear();
    fetched.exit_with(Exit::Failed)?;
    let mut prepare = PrepareOptions { sources: vec![local.to_string_lossy().into()], ..options };
    prepare.held_out = match args.held_out {
        Some(share) => share,
        None => default_held_out(&prepare).exit_with(Exit::Usage)?,
    };
    let origin = format!("hf:{repository}@{commit}");
    let options = StreamOptions { prepare, origin, files };
    let (index, left_out) = begin_stream(&options, &local, &args.out).exit_with(Exit::Usage)?;
    std::fs::remove_file(&local)?;
    if !left_out.is_empty() {
        outln!("left out, as less than half as large as most: {}", left_out.join(", "));
    }
    let out = args.out.display();
    outln!(
        "{out}: {} of {} files, of which a run reads {} rows of {} tokens each; {} rows are held out of the first",
        index.train.len(),
        options.files.len(),
        index.rows_per_shard,
        index.context,
        index.held_out_totals.rows
    );
    outln!("the hosts of the first stage fetch each file when its rows are due");
    outln!("train on it: shoal init --from {} --data {out} -o run.toml", args.tokenizer.display());
    Ok(())
}

/// The files that a reference selects, of the split, in the order of their paths.
fn files_of(
    listed: &[RemoteFile],
    reference: &Reference,
    split: Option<Split>,
) -> anyhow::Result<Vec<StreamedFile>> {
    let of_reference = reference.selects();
    let selects = |file: &&RemoteFile| {
        of_reference(&file.path) && file.size > 0 && hub::is_readable(&file.path)
    };
    let mut chosen: Vec<&RemoteFile> = listed.iter().filter(selects).collect();
    let of = |file: &RemoteFile| Split::of(Path::new(&file.path));
    let has_train = chosen.iter().any(|file| of(file) == Some(Split::Train));
    match split {
        Some(Split::All) => {}
        Some(split) => chosen.retain(|file| of(file) == Some(split)),
        None if has_train => chosen.retain(|file| of(file) == Some(Split::Train)),
        None => {}
    }
    chosen.into_iter().map(with_sha256).collect()
}

/// A file with its SHA-256, which only files in git LFS have.
fn with_sha256(file: &RemoteFile) -> anyhow::Result<StreamedFile> {
    let FileHash::Sha256(hash) = file.hash else {
        return Err(anyhow!(
            "{} is stored in git itself, without a SHA-256, and cannot be streamed: leave --stream out",
            file.path
        ));
    };
    Ok(StreamedFile { path: file.path.clone(), bytes: file.size, sha256: ContentHash(hash) })
}
