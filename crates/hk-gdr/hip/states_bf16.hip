// states_bf16.hip: chunk_delta_h; see states.h.
#include "states.h"

namespace {
using Params = gdr::Prefill;
}  // namespace

STATES_ENTRIES(bf16, 1)
CHANNELS_ENTRIES(bf16, 1)
