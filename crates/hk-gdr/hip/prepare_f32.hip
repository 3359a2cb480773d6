// prepare_f32.hip: wy_representation and recompute_w_u, and sums of gates of channels; see prepare.h.
#include "prepare.h"

namespace {
using Params = gdr::Prefill;
}  // namespace

PREPARE_ENTRIES(f32, 32)
CHANNELS_ENTRIES(f32)
HK_ENTRY(sums_channels, hk::kWaveSize, gdr::prepare::sums)
