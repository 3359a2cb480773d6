// routing.hip: the experts of each token, and the gates sorted by expert (moe_routing)
//   Tensors: see topk.hip, lists.hip.
// How the work is split
//   small   a wave for each token, 16 in a block; the last block to arrive (hk/arrive.h) sorts the gates of all.
//   choose  a block of 16 waves for each chunk of tokens: experts are chosen and counted; the last block to arrive sums the chunks
//           before each, and lists_place does the rest.
// Floor
//   Each logit is read once, and for each gate 12 bytes are written: 16384 tokens of DeepSeek-V3 have 16 MiB and 1.5 MiB.

#include <hk/entry.h>

#include "topk.h"

namespace {
using namespace route;

struct Params {
    Topk topk;
    Lists lists;
};

/// Calls `f(choice)` for the tokens from `first` to `end` in steps of `step`, and writes their experts. The next token's logits are
/// prefetched.
template <class Of, class F>
HK_FN void choose_tokens(const Of &chooser, typename Of::Lds &lds, u32 first, u32 end, u32 step, F f) {
    typename Of::Row next = chooser.load(first);
    for (u32 t = first; t < end; t += step) {
        const typename Of::Row row = next;
        next = chooser.load(t + step);
        const Choice c = chooser.choose(t, row, lds);
        chooser.write(t, c);
        f(c);
    }
}

template <class T, int kExpertsMost>
HK_FN void small(const Params &p) {
    using Of = Chooser<T, kExpertsMost>;
    union Lds {
        typename Of::Lds choice[kBlockWaves];
        ListLds<kBlockWaves> lists;
    };
    auto &lds = hk::block_lds<Lds>();
    const u32 wave = hk::wave_id(), token = hk::block_x() * kBlockWaves + wave;
    if (token < p.topk.tokens) {
        const Of chooser(p.topk);
        chooser.write(token, chooser.choose(token, chooser.load(token), lds.choice[wave]));
    }
    const u32 blocks = (p.topk.tokens + kBlockWaves - 1) / kBlockWaves;
    if (blocks > 1) {
        if (!hk::all_arrived(at<u64>(p.lists.arrived), hk::block_x(), blocks, p.lists.mark)) return;
    } else {
        __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_WRKGRP);
        hk::block_barrier();
        __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_WRKGRP);
    }
    sort_gates(p.lists, lds.lists);
    if (blocks > 1) hk::clear_flags(at<u64>(p.lists.arrived), blocks);
}

template <class T, int kExpertsMost>
HK_FN void choose(const Params &p) {
    using Of = Chooser<T, kExpertsMost>;
    __shared__ u32 counts[kExperts];
    __shared__ u32 sums[kBlockWaves][kWaveSize];
    __shared__ typename Of::Lds lds[kBlockWaves];
    constexpr u32 kThreads = kBlockWaves * kWaveSize;
    const u32 experts = p.topk.experts;
    for (u32 e = hk::thread_x(); e < experts; e += kThreads) counts[e] = 0;
    hk::block_barrier();
    const u32 chunk = p.lists.chunk / p.topk.k, first = hk::block_x() * chunk;
    const u32 end = p.topk.tokens - first < chunk ? p.topk.tokens : first + chunk;
    const u32 wave = hk::wave_id();
    choose_tokens(Of(p.topk), lds[wave], first + wave, end, kBlockWaves, [&](const Choice &c) {
        if (c.mine) __scoped_atomic_fetch_add(&counts[c.id], 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    });
    hk::block_barrier();
    const auto partials = at<u32>(p.lists.partials) + u64(hk::block_x()) * experts;
    for (u32 e = hk::thread_x(); e < experts; e += kThreads) partials[e] = counts[e];
    scan_chunks(hk::reload_params(p).lists, sums);
}
}  // namespace

// Entry points, as in src/routing.rs: type of the logits, experts at most.
#define ROUTING(name, T)                                                                 \
    HK_ENTRY(routing_small_##name##_256, (kBlockWaves * hk::kWaveSize), small<T, 256>)   \
    HK_ENTRY(routing_small_##name##_1024, (kBlockWaves * hk::kWaveSize), small<T, 1024>) \
    HK_ENTRY(routing_##name##_256, (kBlockWaves * hk::kWaveSize), choose<T, 256>)        \
    HK_ENTRY(routing_##name##_1024, (kBlockWaves * hk::kWaveSize), choose<T, 1024>)
ROUTING(bf16, hk::bf16)
ROUTING(f16, hk::f16)
ROUTING(f32, hk::f32)
