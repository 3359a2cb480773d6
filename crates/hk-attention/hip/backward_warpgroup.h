// backward_warpgroup.h: the walk of backward.h by warpgroup instructions (hk/warpgroup.h), of 16-bit elements and up to 128 columns.
//
//   s = own . moving;  p = exp(scale s - lse);  d = own . moving, the second operands;  ds = p (d - delta)
//   sums += ds moving;  of keys, sums += p moving, the second one;  with kDq, gradients of queries += ds^T own
//
// Two warpgroups have 64 of the block's rows each, in LDS as the moving ones are; p and ds are operands in registers. With kDq, ds of both
// warpgroups crosses LDS, and each warpgroup has half of the columns of the gradients of queries, a tile behind: these leave LDS by bulk
// additions, two tiles of which are in flight, so that no fence waits for loads in the middle of a tile.
// In flight: the second product while p is computed, sums of p while ds is, the other sums while gradients of queries go to LDS.
#pragma once

#if defined(HK_WARPGROUPS)

namespace hk::detail {

/// Adds floats in LDS to those in memory, a multiple of 16 bytes and on 16 bytes, asynchronously. By one lane.
HK_FN void bulk_add(GlobalPtr<float> to, const void *from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(to), "r"(lds_address(from)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}
/// Waits until LDS has been read by the lane's bulk additions but the last kGroups.
template <int kGroups>
HK_FN void wait_bulk_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}
/// Waits until they have been performed.
template <int kGroups>
HK_FN void wait_bulk_adds() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(kGroups) : "memory");
}

}  // namespace hk::detail

namespace backward {

/// `P` is a Pass.
template <class P>
class WarpgroupWalk {
    using T = typename P::Element;
    static constexpr int kDqk = P::kDqkOf, kDv = P::kDvOf, kTile = 64, kSums = kTile / 2;
    static constexpr bool kOfKeys = P::kKeys, kDq = P::kAddsQueries;
    // Of moving rows; with kDq, LDS has no room for more.
    static constexpr u32 kStages = kDq ? 2 : 3, kAhead = kStages - 1;
    // What a block adds to a tile has been added so many tiles later.
    static constexpr u32 kLag = 4;
    // A warpgroup's columns of the gradients of queries.
    static constexpr int kDqCols = kDqk / 2;
    using Own = hk::WarpgroupRows<2 * kTile>;
    using Moving = hk::WarpgroupRows<kTile>;
    using Rows = hk::detail::WgmmaStep<T, kTile>;
    using Numbers = Vec<float, 4>;

  public:
    struct Lds {
        Own first[kDqk / 64], second[kDv / 64];
        struct {
            Moving first[kDqk / 64], second[kDv / 64];
        } stages[kStages];
        Own ds[kDq ? 2 : 0];  // [own row][moving row]
        Numbers sums[kDq ? 2 : 0][2][kDqCols / 8 * 128];  // for the gradients of queries, in turn, of a warpgroup
        // Of moving queries: lse in units of log2, delta.
        Numbers lse[2][kTile / 4], delta[2][kTile / 4];
    };

  private:
    P &of_;
    Lds &lds_;
    const u32 from_, to_;

    /// Copies the thread's chunks of a row at `offset` of `rows`; beyond the window it reads as zero.
    HK_FN static void copy_row(const hk::Window &rows, u32 offset, u32 columns, auto &parts, u32 i) {
        const u32 place = hk::thread_x() / 8, col = (hk::thread_x() % 8 ^ Own::swizzle(place)) * 8;
#pragma unroll
        for (u32 part = 0; part < sizeof(parts) / sizeof(parts[0]); ++part)
            rows.load_to_lds(&parts[part].chunk[hk::wave_id() * hk::kWaveSize + i * kThreads],
                             part * 64 + col < columns ? offset + part * 128 + col * 2 : hk::Window::kOutOfBounds, 0);
    }
    HK_FN static hk::Window window(u64 row) {
        return {reinterpret_cast<GlobalPtr<const u8>>(row), hk::Window::kOutOfBounds - 1};
    }
    /// Rows of queries from row `first` on, or keys: of both operands, the thread's i-th row of `count` at place(i). `last`: no row is
    /// beyond it; what is, is zero, or if `repeated` the last one.
    template <bool kOfQueries, bool kRepeated>
    HK_FN void copy_rows(u32 first, u32 last, u32 count, auto &to_first, auto &to_second) const {
        const Params &p = of_.params();
        const attention::Params &all = p.all;
        u64 rows[2];
        hk::DivMod at(0, 1, 0);
        if constexpr (kOfQueries) {
            at = hk::DivMod(first, all.group, all.group_inverse);
            of_.query_rows({at.quotient, of_.work_.kv_head * all.group, 0, 0, 0.0f, 0.0f, 0.0f}, rows);
        } else {
            of_.key_rows(first, rows);
        }
        const hk::Window of_first = window(rows[0]), of_second = window(rows[1]);
        const u32 place = Own::of_mma(hk::thread_x() / 8);
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            u32 n = place + i * 32;
            const bool there = first + n <= last;
            if (kRepeated && !there) n = last - first;
            u32 offset[2];
            if constexpr (kOfQueries) {
                const hk::DivMod of_row(at.remainder + n, all.group, all.group_inverse);
                offset[0] = of_row.quotient * u32(all.q.row) + of_row.remainder * u32(all.q.head);
                offset[1] = of_row.quotient * u32(p.dout.row) + of_row.remainder * u32(p.dout.head);
            } else {
                offset[0] = n * u32(all.fresh.k.token), offset[1] = n * u32(all.fresh.v.token);
            }
            const bool read = kRepeated || there;
            copy_row(of_first, offset[0], read ? all.dqk : 0, to_first, i);
            copy_row(of_second, offset[1], read ? all.dv : 0, to_second, i);
        }
    }
    HK_FN void copy_own() const {
        const u32 last = (kOfKeys ? of_.work_.fresh : of_.work_.q_len * of_.params().all.group) - 1;
        copy_rows<!kOfKeys, false>(of_.work_.first, last, 4, lds_.first, lds_.second);
    }
    /// The tile from row `first` on. Rows past the last one are the last one, which nobody sees there.
    HK_FN void copy_tile(u32 first, u32 stage) const {
        auto &to = lds_.stages[stage];
        if (first < to_) copy_rows<kOfKeys, true>(first, to_ - 1, 2, to.first, to.second);
        hk::commit_loads();
    }
    /// Of the thread's row of the tile from row `first` on.
    HK_FN void load_numbers(u32 first, float &lse, float &delta) const {
        if (!kOfKeys || hk::thread_x() >= kTile) return;
        const u32 row = first + hk::thread_x();
        Query query = of_.find_place(row < to_ ? row : to_ - 1);
        of_.load_numbers(query);
        lse = query.lse, delta = query.delta;
    }
    HK_FN void put_numbers(float lse, float delta, u32 at) {
        if (!kOfKeys || hk::thread_x() >= kTile) return;
        reinterpret_cast<float *>(lds_.lse[at])[hk::thread_x()] = lse;
        reinterpret_cast<float *>(lds_.delta[at])[hk::thread_x()] = delta;
    }

    HK_FN static u32 warpgroup() { return hk::wave_id() / 4; }
    /// The moving row of the lane's sum i, less that of its first one; the lane's own row of it.
    static constexpr u32 moving_row(u32 i) { return i / 8 * 16 + i % 8 / 4 * 2 + i % 2; }
    static constexpr u32 own_row(u32 i) { return i % 4 / 2; }

    /// d = own . moving.
    template <int kParts>
    HK_FN static void multiply_rows(float (&d)[kSums], const Own (&own)[kParts], const Moving (&moving)[kParts]) {
        const u32 row = warpgroup() * kTile;
        Rows::set(d, own[0].descriptor(row, 0), moving[0].descriptor(0, 0));
#pragma unroll
        for (u32 i = 1; i < kParts * 4; ++i)
            Rows::add(d, own[i / 4].descriptor(row, i % 4 * 32), moving[i / 4].descriptor(0, i % 4 * 32));
    }
    /// sums += weights moving.
    template <int kParts>
    HK_FN static void add_rows(float (&sums)[kParts * 32], const hk::Frag (&weights)[2],
                               const Moving (&moving)[kParts]) {
#pragma unroll
        for (u32 i = 0; i < kTile / 16; ++i)
            hk::detail::WgmmaStep<T, kParts * 64>::template add<true>(
                sums, weights[i / 2], i % 2,
                moving[0].template descriptor<kParts == 1 ? 16 : int(sizeof(Moving))>(i * 16, 0));
    }
    /// The warpgroup's columns of the gradients of the queries of the tile, of all keys of the block.
    HK_FN void multiply_queries(float (&d)[kDqCols / 2], const Own &ds) const {
        using Columns = hk::detail::WgmmaStep<T, kDqCols>;
        const Own &keys = lds_.first[kDqk == 64 ? 0 : warpgroup()];
        const u32 byte = kDqk == 64 ? warpgroup() * 64 : 0;
        Columns::template set<true, true>(d, ds.descriptor(0, 0), keys.descriptor(0, byte));
#pragma unroll
        for (u32 i = 1; i < 2 * kTile / 16; ++i)
            Columns::template add<true, true>(d, ds.descriptor(i * 16, 0), keys.descriptor(i * 16, byte));
    }
    /// The sums of a tile to LDS, by 8 columns, and of these as lanes have them, which is their layout in memory, too.
    HK_FN void put_queries(const float (&d)[kDqCols / 2], u32 tile) {
        auto &sums = lds_.sums[tile % 2][warpgroup()];
        // Those that were there before have left LDS; `ordered`: have been added.
        if (of_.params().ordered)
            hk::detail::wait_bulk_adds<1>();
        else
            hk::detail::wait_bulk_reads<1>();
        asm volatile("bar.sync %0, %1;" : : "r"(warpgroup() + 1), "n"(kThreads / 2) : "memory");
#pragma unroll
        for (u32 i = 0; i < kDqCols / 8; ++i)
            sums[i * (kThreads / 2) + hk::thread_x() % (kThreads / 2)] = {d[4 * i], d[4 * i + 1], d[4 * i + 2],
                                                                          d[4 * i + 3]};
    }
    /// Adds what is in LDS to the sums of a tile, after a fence and a barrier.
    HK_FN void add_queries(const typename P::Turns &turns, u32 tile) const {
        if (hk::wave_id() % 4 != 0) return;
        constexpr u32 kEights = kDqCols / 8, kBytes = kThreads / 2 * sizeof(Numbers);
        const u32 eights = of_.params().all.dqk / 8, first = warpgroup() * kEights;
        const u32 own = eights <= first ? 0 : eights - first < kEights ? eights - first : kEights;
        turns.wait(tile);
        if (hk::lane_id() == 0 && own > 0)
            hk::detail::bulk_add(reinterpret_cast<GlobalPtr<float>>(turns.sums(tile) + first * kBytes),
                                 lds_.sums[tile % 2][warpgroup()], own * kBytes);
    }

    /// Rounds to operands.
    HK_FN static void round(const float (&x)[kSums], hk::Frag (&y)[2]) {
#pragma unroll
        for (u32 i = 0; i < kSums; i += 2) {
            const Vec<float, 2> pair = {x[i], x[i + 1]};
            y[i / 16][i % 16 / 8 * 2 + i % 8 / 4 + own_row(i) * 4] = __builtin_bit_cast(u32, hk::narrow<T, 2>(pair));
        }
    }
    /// Moving rows [begin, end) that see all rows of the warpgroup, or that all its rows see.
    HK_FN void find_plain(u32 &begin, u32 &end) const {
        const attention::Params &p = of_.params().all;
        constexpr i32 kUnbounded = 1 << 29;
        const u32 first = of_.work_.first + warpgroup() * kTile, last = first + kTile - 1;
        begin = 0, end = 0;
        if (kOfKeys && last < of_.work_.fresh) {
            const auto rows = [&](i32 query) {
                const i32 queries = i32(of_.work_.q_len);
                return u32(query < 0 ? 0 : query < queries ? query : queries) * p.group;
            };
            if (p.scores.right < kUnbounded) begin = rows(i32(last) - of_.behind() - p.scores.right);
            end = p.scores.left < kUnbounded ? rows(i32(first) - of_.behind() + p.scores.left + 1) : to_;
        }
        if (!kOfKeys && last < of_.work_.q_len * p.group) {
            const auto range = [&](u32 row) {
                return key_range(p, of_.work_, hk::DivMod(row, p.group, p.group_inverse).quotient);
            };
            const i32 behind_last = range(first).last + 1;
            begin = u32(range(last).first), end = behind_last < 0 ? 0 : u32(behind_last);
        }
        begin = hk::uniform(begin), end = hk::uniform(end < to_ ? end : to_);
    }
    /// Of the tile from row `first` on.
    HK_FN void mask(float (&x)[kSums], u32 first) const {
#pragma unroll
        for (u32 i = 0; i < kSums; i += 16) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 visible = of_.visible_rows(first + i * 2, to_, int(r));
#pragma unroll
                for (u32 j = 0; j < 16; ++j) {
                    if (own_row(j) == r && !(visible >> moving_row(j) & 1)) x[i + j] = 0.0f;
                }
            }
        }
    }

  public:
    HK_FN WarpgroupWalk(P &of, u32 from, u32 to)
        : of_(of), lds_(reinterpret_cast<Lds &>(of.lds_)), from_(from), to_(to) {}

    /// Leaves the sums in the accumulators of the pass.
    HK_FN void run() {
        using namespace hk::detail;
        float of_first[kDqk / 2] = {}, of_second[kOfKeys ? kDv / 2 : 1] = {};
        const u32 tiles = (to_ - from_ + kTile - 1) / kTile;
        const float scale = of_.params().all.scores.scale * kLog2E;
        typename P::Turns turns(of_);
        float next_lse = 0.0f, next_delta = 0.0f;
        copy_own();
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) copy_tile(from_ + i * kTile, i);
        u32 stage = 0;
        load_numbers(from_, next_lse, next_delta);
        put_numbers(next_lse, next_delta, 0);
        load_numbers(from_ + kTile, next_lse, next_delta);
        u32 plain_from, plain_to;
        find_plain(plain_from, plain_to);
        hk::Frag probs[2], ds[2];
#pragma unroll 1
        for (u32 t = 0; t < tiles; ++t) {
            const u32 first = from_ + t * kTile, at = t % 2;
            const auto &moving = lds_.stages[stage];
            hk::wait_loads<kAhead - 1, 0>();
            publish_to_wgmma();
            // The tile has landed, ds of the one before is in LDS, and all MMAs of that one have been waited for.
            hk::block_barrier();
            if (kDq && t >= kLag) turns.pass(from_ / kTile + t - kLag);
            copy_tile(first + kAhead * kTile, stage == 0 ? kAhead : stage - 1);
            if (kDq && t > 1) add_queries(turns, from_ / kTile + t - 2);
            float s[kSums], d[kSums];
            begin_wgmma();
            multiply_rows(s, lds_.first, moving.first);
            commit_wgmma();
            multiply_rows(d, lds_.second, moving.second);
            commit_wgmma();
            put_numbers(next_lse, next_delta, 1 - at);
            load_numbers(first + 2 * kTile, next_lse, next_delta);
            wait_wgmma<1>(s);
            const auto &lse = lds_.lse[at], &delta = lds_.delta[at];
            const u32 group = hk::lane_id() % 4;
#pragma unroll
            for (u32 i = 0; i < kSums; i += 8) {
                Numbers of_rows;
                if constexpr (kOfKeys) of_rows = lse[i / 2 + group];
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    const float number = kOfKeys ? of_rows[moving_row(j)] : of_.query_[own_row(j)].lse;
                    s[i + j] = hk::exp2_fast(__builtin_fmaf(s[i + j], scale, -number));
                }
            }
            const bool masked = first < plain_from || first + kTile > plain_to;
            if (masked) mask(s, first);
            if constexpr (kOfKeys) {
                round(s, probs);
                begin_wgmma();
                add_rows(of_second, probs, moving.second);
            }
            commit_wgmma();
            wait_wgmma<1>(d);
#pragma unroll
            for (u32 i = 0; i < kSums; i += 8) {
                Numbers of_rows;
                if constexpr (kOfKeys) of_rows = delta[i / 2 + group];
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    const float number = kOfKeys ? of_rows[moving_row(j)] : of_.query_[own_row(j)].delta;
                    d[i + j] = s[i + j] * (d[i + j] - number);
                }
            }
            if (masked) {
#pragma unroll
                for (u32 i = 0; i < kSums; ++i) d[i] = s[i] == 0.0f ? 0.0f : d[i];
            }
            round(d, ds);
            if constexpr (kDq) {
                float queries[kDqCols / 2];
                begin_wgmma();
                // In the first tile of nothing.
                multiply_queries(queries, lds_.ds[1 - at]);
                commit_wgmma();
                add_rows(of_first, ds, moving.first);
                commit_wgmma();
                lds_.ds[at].put(hk::wave_id() * 16, ds);
                wait_wgmma<1>(queries);
                if (t > 0) put_queries(queries, from_ / kTile + t - 1);
            } else {
                begin_wgmma();
                add_rows(of_first, ds, moving.first);
                commit_wgmma();
            }
            wait_wgmma<0>(of_first);
            if constexpr (kOfKeys) wait_wgmma<0>(of_second), keep_until_here(probs);
            keep_until_here(ds);
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }
        if constexpr (kDq) {
            const u32 last = from_ / kTile + tiles - 1;
            publish_to_wgmma();
            hk::block_barrier();
            if (tiles >= kLag) turns.pass(last + 1 - kLag);
            if (tiles > 1) add_queries(turns, last - 1);
            float queries[kDqCols / 2];
            begin_wgmma();
            multiply_queries(queries, lds_.ds[(tiles - 1) % 2]);
            commit_wgmma();
            wait_wgmma<0>(queries);
            put_queries(queries, last);
            publish_to_wgmma();
            hk::block_barrier();
            if (tiles + 1 >= kLag) turns.pass(last + 2 - kLag);
            add_queries(turns, last);
            wait_bulk_adds<0>();
            hk::block_barrier();
            if (tiles > 1) turns.pass(last - 1);
            turns.pass(last);
        }
#pragma unroll
        for (int i = 0; i < kDqk / 2; ++i) of_.da_.acc[0][i / 8][hk::place_of_sum(i)] = of_first[i];
        if constexpr (kOfKeys) {
#pragma unroll
            for (int i = 0; i < kDv / 2; ++i) of_.db_.acc[0][i / 8][hk::place_of_sum(i)] = of_second[i];
        }
    }
};

}  // namespace backward
#endif
