// lean_general.hip: stream-K attention of rows of any alignment, and in f32 (lean.h, prefill_general.h).
#include "lean.h"
#include "prefill_general.h"

namespace {
using namespace attention;

template <class T, int kColumns>
HK_FN void lean_general(const Params &p) {
    auto &lds = hk::block_lds<general::Lds<T, kColumns, kColumns>>();
    lean::each_segment<general::kWaves * general::kQueries<kColumns>, general::kKeys>(
        p, [&](const Params &now, const lean::Segment &segment) __attribute__((always_inline)) {
            general::Prefill<T, kColumns, kColumns, false, lean::Segment>(now, segment, lds).run();
        });
}
}  // namespace

#define LEAN(name, T, columns) \
    HK_ENTRY_WAVES_PER_SIMD(lean_general_##name##_##columns, general::kThreads, 1, 8, lean_general<hk::T, columns>)

LEAN(bf16, bf16, 128)
LEAN(bf16, bf16, 256)
LEAN(f16, f16, 128)
LEAN(f16, f16, 256)
LEAN(f32, f32, 128)
LEAN(f32, f32, 256)
