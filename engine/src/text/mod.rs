//! A trained model at work: it continues texts, and gives them log-probabilities.

pub(crate) mod generate;
pub(crate) mod language_model;
pub(crate) mod sampling;
pub(crate) mod scorer;
