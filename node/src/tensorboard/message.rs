//! The messages in TensorBoard's event files, with the fields that scalars need.

use prost::{Message, Oneof};

/// The version of the format. From this one on, readers obey [`SessionLog::START`].
const FILE_VERSION: &str = "brain.Event:2";

/// One record of an event file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "Content", tags = "3, 5, 7")]
    pub(super) content: Option<Content>,
}

/// The content of a record.
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Content {
    /// The first record of a file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Values of one step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) values: Vec<Value>,
}

/// A scalar and its name.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    /// A zero must be in the file too: a value without a number is none.
    #[prost(float, optional, tag = "2")]
    pub(super) scalar: Option<f32>,
}

/// A change of the writer's session.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

impl SessionLog {
    /// The writer starts at the event's step: readers discard that step and later ones of earlier
    /// records.
    pub(super) const START: i32 = 1;
}

impl Event {
    /// The first record of a file.
    pub(super) fn file_version(wall_time: f64) -> Self {
        let content = Some(Content::FileVersion(FILE_VERSION.to_owned()));
        Self { wall_time, step: 0, content }
    }

    /// Makes readers discard a step and later ones.
    pub(super) fn restart(wall_time: f64, step: u64) -> Self {
        let content = Some(Content::SessionLog(SessionLog { status: SessionLog::START }));
        Self { wall_time, step: signed(step), content }
    }

    /// The scalars of a step.
    pub(super) fn scalars(wall_time: f64, step: u64, scalars: &[(&str, f64)]) -> Self {
        let value = |(tag, value): &(&str, f64)| Value {
            tag: (*tag).to_owned(),
            scalar: Some(*value as f32),
        };
        let values = scalars.iter().map(value).collect();
        Self { wall_time, step: signed(step), content: Some(Content::Summary(Summary { values })) }
    }
}

/// A step as the format has it. No run has as many steps as do not fit.
fn signed(step: u64) -> i64 {
    i64::try_from(step).unwrap_or(i64::MAX)
}
