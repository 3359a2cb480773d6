#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

/// Entry points by dtype, form and world size.
macro_rules! kernels_of_worlds {
    ($params:ident, $name:literal, [$($dtype:literal),*], $forms:tt) => {
        kernels_of_worlds!(@ $params, $name, [$($dtype $forms)*] -> [])
    };
    (@ $params:ident, $name:literal, [] -> [$($row:expr,)*]) => { [$($row),*] };
    (@ $params:ident, $name:literal, [$dtype:literal [$($form:literal),*] $($rest:tt)*] -> [$($row:expr,)*]) => {
        kernels_of_worlds!(@ $params, $name, [$($rest)*] -> [$($row,)* $(
            [
                $params::kernel(concat!($name, $dtype, "_1", $form)),
                $params::kernel(concat!($name, $dtype, "_2", $form)),
                $params::kernel(concat!($name, $dtype, "_4", $form)),
                $params::kernel(concat!($name, $dtype, "_8", $form)),
            ],
        )*])
    };
}

mod all_gather;
mod all_reduce;
mod all_reduce_rmsnorm;
mod meeting;
mod norm;
mod p2p;
mod rccl;
mod reduce_scatter;
mod reduce_scatter_rmsnorm;
mod rendezvous;

pub use all_gather::{all_gather, all_gather_dim, all_gather_in_place};
pub use all_reduce::{all_reduce, all_reduce_in_place};
pub use all_reduce_rmsnorm::all_reduce_rmsnorm;
pub use norm::{NormOptions, NormOutputs, QuantizedRows};
pub use p2p::{Algorithm, P2pComm, P2pOptions};
pub use rccl::{Group, RcclComm, RcclOptions, ReduceOp, UniqueId};
pub use reduce_scatter::{reduce_scatter, reduce_scatter_dim};
pub use reduce_scatter_rmsnorm::reduce_scatter_rmsnorm;
pub use rendezvous::Rendezvous;
