//! Every instruction that the emulator executes, but for the matrix ones, against models that are written differently
//! from its handlers: exact integers and rationals, one lane at a time.

// Models are written as the ISA manual writes them, over lanes that are numbers.
#![allow(clippy::precedence, clippy::needless_range_loop, clippy::redundant_pattern_matching)]
#![allow(clippy::manual_is_multiple_of)]

mod compare;
mod convert;
mod coverage;
mod exact;
mod float;
mod formatted;
mod integer;
mod lanes;
mod memory;
mod ranges;
mod scalar;
mod scalar_memory;
mod vector;
