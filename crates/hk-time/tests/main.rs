//! The tests of the model.

#[path = "../../hk-emu/tests/common/mod.rs"]
mod common;
mod relations;
mod rows;
mod table;
