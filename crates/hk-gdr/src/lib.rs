#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod chunk;
mod conv;
mod cumsum;
mod gating;
mod index;
mod kkt;
mod l2norm;
#[cfg(feature = "registry")]
mod operators;
mod recurrent;
#[cfg(feature = "registry")]
pub mod reference;
mod sizes;
mod solve;
mod split;
mod utils;

pub use chunk::{
    ChunkInputs, ChunkOptions, ChunkOutputInputs, ChunkOutputOptions, DeltaInputs, DeltaOptions,
    DeltaOutputs, RecomputeInputs, WyInputs, WyOutputs, chunk_delta_h, chunk_gated_delta_rule, chunk_o,
    recompute_w_u, wy_representation,
};
pub use conv::{
    ConvSplitInputs, ConvUpdateSplitInputs, Qkv, causal_conv1d_fwd_split_qkv, causal_conv1d_update_split_qkv,
};
pub use cumsum::{CumsumOptions, TokenLayout, chunk_local_cumsum};
pub use gating::{GatingInputs, fused_gdn_gating_prefill};
pub use hk_activation::{ConvActivation, ConvWeight};
pub use index::{
    Index, get_max_num_splits, gpu_prepare_chunk_indices, prepare_chunk_offsets,
    prepare_cu_seqlens_from_lens, prepare_lens, prepare_position_ids, prepare_sequence_ids,
};
pub use kkt::{FusedKktInputs, FusedKktOptions, GateBase, KktInputs, chunk_scaled_dot_kkt, fused_cumsum_kkt};
pub use l2norm::{l2norm, l2norm_bwd};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use recurrent::{
    GateBias, Gates, RearrangedInputs, RecurrentInputs, RecurrentOptions, SigmoidGates, SigmoidInputs,
    Softplus, StateElement, StateLayout, States, fused_rearrange_sigmoid_gdr, fused_recurrent,
    fused_sigmoid_gating_recurrent,
};
pub use solve::solve_tril;
pub use split::{HeadSizes, SplitOutputs, fused_qkvzba_split};
pub use utils::{
    abs_diff, bf16_to_float, float_to_bf16, max_reduce, reduce_workspace, squared_diff, sum_reduce,
};
