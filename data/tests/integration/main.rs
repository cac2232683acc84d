//! Data from files of every kind to rows of tokens.

mod columns;
mod common;
mod dialects;
mod golden;
mod hostile;
mod inputs;
mod notes;
mod order;
mod packing;
mod pairs;
mod prepare;
mod resume;
mod roles;
mod sources;
mod streaming;
mod tokenizers;
