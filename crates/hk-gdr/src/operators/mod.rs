//! The operators as data, for the `hk` program, the demo and the documentation.

mod chunk;
mod conv;
mod gating;
mod index;
mod kkt;
mod recurrent;
mod rows;
mod solve;
mod split;
mod utils;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    recurrent::FUSED_RECURRENT,
    recurrent::FUSED_SIGMOID_GATING_RECURRENT,
    recurrent::FUSED_REARRANGE_SIGMOID_GDR,
    gating::FUSED_GDN_GATING_PREFILL,
    split::FUSED_QKVZBA_SPLIT,
    conv::CAUSAL_CONV1D_UPDATE_SPLIT_QKV,
    conv::CAUSAL_CONV1D_FWD_SPLIT_QKV,
    rows::L2NORM,
    rows::L2NORM_BWD,
    rows::CHUNK_LOCAL_CUMSUM,
    kkt::CHUNK_SCALED_DOT_KKT,
    kkt::FUSED_CUMSUM_KKT,
    solve::SOLVE_TRIL,
    chunk::RECOMPUTE_W_U,
    chunk::WY_REPRESENTATION,
    chunk::CHUNK_DELTA_H,
    chunk::CHUNK_O,
    chunk::CHUNK_GATED_DELTA_RULE,
    index::PREPARE_LENS,
    index::PREPARE_CU_SEQLENS_FROM_LENS,
    index::PREPARE_POSITION_IDS,
    index::PREPARE_SEQUENCE_IDS,
    index::PREPARE_CHUNK_OFFSETS,
    index::GPU_PREPARE_CHUNK_INDICES,
    index::GET_MAX_NUM_SPLITS,
    utils::BF16_TO_FLOAT,
    utils::FLOAT_TO_BF16,
    utils::ABS_DIFF,
    utils::SQUARED_DIFF,
    utils::SUM_REDUCE,
    utils::MAX_REDUCE,
];
