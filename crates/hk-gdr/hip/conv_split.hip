// conv_split.hip: causal_conv1d_fwd_split_qkv, causal_conv1d_update_split_qkv: the depthwise causal convolution of hk-activation with its
// channels, q then k then v, in three tensors. Formula, tensors, split of the work: crates/hk-activation/hip/include/activation/conv.h
#include <activation/conv.h>
#include <hk/entry.h>

namespace {
using hk::u32;
using hk::u64;

struct Params {
    conv::Params conv;  // first: conv.h reloads it from the start
    u64 q, k, v;
    conv::Strides q_at, k_at, v_at;
    u32 k_first, v_first;  // channels of k and v in x
};

/// The tensor of a channel. The channels of a lane have one tensor. Sums, not selections: those would become loads of parameters by lane.
struct Split {
    const Params &own;

    template <class N>
    HK_FN N pick(u32 channel, N q, N k, N v) const {
        return q + (channel < own.k_first ? 0 : k - q) + (channel < own.v_first ? 0 : v - k);
    }
    HK_FN u64 data(const conv::Params &, u32 channel) const { return pick(channel, own.q, own.k, own.v); }
    HK_FN conv::Strides at(const conv::Params &, u32 channel) const {
        return {pick(channel, own.q_at.outer, own.k_at.outer, own.v_at.outer),
                pick(channel, own.q_at.channel, own.k_at.channel, own.v_at.channel),
                pick(channel, own.q_at.inner, own.k_at.inner, own.v_at.inner)};
    }
    HK_FN u32 first(u32 channel) const { return pick(channel, 0u, own.k_first, own.v_first); }
};

template <class T, hk::Access kAccess>
HK_FN void channels(const Params &p) {
    conv::channels<T, kAccess>(p.conv, Split{p});
}

template <class T, hk::Access kAccess>
HK_FN void tokens(const Params &p) {
    conv::tokens<T, kAccess>(p.conv, Split{p});
}
}  // namespace

// Entry points: op, dtype of x, axis of lanes, access.
#define CONV_ENTRIES(T)                                                                            \
    HK_ENTRY(conv_split_##T##_channels, hk::kWaveSize, channels<hk::T, hk::Access::Vectorized>)    \
    HK_ENTRY(conv_split_##T##_channels_scalar, hk::kWaveSize, channels<hk::T, hk::Access::Scalar>) \
    HK_ENTRY(conv_split_##T##_tokens, hk::kWaveSize, tokens<hk::T, hk::Access::Vectorized>)        \
    HK_ENTRY(conv_split_##T##_tokens_scalar, hk::kWaveSize, tokens<hk::T, hk::Access::Scalar>)
CONV_ENTRIES(bf16)
CONV_ENTRIES(f16)
CONV_ENTRIES(f32)
