//! Every kind of file gives the same rows.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crate::common::{base, options, rows, run, texts, write};
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use serde_json::json;
use shoal_data::pack::Row;
use shoal_data::prepared::{Shard, ShardError};
use shoal_data::stats::{Stats, spans};
use shoal_data::tokenizer::TextTokenizer;
use shoal_data::{Class, PrepareOptions};

const TEXTS: [&str; 5] = ["one", "two\nlines", "ünï", "", "the fifth text"];

/// The rows of sources.
fn prepared(folder: &Path, sources: &[String]) -> Vec<Row> {
    let base = base(folder);
    let out = folder.join("out");
    let _ = fs::remove_dir_all(&out);
    let options = PrepareOptions::new(sources.to_vec(), base, 7);
    let index = run(&options, &out).expect("it works");
    rows(&out, &index, &index.train)
}

/// Writes a column of texts, with definition and repetition levels where it is nested.
fn column(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[&str],
    levels: Option<(&[i16], &[i16])>,
) {
    let mut column = group.next_column().expect("it writes").expect("there is a column");
    let values: Vec<ByteArray> = values.iter().map(|value| ByteArray::from(*value)).collect();
    let (definitions, repetitions) = levels.unzip();
    column
        .typed::<ByteArrayType>()
        .write_batch(&values, definitions, repetitions)
        .expect("it writes");
    column.close().expect("it closes");
}

fn table(path: &Path, schema: &str, compression: Compression) -> SerializedFileWriter<File> {
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = File::create(path).expect("writable");
    SerializedFileWriter::new(file, schema, Arc::new(properties)).expect("it writes")
}

/// Writes a table of texts in groups of two rows.
fn text_table(path: &Path, compression: Compression) -> String {
    let schema = "message rows { required binary id (UTF8); required binary text (UTF8); }";
    let mut writer = table(path, schema, compression);
    for part in TEXTS.chunks(2) {
        let mut group = writer.next_row_group().expect("it writes");
        column(&mut group, &vec!["id"; part.len()], None);
        column(&mut group, part, None);
        group.close().expect("it closes");
    }
    writer.close().expect("it closes");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn compressed_lines_and_tables_have_the_same_rows() {
    let folder = tempfile::tempdir().expect("writable");
    let lines = texts(TEXTS);
    let plain = write(folder.path(), "a.jsonl", &lines);
    let expected = prepared(folder.path(), std::slice::from_ref(&plain));
    assert!(expected.len() > 3);
    let check = |name: &str, sources: &[String]| {
        assert_eq!(prepared(folder.path(), sources), expected, "{name}");
    };
    // Two members or frames in a file are one stream.
    let (first, second) = lines.as_bytes().split_at(lines.len() / 2);
    let gzip = |part: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(part).expect("it writes");
        encoder.finish().expect("it ends")
    };
    let gzipped = [gzip(first), gzip(second)].concat();
    check("gz", &[write(folder.path(), "a.jsonl.gz", gzipped)]);
    let zstd = |part: &[u8]| zstd::encode_all(part, 1).expect("it encodes");
    check("zst", &[write(folder.path(), "a.ndjson.zst", [zstd(first), zstd(second)].concat())]);
    check("bom", &[write(folder.path(), "b.jsonl", format!("\u{feff}{lines}"))]);
    check("crlf", &[write(folder.path(), "c.jsonl", lines.replace('\n', "\r\n\r\n"))]);
    check("no end", &[write(folder.path(), "d.jsonl", lines.trim_end())]);
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(Default::default())),
        ("zstd", Compression::ZSTD(ZstdLevel::default())),
    ] {
        let path = folder.path().join(format!("{name}.parquet"));
        check(name, &[text_table(&path, compression)]);
    }
}

#[test]
fn folders_and_patterns_are_read_in_order() {
    let folder = tempfile::tempdir().expect("writable");
    let all = write(folder.path(), "all.jsonl", texts(["1", "2", "3", "4"]));
    let expected = prepared(folder.path(), &[all]);
    write(folder.path(), "data/a.jsonl", texts(["1"]));
    write(folder.path(), "data/b/x.jsonl", texts(["2"]));
    write(folder.path(), "data/b/y.jsonl", texts(["3"]));
    write(folder.path(), "data/c.jsonl", texts(["4"]));
    write(folder.path(), "data/.hidden.jsonl", texts(["5"]));
    write(folder.path(), "data/README.md", "It describes the rows.");
    write(folder.path(), "data/c.csv", "6");
    let place = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    assert_eq!(prepared(folder.path(), &[place("data")]), expected);
    assert_eq!(prepared(folder.path(), &[place("data/**/*.jsonl")]), expected);
    let parts = [place("data/a.*"), place("data/b"), place("data/[c-z].jsonl")];
    assert_eq!(prepared(folder.path(), &parts), expected);
    // Without tables, each text is a document.
    for number in ["1", "2", "3", "4"] {
        write(folder.path(), &format!("texts/{number}.txt"), number);
    }
    assert_eq!(prepared(folder.path(), &[place("texts")]), expected);
}

#[test]
fn a_long_text_is_one_document() {
    let folder = tempfile::tempdir().expect("writable");
    let text = "a line of a long text, and another\n\n".repeat(90_000);
    let long = write(folder.path(), "long.txt", &text);
    let rows = prepared(folder.path(), &[long]);
    let mut bytes: Vec<u8> = vec![text.as_bytes()[0]];
    for row in &rows {
        assert!(row.classes[1..].iter().all(|class| *class != Class::First));
        let labels = row.tokens[1..].iter().filter(|token| **token < 256);
        bytes.extend(labels.map(|token| *token as u8));
    }
    assert_eq!(bytes, text.as_bytes());
}

#[test]
fn nested_columns_are_chats() {
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("chats.parquet");
    let schema = "message rows {
        required binary source (UTF8);
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary content (UTF8);
            optional binary role (UTF8);
        } } }
    }";
    let mut writer = table(&path, schema, Compression::SNAPPY);
    let mut group = writer.next_row_group().expect("it writes");
    column(&mut group, &["s", "s"], None);
    let levels: (&[i16], &[i16]) = (&[4, 4, 4, 4], &[0, 1, 0, 1]);
    column(&mut group, &["q1", "a1", "q2", "a2"], Some(levels));
    column(&mut group, &["user", "assistant", "user", "assistant"], Some(levels));
    group.close().expect("it closes");
    writer.close().expect("it closes");
    let chat = |number: u8| {
        let user = json!({"role": "user", "content": format!("q{number}")});
        let assistant = json!({"role": "assistant", "content": format!("a{number}")});
        json!({"messages": [user, assistant]}).to_string() + "\n"
    };
    let lines = write(folder.path(), "chats.jsonl", chat(1) + &chat(2));
    let expected = prepared(folder.path(), &[lines]);
    assert_eq!(prepared(folder.path(), &[path.to_str().expect("UTF-8").to_owned()]), expected);
}

#[test]
fn damaged_tables_are_errors() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let path = folder.path().join("a.parquet");
    let source = text_table(&path, Compression::SNAPPY);
    let whole = fs::read(&path).expect("readable");
    let out = folder.path().join("out");
    for place in (0..whole.len()).step_by(3) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        fs::write(&path, &bytes).expect("writable");
        // Some bytes do not matter, and some change a text: only a panic is wrong.
        let _ = run(&options(&base, &source, 7), &out);
        let _ = fs::remove_dir_all(&out);
        fs::write(&path, &whole[..place]).expect("writable");
        let cut = run(&options(&base, &source, 7), &out).expect_err("it is cut");
        assert!(cut.to_string().contains("a.parquet"), "{cut}");
        let _ = fs::remove_dir_all(&out);
    }
}

#[test]
fn damaged_shards_are_errors() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let source = write(folder.path(), "a.jsonl", texts(TEXTS));
    let out = folder.path().join("out");
    let index = run(&options(&base, &source, 7), &out).expect("it works");
    let entry = &index.train[0];
    let path = Shard::path_in(&out, entry);
    let mut bytes = fs::read(&path).expect("readable");
    let shard = Shard::open(&path, &index, entry).expect("it opens");
    let beyond = shard.row(entry.rows);
    assert!(matches!(beyond, Err(ShardError::NoRow { .. })), "{beyond:?}");
    drop(shard);
    bytes[1] = 0xff;
    fs::write(&path, &bytes).expect("writable");
    let shard = Shard::open(&path, &index, entry).expect("it opens");
    assert!(matches!(shard.check_hash(), Err(ShardError::Hash { .. })));
    assert!(matches!(shard.row(0), Err(ShardError::Row { row: 0, .. })));
    assert!(shard.row(1).is_ok());
    drop(shard);
    bytes.pop();
    fs::write(&path, &bytes).expect("writable");
    let short = Shard::open(&path, &index, entry);
    assert!(matches!(short, Err(ShardError::Length { .. })), "{short:?}");
    fs::remove_file(&path).expect("it exists");
    let absent = Shard::open(&path, &index, entry);
    assert!(matches!(absent, Err(ShardError::Read { .. })), "{absent:?}");
}

#[test]
fn rows_are_shown_by_class() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let row = |prompt: &str, completion: &str| {
        json!({"prompt": prompt, "completion": completion}).to_string() + "\n"
    };
    let source = write(folder.path(), "a.jsonl", row("ask", "yes") + &row("b", "no"));
    let out = folder.path().join("out");
    let index = run(&options(&base, &source, 15), &out).expect("it works");
    let rows = rows(&out, &index, &index.train);
    let tokenizer = TextTokenizer::load(&base).expect("it loads");
    let text: String =
        spans(&rows[0], &tokenizer).expect("it decodes").iter().map(ToString::to_string).collect();
    assert_eq!(text, "<a>[sk]yes<eos><b>no<eos>(5 tokens of padding)");
    let stats = Stats::of(&out, &index, &index.train, 100).expect("readable");
    assert_eq!((stats.rows, stats.documents.count(), stats.documents.longest()), (1, 2, 7));
    assert_eq!(stats.documents.ranges().collect::<Vec<_>>(), [(4, 7, 2)]);
    assert_eq!(stats.counts, index.train[0].counts());
}

#[test]
fn generation_stops_at_every_end_that_a_model_names() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let stops = |generation: serde_json::Value, config: serde_json::Value| {
        let config = json!({ "vocab_size": 300, "eos_token_id": config });
        write(&base, "config.json", config.to_string());
        write(&base, "generation_config.json", json!({ "eos_token_id": generation }).to_string());
        TextTokenizer::load(&base).expect("it loads").stops().to_vec()
    };
    let tokenizer = TextTokenizer::load(&base).expect("it loads");
    let eos = tokenizer.eos().expect("it has one");
    assert_eq!(tokenizer.stops(), [eos]);
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(stops(json!([9, eos, 9, 7, 300]), json!(8)), sorted(vec![7, 9, eos]));
    assert_eq!(stops(json!(null), json!(8)), sorted(vec![8, eos]));
    assert_eq!(stops(json!(-1), json!("no")), [eos]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn foreign_files_are_an_error_or_rows(mut bytes: Vec<u8>, place: usize, byte: u8) {
        let folder = tempfile::tempdir().expect("writable");
        let base = base(folder.path());
        let lines = texts(["one", "two"]);
        let zstd = zstd::encode_all(lines.as_bytes(), 1).expect("it encodes");
        let prepared = |name: &str, bytes: &[u8]| {
            let source = write(folder.path(), name, bytes);
            let out = folder.path().join("out");
            let _ = fs::remove_dir_all(&out);
            // Only a panic is wrong.
            let _ = run(&options(&base, &source, 7), &out);
        };
        for name in ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a.parquet"] {
            prepared(name, &bytes);
        }
        let place = place % zstd.len().min(lines.len());
        bytes = zstd;
        bytes[place] = byte;
        prepared("b.jsonl.zst", &bytes);
        bytes = lines.into_bytes();
        bytes[place] = byte;
        prepared("b.jsonl", &bytes);
    }
}
