#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

/// Entry points by dtype, form (one-shot, two-shot) and world size.
macro_rules! kernels_of_worlds {
    ($params:ident, $name:literal, [$($dtype:literal),*]) => {
        [$(
            kernels_of_worlds!(@ $params, $name, $dtype, "_one_shot"),
            kernels_of_worlds!(@ $params, $name, $dtype, "_two_shot")
        ),*]
    };
    (@ $params:ident, $name:literal, $dtype:literal, $form:literal) => {
        [
            $params::kernel(concat!($name, $dtype, "_1", $form)),
            $params::kernel(concat!($name, $dtype, "_2", $form)),
            $params::kernel(concat!($name, $dtype, "_4", $form)),
            $params::kernel(concat!($name, $dtype, "_8", $form)),
        ]
    };
}

mod all_reduce;
mod all_reduce_rmsnorm;
mod meeting;
mod p2p;
mod rccl;

pub use all_reduce::{all_reduce, all_reduce_in_place};
pub use all_reduce_rmsnorm::{AllReduceRmsNormOptions, AllReduceRmsNormOutputs, Fp8Rows, all_reduce_rmsnorm};
pub use p2p::{Algorithm, P2pComm, P2pOptions};
pub use rccl::{Group, RcclComm, RcclOptions, ReduceOp, UniqueId};
