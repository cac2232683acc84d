//! Streamed data: shards of files, made one at a time.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{base, options, texts, write};
use shoal_data::PrepareOptions;
use shoal_data::order::Order;
use shoal_data::prepared::{Index, Shard, StreamedFile};
use shoal_data::stream::{StreamError, StreamOptions, TOKENIZER_FOLDER, begin_stream, make_shard};
use shoal_protocol::ids::ContentHash;

/// Files of texts with so many documents each, whose names say their number.
fn files(folder: &Path, documents: &[u32]) -> Vec<(PathBuf, StreamedFile)> {
    let file = |(number, count): (usize, &u32)| {
        let text = |at: u32| -> String {
            (0..4 + at % 9).map(|word| format!("{number}-{at}-{word} ")).collect()
        };
        let lines: Vec<String> = (0..*count).map(text).collect();
        let name = format!("train-{number:05}.jsonl");
        let path = PathBuf::from(write(folder, &format!("files/{name}"), texts(&lines)));
        let bytes = fs::metadata(&path).expect("there").len();
        // Any hash that names the file will do.
        let sha256 = ContentHash([number as u8 + 1; 32]);
        (path, StreamedFile { path: name, bytes, sha256 })
    };
    documents.iter().enumerate().map(file).collect()
}

fn begun(
    folder: &Path,
    files: &[(PathBuf, StreamedFile)],
    held_out: f64,
) -> Result<(Index, Vec<String>), StreamError> {
    let prepare = PrepareOptions { held_out, ..options(&base(folder), "", 31) };
    let listed = files.iter().map(|(_, file)| file.clone()).collect();
    let origin = "hf:datasets/o/n@0".to_owned();
    let options = StreamOptions { prepare, origin, files: listed };
    begin_stream(&options, &files[0].0, &folder.join("data"))
}

/// The rows of a shard that is made of a file.
fn made(folder: &Path, index: &Index, place: usize, source: &Path) -> Vec<Vec<u32>> {
    let to = folder.join(format!("made-{place}.shard"));
    let (tokenizer, scratch) = (folder.join("data").join(TOKENIZER_FOLDER), folder.join("scratch"));
    make_shard(index, (place, source), &tokenizer, &scratch, &to).expect("rows");
    assert!(!scratch.exists(), "nothing stays");
    let shard = Shard::open(&to, index, &index.train[place]).expect("a shard of its rows");
    (0..shard.rows()).map(|row| shard.row(row).expect("a row").tokens).collect()
}

#[test]
fn each_file_gives_the_same_number_of_rows_wherever_they_are_made() {
    let folder = tempfile::tempdir().expect("writable");
    let files = files(folder.path(), &[300, 280, 310, 100]);
    let (index, left_out) = begun(folder.path(), &files, 0.1).expect("begun");
    assert_eq!(left_out, ["train-00003.jsonl"], "it is less than half as large as most");
    assert_eq!(index.train.len(), 3);
    assert_eq!(Index::read(&folder.path().join("data")).expect("valid"), index);
    let rows = index.rows_per_shard as usize;
    let mut all = Vec::new();
    for (place, (source, _)) in files[..3].iter().enumerate() {
        let shard = made(folder.path(), &index, place, source);
        assert_eq!(shard.len(), rows);
        assert_eq!(shard, made(folder.path(), &index, place, source), "the same each time");
        all.extend(shard);
    }
    all.sort();
    let before = all.len();
    all.dedup();
    assert_eq!(all.len(), before, "no row twice");
    // What is held out of the first file is in no shard.
    let held_out = &index.held_out[0];
    let shard = Shard::path_in(&folder.path().join("data"), held_out);
    let shard = Shard::open(&shard, &index, held_out).expect("there");
    shard.check_hash().expect("whole");
    let row = shard.row(0).expect("a row").tokens;
    assert!(!all.contains(&row));
}

#[test]
fn files_are_read_one_after_another() {
    let folder = tempfile::tempdir().expect("writable");
    let files = files(folder.path(), &[200; 5]);
    let (index, _) = begun(folder.path(), &files, 0.0).expect("begun");
    let order = Order::new(7, &index);
    let rows = index.rows_per_shard;
    let places = |from: u64, to: u64| -> Vec<usize> {
        let mut places: Vec<usize> = (from..to).map(|at| order.training(at).shard).collect();
        places.dedup();
        places
    };
    assert_eq!(places(0, 5 * rows).len(), 5, "each file once an epoch, without going back");
    assert_eq!(order.shards_ahead(rows / 2, rows).len(), 2);
    assert_ne!(places(0, 5 * rows), places(5 * rows, 10 * rows));
}

#[test]
fn of_a_file_with_fewer_rows_some_are_read_again() {
    let folder = tempfile::tempdir().expect("writable");
    let mut files = files(folder.path(), &[200, 200]);
    // As large as the others, and most of it is no text.
    let padding =
        format!("{{\"text\": \"short\"}}{}\n", " ".repeat(files[1].1.bytes as usize - 20));
    write(folder.path(), "files/train-00001.jsonl", padding);
    files[1].1.bytes = fs::metadata(&files[1].0).expect("there").len();
    let (index, _) = begun(folder.path(), &files, 0.0).expect("begun");
    let rows = made(folder.path(), &index, 1, &files[1].0);
    assert_eq!(rows.len() as u64, index.rows_per_shard);
    assert!(rows.iter().all(|row| *row == rows[0]), "its only row");
}

#[test]
fn what_cannot_be_streamed_is_refused() {
    let folder = tempfile::tempdir().expect("writable");
    let one = files(folder.path(), &[200]);
    let error = begun(folder.path(), &one, 0.0).expect_err("one file");
    assert!(error.to_string().contains("has 1 files to read"), "{error}");
    let two = files(folder.path(), &[200, 200]);
    let error = begun(folder.path(), &two, 0.9).expect_err("most is held out");
    assert!(error.to_string().contains("give a smaller --held-out"), "{error}");
    let (index, _) = begun(folder.path(), &two, 0.0).expect("begun");
    let mut broken = index.clone();
    broken.stream.as_mut().expect("a stream").files[1].path = "../secret".to_owned();
    let error = Index::parse(&broken.bytes()).expect_err("a path outside").to_string();
    assert!(error.contains("no path in a repository"), "{error}");
    let mut broken = index.clone();
    broken.stream.as_mut().expect("a stream").files.pop();
    let error = Index::parse(&broken.bytes()).expect_err("a file is missing").to_string();
    assert!(error.contains("one file for each training shard"), "{error}");
    // Rows in another format are others, so shards of them have other names.
    let mut broken = index;
    broken.stream.as_mut().expect("a stream").format = "xml".to_owned();
    let error = Index::parse(&broken.bytes()).expect_err("no format").to_string();
    assert!(error.contains("not the name of its file and settings"), "{error}");
}
