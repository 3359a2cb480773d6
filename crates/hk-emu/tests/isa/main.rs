//! The instruction table, the decoder and the disassembler against LLVM.

mod execute;
mod generator;
mod llvm;
mod objdump;
mod oracle;
mod table;
