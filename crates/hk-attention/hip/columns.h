// columns.h: keys and values of vLLM's caches, for decode.h: K in pieces of 16 bytes of columns, V by columns, so that 16 bytes are
// neighbouring tokens of a column. They are fragments of V^T as they lie in memory, if the rows of S^T are tokens in that order.
#pragma once

#include "keys.h"
#include "problem.h"

#include <hk/arch.h>
#include <hk/matrix.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention::decode {

/// Row n of the S^T of a step, in tiles of kDim, is token key_of_row(n): lanes that have rows 4 g to 4 g + 3 of each tile have kRun
/// neighbouring tokens, run g of the step.
template <int kBytes, int kDim>
struct Runs {
    static constexpr u32 kRun = 16 / kBytes;  // tokens
    static constexpr u32 kParts = hk::kLaneGroups<kDim>;
    static constexpr u32 kKeys = kRun * kParts;  // of a step
    static constexpr u32 kRows = hk::kMmaRows;
    static_assert(kKeys % kDim == 0 && kParts * kRows == kDim, "whole tiles");

    HK_FN static constexpr u32 run_of_row(u32 n) { return n % kDim / kRows; }
    HK_FN static constexpr u32 key_of_row(u32 n) { return run_of_row(n) * kRun + n / kDim * kRows + n % kRows; }
};

/// Walks along a wave's steps of the keys of a sequence, in pages of whole runs. Runs past the last key are the last one again, those of
/// pages that are not in the cache are of page 0: what they have is to be masked.
template <class R, int kOwn, u32 kStride>
class RunWalk {
    static constexpr u32 kParts = R::kParts;
    u64 k_, v_;  // of the head, in page 0
    i64 k_page_, v_page_;
    u32 k_run_, v_run_;  // from run to run of a page
    u64 table_;
    u32 n_pages_, runs_, inverse_;  // of a page
    u32 run_, last_;
    u32 entry_[kParts];  // of the next step: table entries are loaded a step ahead

  public:
    struct Windows {
        u64 k[kOwn], v;  // the lane's runs
        u32 missing;  // bit i: run i is of a page that is not in the cache
    };

    /// `begin`, a multiple of a run, is the wave's first key.
    HK_FN RunWalk(const Params &p, const Work &work, u32 begin, u32 end) {
        const KeyRows &k = p.cache.k, &v = p.cache.v;
        k_ = detail::uniform_address(k.row(0, work.kv_head, 0)),
        v_ = detail::uniform_address(v.row(0, work.kv_head, 0));
        k_page_ = k.batch, v_page_ = v.batch;
        k_run_ = u32(k.token_group) * R::kRun;
        constexpr u32 kContiguous = 31;  // shift of tokens that are one group
        v_run_ = v.token_shift == kContiguous ? 16 : u32(v.token_group);
        table_ = detail::uniform_address(p.pages.table + work.pages * 4);
        n_pages_ = p.pages.n_pages, runs_ = p.pages.tokens / R::kRun;
        inverse_ = ~0u / runs_;
        run_ = begin / R::kRun, last_ = (end - 1) / R::kRun;
        look_up();
    }

    HK_FN Windows next() {
        Windows windows;
        windows.missing = 0;
        u64 k[kParts], v[kParts];
#pragma unroll
        for (u32 i = 0; i < kParts; ++i) {
            const bool there = entry_[i] < n_pages_;
            // Without a branch, behind which the compiler loses wait states of MFMAs before it.
            windows.missing |= (u32(!there) & u32(run_ + i <= last_)) << i;
            const u32 page = there ? entry_[i] : 0, of_page = hk::DivMod(run(i), runs_, inverse_).remainder;
            k[i] = k_ + u64(i64(page) * k_page_) + of_page * k_run_;
            v[i] = v_ + u64(i64(page) * v_page_) + of_page * v_run_;
        }
        const u32 lane = hk::lane_id();
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) windows.k[r] = of_lane(k, R::run_of_row(hk::row_of_lane<16>(lane, r)));
        windows.v = of_lane(v, hk::group_of_lane<16>(lane));
        run_ += kStride / R::kRun;
        look_up();
        return windows;
    }

  private:
    HK_FN static u64 of_lane(const u64 (&base)[kParts], u32 part) {
        u32 low = u32(base[0]), high = u32(base[0] >> 32);
#pragma unroll
        for (u32 i = 1; i < kParts; ++i) {
            low = part == i ? u32(base[i]) : low;
            high = part == i ? u32(base[i] >> 32) : high;
        }
        return u64(high) << 32 | low;
    }
    HK_FN u32 run(u32 i) const { return run_ + i < last_ ? run_ + i : last_; }
    HK_FN void look_up() {
#pragma unroll
        for (u32 i = 0; i < kParts; ++i)
            entry_[i] = u32(index_at(table_, hk::DivMod(run(i), runs_, inverse_).quotient));
    }
};

/// Dwords of 16 bytes of a lane's run whose tokens [first, end) count; others are zero.
template <int kBytes>
HK_FN Vec<u32, 4> run_mask(i32 first, i32 end) {
    constexpr u32 kOfDword = 4 / kBytes, kBits = 8 * kBytes;
    Vec<u32, 4> mask = 0;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
#pragma unroll
        for (u32 i = 0; i < kOfDword; ++i) {
            const i32 token = w * kOfDword + i;
            mask[w] |= token >= first && token < end ? ((1u << kBits) - 1u) << i * kBits : 0;
        }
    }
    return mask;
}

}  // namespace attention::decode
