// pod.h: attention of prompts and of single tokens in one launch.
//
// Prompts are bound by matrix cores, single tokens by memory: a CU that has a block of each uses both. A block is one of
// prefill_dense.h (128 rows, 64 on sm_90) or one of decode.h, which take as many threads, and no more registers than two blocks of a CU
// have. Which one follows from the block's index: the two lists of work are mixed in proportion, or as the caller says, so that they
// end together. Hardware starts blocks in order as others end; none waits for another, and any order has the same bits, which are
// those of two launches.
//
// Eight neighbouring blocks, of an XCD each, have one kind: the tasks of an XCD are neighbours, as in the launches apart.
// Source: Kamath et al. 2024, "POD-Attention".
#pragma once

#include "decode.h"
#include "prefill_dense.h"

namespace attention {

struct PodParams {
    Params prefill;  // first: reloaded from where the parameters begin
    DecodeParams decode;
    u32 prefill_blocks, decode_blocks;
    u32 prefill_share, shares;  // of so many groups of blocks so many are of prompts, as long as there are both
};

namespace pod {

inline constexpr u32 kGroup = 8;  // blocks of one kind

/// The work of a block.
struct Task {
    bool prefill;
    u32 index;

    HK_FN Task(const PodParams &p, u32 block) {
        const u32 group = block / kGroup;
        const u32 prefills = (p.prefill_blocks + kGroup - 1) / kGroup;
        const u32 decodes = (p.decode_blocks + kGroup - 1) / kGroup;
        // Of prompts before a group, evenly spread; prompts first.
        const auto before = [&](u32 groups) { return u32((u64(groups) * p.prefill_share + p.shares - 1) / p.shares); };
        const u32 so_far = before(group);
        prefill = so_far < prefills && (group - so_far >= decodes || before(group + 1) > so_far);
        const u32 others = prefill ? group - so_far : so_far, most = prefill ? decodes : prefills;
        index = (group - (others < most ? others : most)) * kGroup + block % kGroup;
    }
};

struct OfPod {
    using Kernel = PodParams;
    HK_FN static const DecodeParams &of(const Kernel &p) { return p.decode; }
};

template <class T, int kD>
HK_FN void pod(const PodParams &p) {
    using S = decltype(dense::shape<T, kD, kD, true>());
    using Prefill = dense::Dense<T, kD, kD, S, dense::Cache::None>;
    using Decode = decode::Decode<T, Stored, kD, 1, OfPod>;
    static_assert(S::kThreads == decode::kThreads);
    union Lds {
        typename Prefill::Lds prefill;
        typename Decode::Lds decode;
    };
    auto &lds = hk::block_lds<Lds>();
    const Task task(p, hk::block_x());
    if (task.prefill) {
        if (task.index >= p.prefill_blocks) return;
        Work work;
        if (!find_work<S::kWaves * dense::kDim>(p.prefill, hk::xcd_remap(task.index, p.prefill_blocks), work)) return;
        find_keys(p.prefill, work);
        Prefill(p.prefill, work, lds.prefill).run();
    } else {
        if (task.index >= p.decode_blocks) return;
        decode::decode<T, Stored, kD, 1, OfPod>(p, hk::xcd_remap(task.index, p.decode_blocks), lds.decode);
    }
}

}  // namespace pod
}  // namespace attention

// An entry point: T, columns at most.
#define HK_POD(name, T, columns) \
    HK_ENTRY_WAVES_PER_SIMD(name, attention::decode::kThreads, 2, 8, (attention::pod::pod<T, columns>))
