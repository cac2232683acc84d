//! How peers find one another.
