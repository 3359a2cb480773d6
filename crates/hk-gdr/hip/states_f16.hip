// states_f16.hip: chunk_delta_h; see states.h.
#include "states.h"

namespace {
using Params = gdr::Prefill;
}  // namespace

STATES_ENTRIES(f16, 1)
CHANNELS_ENTRIES(f16, 1)
