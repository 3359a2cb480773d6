//! The tests of the gated delta rule: one program, a module per file.

mod chunk;
mod conv;
mod corners;
mod errors;
mod far;
mod kkt;
mod long;
mod recurrent;
mod registry;
mod rows;
mod sigmoid;
mod solve;
mod utils;
