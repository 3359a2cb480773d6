// conv.hip: causal_conv1d_fwd, causal_conv1d_update: depthwise causal convolution along the tokens of sequences. Formula, tensors, split of the
// work: crates/hk-activation/hip/include/activation/conv.h
#include <activation/conv.h>
#include <hk/entry.h>

namespace {
using conv::Params;

template <class T, hk::Access kAccess>
HK_FN void channels(const Params &p) {
    conv::channels<T, kAccess>(p, conv::OneOutput{});
}

template <class T, hk::Access kAccess>
HK_FN void tokens(const Params &p) {
    conv::tokens<T, kAccess>(p, conv::OneOutput{});
}
}  // namespace

// Entry points: op, dtype of x, axis of lanes, access.
#define CONV_ENTRIES(T)                                                                      \
    HK_ENTRY(conv_##T##_channels, hk::kWaveSize, channels<hk::T, hk::Access::Vectorized>)    \
    HK_ENTRY(conv_##T##_channels_scalar, hk::kWaveSize, channels<hk::T, hk::Access::Scalar>) \
    HK_ENTRY(conv_##T##_tokens, hk::kWaveSize, tokens<hk::T, hk::Access::Vectorized>)        \
    HK_ENTRY(conv_##T##_tokens_scalar, hk::kWaveSize, tokens<hk::T, hk::Access::Scalar>)
CONV_ENTRIES(bf16)
CONV_ENTRIES(f16)
CONV_ENTRIES(f32)
