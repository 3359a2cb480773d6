//! Launch planning that kernel families share: which entry point serves a shape, its grid, its parameters. The device's side of
//! each module is the header of the same name in `hk/`.
//!
//! They are part of the core because several families launch the same device code: `hk/rows.h` serves every row-wise operator,
//! `hk/heads.h` and `hk/rope.h` serve activation and attention, `hk/arrive.h` GEMM and MoE.

pub mod arrive;
pub mod heads;
pub mod rope;
pub mod rows;
