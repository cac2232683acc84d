//! Parquet tables.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};

use super::files::{SourceFile, read_error};
use super::json::{Json, Object};
use super::row::RowKind;
use super::{RawContent, RawRow, ReadOptions, SourceError};

/// The rows of a table; only the columns of one kind of row are read.
pub(super) struct Table {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    projection: SchemaDescPtr,
    group: usize,
    rows: Option<ReaderIter>,
    row: u64,
    skip: u64,
    counter: Arc<AtomicU64>,
    failed: bool,
}

impl Table {
    /// Opens a table behind its first `skip` rows.
    pub(super) fn open(
        file: &SourceFile,
        kind: RowKind,
        skip: u64,
        options: &ReadOptions,
    ) -> Result<Self, SourceError> {
        let reader = reader(&file.path)?;
        let schema = reader.metadata().file_metadata().schema();
        let mut fields = Vec::new();
        for key in kind.keys() {
            let field = schema.get_fields().iter().find(|field| field.name() == *key);
            let missing = || SourceError::NoKey { path: file.path.clone(), row: 1, key };
            fields.push(field.ok_or_else(missing)?.clone());
        }
        let further = kind.further_keys();
        let further = schema.get_fields().iter().filter(|field| further.contains(&field.name()));
        fields.extend(further.cloned());
        let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
        let projection = projection.map_err(|error| damaged(&file.path, 0, &error))?;
        Ok(Self {
            projection: Arc::new(SchemaDescriptor::new(Arc::new(projection))),
            path: file.path.clone(),
            reader,
            group: 0,
            rows: None,
            row: 0,
            skip,
            counter: options.bytes_read.clone(),
            failed: false,
        })
    }

    fn read(&mut self) -> Result<Option<Row>, ParquetError> {
        loop {
            if let Some(rows) = &mut self.rows {
                match rows.next() {
                    Some(row) => {
                        self.row += 1;
                        let row = row?;
                        if self.row > self.skip {
                            return Ok(Some(row));
                        }
                        continue;
                    }
                    None => self.rows = None,
                }
            }
            if self.group == self.reader.num_row_groups() {
                return Ok(None);
            }
            let group = self.reader.get_row_group(self.group)?;
            self.group += 1;
            let size = group.metadata().compressed_size();
            self.counter.fetch_add(u64::try_from(size).unwrap_or(0), Ordering::Relaxed);
            let rows = u64::try_from(group.metadata().num_rows()).unwrap_or(0);
            if self.row.saturating_add(rows) <= self.skip {
                self.row += rows;
                continue;
            }
            let tree = TreeBuilder::new();
            self.rows = Some(tree.as_iter(self.projection.clone(), group.as_ref())?);
        }
    }
}

impl Iterator for Table {
    type Item = Result<RawRow, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        match guarded(|| self.read()) {
            Ok(None) => None,
            Ok(Some(row)) => {
                let columns = row.into_columns().into_iter();
                let columns: Object = columns.map(|(name, field)| (name, json_of(field))).collect();
                let content = RawContent::Columns(columns);
                Some(Ok(RawRow { number: self.row, content }))
            }
            Err(error) => {
                self.failed = true;
                Some(Err(damaged(&self.path, self.row + 1, &error)))
            }
        }
    }
}

/// The JSON of a value.
fn json_of(field: Field) -> Json {
    match field {
        Field::Str(text) => Json::Text(text),
        // A column of bytes without the mark of a text.
        Field::Bytes(bytes) => {
            String::from_utf8(bytes.data().to_vec()).map_or(Json::Null, Json::Text)
        }
        Field::Group(row) => {
            let columns = row.into_columns().into_iter();
            Json::Object(columns.map(|(name, field)| (name, json_of(field))).collect())
        }
        Field::ListInternal(list) => {
            Json::List(list.elements().iter().map(|field| json_of(field.clone())).collect())
        }
        other => serde_json::from_value(other.to_json_value()).unwrap_or_default(),
    }
}

/// The names of a table's columns.
pub(super) fn columns(file: &SourceFile) -> Result<Vec<String>, SourceError> {
    let reader = reader(&file.path)?;
    let schema = reader.metadata().file_metadata().schema();
    Ok(schema.get_fields().iter().map(|field| field.name().to_owned()).collect())
}

fn reader(path: &Path) -> Result<SerializedFileReader<File>, SourceError> {
    let file = File::open(path).map_err(read_error(path))?;
    guarded(|| SerializedFileReader::new(file)).map_err(|error| damaged(path, 0, &error))
}

fn damaged(path: &Path, row: u64, error: &ParquetError) -> SourceError {
    SourceError::Parquet { path: path.to_owned(), row, reason: error.to_string() }
}

/// Turns a panic of the library, which damaged files can cause, into an error.
fn guarded<T>(work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ParquetError::General("the file is damaged".to_owned())))
}
