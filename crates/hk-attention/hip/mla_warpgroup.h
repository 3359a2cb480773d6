// mla_warpgroup.h: the walk of mla.h by warpgroup instructions (hk/warpgroup.h): blocks of 64 rows, keys of 16-bit elements on 16 bytes.
//
//   warpgroups 0 and 1   O += P V, half of the columns each
//   warpgroup 2          S = Q K^T, softmax, P to LDS
//   warpgroup 3          copies of keys to LDS: it is busy for as long as these are issued, 32 bytes a clock
//
// P takes the place of the columns beside those of values, which have been multiplied. Tiles are in two stages; the next scores are made
// while a tile's P is multiplied.
// Floor: keys are read once; the matrix units' time, 2 (2 C + R) flop a row and key, is as long at 64 rows on an H200.
#pragma once

#if defined(HK_WARPGROUPS)

namespace mla {

template <class S>
struct WarpgroupLds<S, true> {
    // Queries have landed; a tile has; P is in LDS; the tile has been multiplied; the sums of rows are in LDS.
    hk::SplitBarrier queries_landed, landed[S::kStages], scored[S::kStages], left[S::kStages], summed;
    float factors[S::kStages][S::kRows];  // of O, before a tile's products are added
    Vec<float, 2> row_sums[S::kRows];
    Work work;  // of the block: there are few registers beside those of O
};

/// `D` is a Decode.
template <class D>
class WarpgroupWalk {
    using S = typename D::S;
    using T = typename S::T;
    static constexpr int kKeys = S::kKeys, kCols = D::kCols, kStages = S::kStages;
    static constexpr u32 kScores = 2;  // the warpgroup; the last one copies
    // Registers of a thread; the block begins with 128.
    static constexpr int kOfValues = 160, kOfCopies = 64;
    // Of a warpgroup.
    static constexpr int kThreads = 128, kWaves = 4;
    static constexpr int kMoves = kKeys * 8 / kThreads;
    static constexpr u32 kRowsAtOnce = kThreads / 8;
    using Tile = typename D::Stage;
    using Part = typename Tile::Part;
    using Scores = typename D::Scores;
    using Values = hk::detail::WgmmaStep<T, 128>;
    static constexpr int kPieces = kCols / 128;
    static_assert(S::kRows == 64 && kKeys == 64 && S::kWavesV == 2);

    D &of_;
    typename D::Lds &lds_;

    /// Calls `f<stage>(tile, parity)` for each tile: stages are constants, of which descriptors in LDS are made.
    HK_FN void each_tile(auto f) const {
        static_assert(kStages == 2);
        for (u32 tile = 0, parity = 0; tile < of_.n_tiles_; parity ^= 1) {
            f.template operator()<0>(tile++, parity);
            if (tile < of_.n_tiles_) f.template operator()<1>(tile++, parity);
        }
    }

    /// The address of something in LDS. The compiler would keep all descriptors that are made of it in registers, the whole loop long.
    HK_FN static u32 address(const auto &of) {
        u32 at;
        asm volatile("mov.b32 %0, %1;" : "=r"(at) : "r"(hk::detail::lds_address(&of)));
        return at;
    }

    HK_FN u32 row_of(u32 r) const { return of_.wave_rows_ * 16 + hk::row_of_lane<16>(hk::lane_id(), r); }
    /// In the place of columns that have been multiplied.
    HK_FN Part &probs(u32 stage) const { return lds_.rows[stage].part[S::kParts - 1]; }

    HK_FN static u32 thread() { return hk::thread_x() % kThreads; }
    /// Starts to copy the queries, a chunk of each part a thread.
    HK_FN void copy_queries() {
        static_assert(S::kThreads == 64 * 8);
        const attention::Params &p = of_.p_.attention;
        const u32 place = hk::thread_x() / 8, row = Part::of_mma(place),
                  chunk = hk::thread_x() % 8 ^ Part::swizzle(place);
        const u64 from = of_.query_row(of_.row_of(of_.work_.first + row));
        const hk::Window columns(reinterpret_cast<GlobalPtr<const u8>>(from), p.dqk * 2);
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
            const u32 col = part * 64 + chunk * 8;
            auto *to = &lds_.queries[part].chunk[hk::wave_id() * hk::kWaveSize];
            if (part * 64 >= S::kC && of_.p_.cos_sin)
                to[hk::lane_id()] = of_.query_chunk(row, from, col, true);
            else
                columns.load_to_lds(to, col * 2, 0);
        }
        lds_.queries_landed.arrive_when_copied();
        lds_.queries_landed.arrive();
        // Rotated ones were where the first tile will be.
        if (of_.p_.cos_sin) hk::block_barrier();
    }

    HK_FN static u32 key_of(int move) { return Part::of_mma(thread() / 8) + move * kRowsAtOnce; }
    HK_FN void load_entries(u32 tile, i32 (&entry)[kMoves]) const {
#pragma unroll
        for (int i = 0; i < kMoves; ++i) entry[i] = of_.entry_of(of_.first_ + tile * kKeys + key_of(i));
    }
    /// Copies all tiles. Rows that are not there are zeros: what LDS held may be NaN.
    HK_FN void copy() {
        const u32 chunk = thread() % 8 ^ Part::swizzle(thread() / 8);
        i32 entry[kMoves];
        load_entries(0, entry);
        for (u32 tile = 0; tile < of_.n_tiles_; ++tile) {
            const attention::Params &p = of_.params();
            const u32 stage = tile % kStages;
            Tile &to = lds_.rows[stage];
            typename D::Source from[kMoves];
#pragma unroll
            for (int i = 0; i < kMoves; ++i) from[i] = of_.source(of_.first_ + tile * kKeys + key_of(i), entry[i]);
            load_entries(tile + 1, entry);
            // Of the stage's tile before.
            lds_.left[stage].wait(tile / kStages % 2 ^ 1);
#pragma unroll
            for (int i = 0; i < kMoves; ++i) {
                const u64 row = from[i].row ? from[i].row : p.cache.k.data;
                const hk::Window columns(reinterpret_cast<GlobalPtr<const u8>>(row), from[i].row ? p.dqk * 2 : 0);
#pragma unroll
                for (int part = 0; part < S::kParts; ++part) {
                    const u32 col = part * 64 + chunk * 8;
                    auto *at = &to.part[part].chunk[i * kThreads + of_.wave_rows_ * hk::kWaveSize];
                    if (part * 64 >= S::kC && from[i].rotated)
                        at[hk::lane_id()] = of_.rotated_key(col - S::kC);
                    else
                        columns.load_to_lds(at, col * 2, 0);
                }
                if (thread() % 8 == 0) lds_.state[stage][key_of(i)] = from[i].state;
            }
            lds_.landed[stage].arrive_when_copied();
            lds_.landed[stage].arrive();
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }

    /// Scores of the tile that lands next. It is published to all MMAs that follow: those with V wait for P.
    template <int kStage>
    HK_FN void multiply_keys(float (&s)[kKeys / 2], u32 parity) const {
        lds_.landed[kStage].wait(parity);
        hk::detail::publish_to_wgmma();
        const u32 queries = address(lds_.queries), keys = address(lds_.rows[kStage]);
#pragma unroll
        for (float &sum : s) sum = 0.0f;
        hk::detail::begin_wgmma();
#pragma unroll
        for (int step = 0; step < S::kParts * 4; ++step)
            hk::detail::Wgmma<T, kKeys>::mma(s, Tile::keys(queries, step), Tile::keys(keys, step));
        hk::detail::commit_wgmma();
        hk::detail::wait_wgmma<0>(s);
    }
    HK_FN void score() {
        const u32 lane = hk::lane_id();
        const bool first_of_row = hk::group_of_lane<16>(lane) == 0;
        of_.find_rows();
        of_.find_visible();
        OnlineSoftmax<16, T> softmax;
        float s[kKeys / 2];
        lds_.queries_landed.wait(0);
        multiply_keys<0>(s, 0);
        each_tile([&]<int kStage>(u32 tile, u32 parity) HK_INLINE {
            Scores scores;
#pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) scores.acc[0][i / 8][hk::place_of_sum(i)] = s[i];
            const auto &state = lds_.state[kStage];
            of_.mask(scores, tile, state[lane] != 0.0f || state[lane + hk::kWaveSize] != 0.0f, state);
            hk::WaveTile<typename D::Mma, 16, 16> factors;
            factors.acc[0][0] = 1.0f;
            softmax.update(scores, factors, of_.scale_);
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                if (first_of_row) lds_.factors[kStage][row_of(r)] = factors.acc[0][0][r * hk::kMmaRows];
            }
            probs(kStage).put(of_.wave_rows_ * 16, scores.template as_operand<T, true>(0).frag);
            hk::detail::publish_to_wgmma();
            lds_.scored[kStage].arrive();
            if (tile + 1 < of_.n_tiles_) multiply_keys<1 - kStage>(s, kStage ? parity ^ 1 : parity);
        });
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
            const Vec<float, 2> of_row = softmax.sums(r);
            if (first_of_row) lds_.row_sums[row_of(r)] = of_row;
        }
        lds_.summed.arrive();
    }
    HK_FN void multiply() {
        float o[kPieces][64] = {};
        each_tile([&]<int kStage>(u32, u32 parity) HK_INLINE {
            lds_.scored[kStage].wait(parity);
            const auto &factors = lds_.factors[kStage];
            const float factor[] = {factors[row_of(0)], factors[row_of(1)]};
            if (hk::ballot(factor[0] != 1.0f || factor[1] != 1.0f) != 0) {
#pragma unroll
                for (auto &piece : o) {
#pragma unroll
                    for (int i = 0; i < 64; ++i) piece[i] *= factor[i % 4 / 2];
                }
            }
            const u32 p = address(probs(kStage)),
                      values = address(lds_.rows[kStage].part[of_.wave_cols_ * kPieces * 2]);
            hk::detail::begin_wgmma();
#pragma unroll
            for (u32 step = 0; step < kKeys / 16; ++step) {
#pragma unroll
                for (u32 piece = 0; piece < u32(kPieces); ++piece)
                    Values::template add<false, true>(o[piece], Part::descriptor_at(p, 0, step * 32),
                                                      Tile::values(values + piece * 2 * sizeof(Part), step));
            }
            hk::detail::commit_wgmma();
#pragma unroll
            for (auto &piece : o) hk::detail::wait_wgmma<0>(piece);
            lds_.left[kStage].arrive();
        });
        lds_.summed.wait(0);
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) of_.met_[r] = lds_.row_sums[row_of(r)];
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) of_.o_.acc[0][i / 8][hk::place_of_sum(i)] = o[i / 64][i % 64];
    }

  public:
    HK_FN explicit WarpgroupWalk(D &of) : of_(of), lds_(of.lds_) {}

    /// `keys`: there are some. Stores the outputs; true: they are partial ones.
    HK_FN bool run(bool keys) {
        if (keys) of_.count_tiles();
        if (hk::thread_x() == 0) {
#pragma unroll
            for (int i = 0; i < kStages; ++i) {
                lds_.landed[i].init(kThreads + kWaves);
                lds_.scored[i].init(kWaves);
                lds_.left[i].init(S::kWavesV * kWaves);
            }
            lds_.queries_landed.init(S::kThreads + S::kWaves);
            lds_.summed.init(kWaves);
        }
        hk::block_barrier();
        if (keys) copy_queries();
        if (of_.wave_cols_ < u32(S::kWavesV)) {
            hk::detail::take_registers<kOfValues>();
            if (keys) multiply();
            of_.find_rows();
            of_.store_outputs();
        } else if (of_.wave_cols_ == kScores) {
            if (keys) score();
        } else {
            hk::detail::give_registers<kOfCopies>();
            if (keys) copy();
        }
        return of_.is_partial(of_.params());
    }
};

}  // namespace mla
#endif
