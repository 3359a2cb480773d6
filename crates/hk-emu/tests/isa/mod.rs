//! The instruction table, the decoder and the disassembler against LLVM.

#![allow(clippy::precedence)] // bits as the ISA manual writes them

mod execute;
mod generator;
mod llvm;
mod objdump;
mod oracle;
mod table;
