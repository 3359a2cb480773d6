//! The hk program: list, run and inspect the kernels.
