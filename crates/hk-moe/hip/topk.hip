// topk.hip: the k experts of each token, by their scores (moe_topk)
//   x          [tokens, experts] bf16 | f16 | f32   unit stride on experts, any row stride
//   bias       [experts] f32                        added to scores for the choice alone
//   weights    [tokens, k] as x | f32
//   ids        [tokens, k] i32
//   bitmatrix  [words, bitmatrix_rows] u32          bit e % 32 of word e / 32 of a token: expert e is chosen
// How the work is split
//   A wave per token, four in a block: see topk.h. Up to 256 experts, or 1024.
// Floor
//   Each logit is read once: 16384 tokens of DeepSeek-V3 have 8 MiB.

#include <hk/entry.h>

#include "topk.h"

namespace {
using namespace route;

using Params = Topk;

constexpr int kWaves = 4;

template <class T, int kExpertsMost>
HK_FN void topk(const Topk &p) {
    using Of = Chooser<T, kExpertsMost>;
    __shared__ typename Of::Lds lds[kWaves];
    const Of chooser(p);
    const u32 token = hk::block_x() * kWaves + hk::wave_id();
    const Choice c = chooser.choose(token, chooser.load(token), lds[hk::wave_id()]);
    if (token < p.tokens) chooser.write(token, c);
    if (p.bitmatrix != 0 && token < p.bitmatrix_rows) chooser.write_bits(token, c);
}
}  // namespace

// Entry points, as in src/topk.rs: type of the logits, experts at most.
#define TOPK(name, T)                                                   \
    HK_ENTRY(topk_##name##_256, (kWaves * hk::kWaveSize), topk<T, 256>) \
    HK_ENTRY(topk_##name##_1024, (kWaves * hk::kWaveSize), topk<T, 1024>)
TOPK(bf16, hk::bf16)
TOPK(f16, hk::f16)
TOPK(f32, hk::f32)
