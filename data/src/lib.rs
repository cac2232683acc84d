//! Shoal's training data: files of text become rows of tokens on disk.
//!
//! In the order of the data's journey: [`source`] reads rows of files, [`document`] turns a row
//! into tokens with the [`tokenizer`] and the chat [`template`] of a model's folder, [`pack`] puts
//! documents into rows of equal length, [`prepared`] is their format on disk, [`mod@prepare`] runs all
//! of these on every core, [`draw`] says which of several data sets a sample is from, [`order`] is the
//! order in which a run reads the rows of each, [`batch`] makes its microbatches of them, [`reference`]
//! adds a base's log-probabilities to pairs, and [`stats`] shows them. [`stream`] makes rows while a run reads them.

pub mod batch;
mod class;
pub mod document;
pub mod draw;
pub mod order;
pub mod pack;
pub mod prepare;
pub mod prepared;
pub mod reference;
pub mod source;
pub mod stats;
pub mod stream;
pub mod template;
pub mod tokenizer;

pub use class::{Class, ClassError};
pub use prepare::{Notes, PrepareError, PrepareOptions, Progress, prepare, prepare_noting};
