// prepare_bf16.hip: wy_representation and recompute_w_u; see prepare.h.
#include "prepare.h"

namespace {
using Params = gdr::Prefill;
}  // namespace

PREPARE_ENTRIES(bf16, 16)
CHANNELS_ENTRIES(bf16)
