//! The tests of the shared object, in one program.

mod programs;
mod symbols;
