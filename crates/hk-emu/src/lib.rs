//! Functional emulator of CDNA3 and CDNA4 compute: executes gfx942 and gfx950 code objects on the CPU.
pub mod isa;
