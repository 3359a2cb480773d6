//! The reader's tests.

mod common;
mod hostile;
mod parse;
