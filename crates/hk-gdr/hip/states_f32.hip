// states_f32.hip: chunk_delta_h; see states.h.
#include "states.h"

namespace {
using Params = gdr::Prefill;
}  // namespace

STATES_ENTRIES(f32, 2)
CHANNELS_ENTRIES(f32, 2)
