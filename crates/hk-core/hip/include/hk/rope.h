// rope.h: rotary position embedding of vectors in registers; a token's factors from tables or angles.
//   out_a = x_a cos_a - x_b sin_a      a < b the columns of a pair among the `rotary` columns that are rotated:
//   out_b = x_b cos_b + x_a sin_b      NeoX (i, i + rotary / 2), interleaved (2i, 2i + 1)
//   inverse: out_a = x_a cos_a + x_b sin_b ; out_b = x_b cos_b - x_a sin_a
// Tables have one entry for each pair ("half", rotary / 2 columns) or for each column ("full", rotary columns).
// Source: Su et al. 2021, section 3.2.2. The host's side is hk_core::plan::rope.
//
// How columns lie in lanes
//   A lane has a slot: two vectors of N columns, `rotary / 2` columns apart. Pairs of the NeoX style lie in its two
//   vectors, at the same index; those of the interleaved style are adjacent in one vector. So no lane needs a column of
//   another, and accesses are coalesced. N = 1, the scalar path, is one pair of either style.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/trig.h>
#include <hk/types.h>

namespace hk {

/// Slots of N-column vectors, two each, that `cols` columns take.
template <int N>
HK_FN u32 slots_of(u32 cols) {
    return (cols + 2 * N - 1) / (2 * N);
}

/// What a lane rotates its slot by: the two columns of a pair may have different entries, and the sine has the sign
/// with which the other column of the pair enters.
template <int N>
struct Factors {
    Vec<float, N> cos[2];
    Vec<float, N> sin[2];
};

/// The same where both vectors of a slot have the same entries: the sine is that of the second one, the first one's is
/// its negative.
template <int N>
struct SharedFactors {
    Vec<float, N> cos, sin;
};

/// A rotation as the host describes it; the same layout as `hk_core::plan::rope::RopeParams`.
struct Rope {
    enum Positions : u32 {
        kIndex = 0,  ///< the token's index
        kGiven = 1,  ///< positions[batch, token]
        kSequences = 2,  ///< the index since the token's sequence began, at one of positions[0, ..], ascending
        kSequencesFrom = 3,  ///< the same, and offsets[0, sequence] is added
    };

    Global cos;  // [positions, rotary / 2 or rotary]  f32, or T of the kernel; or angles, and no sines
    Global sin;  // the same
    Global positions;  // [batches, tokens], or [1, sequences + 1]; i32 or i64
    Global offsets;  // [batches, tokens] or [1, sequences]  i32 or i64, optional; added to positions
    u32 rotary;  // columns that are rotated, even
    u32 interleaved;  // pairs (2i, 2i + 1)
    u32 full;  // tables with an entry for each column
    u32 inverse;
    u32 table_is_f32;
    u32 positions_kind;
    u32 positions_are_i64;
    u32 offsets_are_i64;

    /// The token has no table row: its heads are filled with `poison`.
    static constexpr u32 kNoRow = 0xffffffffu;

    /// The table row of a token. Positions are not trusted: one beyond the tables gives kNoRow.
    HK_FN u32 table_row(u32 batch, u32 token) const {
        i64 row = token;
        u32 with_offset = token;
        bool overflow = false;
        if (positions_kind == kGiven) row = integer(positions, positions_are_i64, batch, token);
        if (positions_kind >= kSequences) {
            const u32 sequence = sequence_of(token, row);
            if (sequence == kNoRow) return kNoRow;
            if (positions_kind == kSequencesFrom) with_offset = sequence;
        }
        if (offsets.present()) {
            overflow = __builtin_add_overflow(row, integer(offsets, offsets_are_i64, batch, with_offset), &row);
        }
        // Negative ones are huge as unsigned numbers.
        return overflow || u64(row) >= cos.rows() ? kNoRow : u32(row);
    }

    /// The first column of vector `part`, 0 or 1, of a slot, counted from the first rotated one.
    template <int N>
    HK_FN u32 column(u32 slot, int part) const {
        if (N == 1 && interleaved) return 2 * slot + part;
        return slot * N + (part ? rotary / 2 : 0);
    }

    /// The factors of a slot from tables; T is the tables' type if that is not f32. The row is one of the tables.
    /// N > 1 needs table rows on 16 bytes.
    template <class T, int N>
    HK_FN Factors<N> factors(u32 row, u32 slot) const {
        if (table_is_f32) return from_tables<float, N>(row, slot);
        return from_tables<T, N>(row, slot);
    }

    /// The factors of a slot from a table of angles, in radians; see `sincos`.
    template <class T, int N>
    HK_FN Factors<N> factors_of_angles(u32 row, u32 slot) const {
        Entries<N> angle = table_is_f32 ? entries<float, N>(cos, row, slot) : entries<T, N>(cos, row, slot);
        Entries<N> c, s;
        sincos(angle.part[0], s.part[0], c.part[0]);
        if (shared<N>()) {
            s.part[1] = s.part[0];
            c.part[1] = c.part[0];
        } else {
            sincos(angle.part[1], s.part[1], c.part[1]);
        }
        return signed_factors(c, s);
    }

    /// Both vectors of a slot have the same entries.
    template <int N>
    HK_FN bool shared() const {
        return !full && (N == 1 || !interleaved);
    }

    /// The factors of a slot whose vectors share them, from tables.
    template <class T, int N>
    HK_FN SharedFactors<N> shared_factors(u32 row, u32 slot) const {
        SharedFactors<N> f;
        if constexpr (N == 1) {
            const auto entry = [&](const Global &table) {
                return table_is_f32 ? load<float, N>(table.template row<const float>(row) + slot)
                                    : load<T, N>(table.template row<const T>(row) + slot);
            };
            f = {entry(cos), entry(sin)};
        } else {
            // Entries of either type are loaded to the same registers.
            static_assert(N * sizeof(T) == kVecBytes, "one access, or as many as f32 take");
            constexpr int kWords = N * sizeof(float) / kVecBytes;
            using Raw = Vec<u32, 4>[kWords];
            const auto ask = [&](const Global &table, Raw &raw) {
                const u64 place =
                    (u64(row) * u64(table.row_stride()) + slot * N) * (table_is_f32 ? sizeof(float) : sizeof(T));
                const auto at = reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(table.data + place);
                raw[0] = *at;
#pragma unroll
                for (int i = 1; i < kWords; ++i) raw[i] = load_predicated(at + i, table_is_f32);
            };
            const auto entries = [&](const Raw &raw) {
                if (table_is_f32) return __builtin_bit_cast(Vec<float, N>, raw);
                return widen<T, N>(__builtin_bit_cast(Vec<T, N>, raw[0]));
            };
            Raw cosines, sines;
            ask(cos, cosines);
            ask(sin, sines);
            f = {entries(cosines), entries(sines)};
        }
        if (inverse) f.sin = -f.sin;
        return f;
    }

    /// Rotates the two vectors of a slot in f32, with one rounding.
    template <class T, int N>
    HK_FN void rotate(Vec<T, N> (&x)[2], const Factors<N> &f) const {
        Vec<float, N> wide[2] = {widen<T, N>(x[0]), widen<T, N>(x[1])};
        rotate(wide, f);
        x[0] = narrow<T, N>(wide[0]);
        x[1] = narrow<T, N>(wide[1]);
    }

    template <class T, int N>
    HK_FN void rotate(Vec<T, N> (&x)[2], const SharedFactors<N> &f) const {
        // Two columns of each at a time: all of them in f32 would take registers.
        constexpr int kPart = N < 2 ? N : 2;
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            Vec<T, kPart> first, second;
            Vec<float, kPart> c, s;
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                first[j] = x[0][i + j], second[j] = x[1][i + j];
                c[j] = f.cos[i + j], s[j] = f.sin[i + j];
            }
            const auto a = widen<T, kPart>(first), b = widen<T, kPart>(second);
            first = narrow<T, kPart>(__builtin_elementwise_fma(b, -s, a * c));
            second = narrow<T, kPart>(__builtin_elementwise_fma(a, s, b * c));
#pragma unroll
            for (int j = 0; j < kPart; ++j) x[0][i + j] = first[j], x[1][i + j] = second[j];
        }
    }

    /// Rotates the two vectors of a slot. A column is one product plus an fma: the same two products for either style.
    template <int N>
    HK_FN void rotate(Vec<float, N> (&x)[2], const Factors<N> &f) const {
        if constexpr (N > 1) {
            if (interleaved) {
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    x[part] = __builtin_elementwise_fma(swap_pairs(x[part]), f.sin[part], x[part] * f.cos[part]);
                }
                return;
            }
        }
        const Vec<float, N> a = x[0];
        const Vec<float, N> b = x[1];
        x[0] = __builtin_elementwise_fma(b, f.sin[0], a * f.cos[0]);
        x[1] = __builtin_elementwise_fma(a, f.sin[1], b * f.cos[1]);
    }

    /// What heads of a token without a table row are filled with.
    template <class T, int N>
    HK_FN static Vec<T, N> poison() {
        return narrow<T, N>(Vec<float, N>(__builtin_nanf("")));
    }

  private:
    // A slot's entries of one table, for its two vectors.
    template <int N>
    struct Entries {
        Vec<float, N> part[2];
    };

    HK_FN static i64 integer(const Global &g, bool is_i64, u32 row, u32 col) {
        const i64 at = i64(row) * g.strides[2] + i64(col) * g.strides[3];
        if (is_i64) return reinterpret_cast<GlobalPtr<const i64>>(g.data)[at];
        return reinterpret_cast<GlobalPtr<const i32>>(g.data)[at];
    }

    // A token's sequence, or kNoRow if it is in none; `index` is made that in the sequence. The starts need not be right for the
    // search to end.
    HK_FN u32 sequence_of(u32 token, i64 &index) const {
        u32 low = 0;  // as far as is known, starts before `low` are not after the token,
        u32 high = positions.cols();  // and those from `high` on are
        i64 start = 0;
        while (low < high) {
            const u32 middle = low + (high - low) / 2;
            const i64 value = integer(positions, positions_are_i64, 0, middle);
            const bool not_after = value <= i64(token);
            if (not_after) start = value;
            low = not_after ? middle + 1 : low;
            high = not_after ? high : middle;
        }
        // Before the first start, or from the last one on, there is no sequence; and a start may be wrong.
        const bool none = low == 0 || low == positions.cols() || start < 0;
        index = i64(token) - start;
        return none ? kNoRow : low - 1;
    }

    template <class C, int N>
    HK_FN Entries<N> entries(const Global &table, u32 row, u32 slot) const {
        const GlobalPtr<const C> at = table.row<const C>(row);
        Entries<N> e;
        if (shared<N>()) {
            e.part[0] = load<C, N>(at + slot * N);
            e.part[1] = e.part[0];
            return e;
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const u32 first = column<N>(slot, part);
            if constexpr (N > 1) {
                if (!full) {
                    e.part[part] = for_both(load<C, N / 2>(at + first / 2));
                    continue;
                }
            }
            e.part[part] = load<C, N>(at + first);
        }
        return e;
    }

    template <class C, int N>
    HK_FN Factors<N> from_tables(u32 row, u32 slot) const {
        return signed_factors(entries<C, N>(cos, row, slot), entries<C, N>(sin, row, slot));
    }

    template <int N>
    HK_FN Factors<N> signed_factors(const Entries<N> &c, const Entries<N> &s) const {
        Factors<N> f = {{c.part[0], c.part[1]}, {s.part[0], s.part[1]}};
        if constexpr (N > 1) {
            if (interleaved) {
#pragma unroll
                for (int part = 0; part < 2; ++part) {
#pragma unroll
                    for (int i = 0; i < N; i += 2) {
                        const float a = s.part[part][i];
                        const float b = s.part[part][i + 1];
                        f.sin[part][i] = inverse ? b : -a;
                        f.sin[part][i + 1] = inverse ? -a : b;
                    }
                }
                return f;
            }
        }
        f.sin[0] = inverse ? s.part[1] : -s.part[0];
        f.sin[1] = inverse ? -s.part[0] : s.part[1];
        return f;
    }

    template <class C, int N>
    HK_FN static Vec<float, N> load(GlobalPtr<const C> at) {
        constexpr int kPart = N < kVecLen<C> ? N : kVecLen<C>;
        Vec<float, N> v;
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            const Vec<float, kPart> part = widen<C, kPart>(*reinterpret_cast<GlobalPtr<const Vec<C, kPart>>>(at + i));
#pragma unroll
            for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
        }
        return v;
    }

    // Each element twice.
    template <int M>
    HK_FN static Vec<float, 2 * M> for_both(Vec<float, M> v) {
        Vec<float, 2 * M> both;
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) both[i] = v[i / 2];
        return both;
    }

    template <int N>
    HK_FN static Vec<float, N> swap_pairs(Vec<float, N> v) {
        Vec<float, N> swapped;
#pragma unroll
        for (int i = 0; i < N; ++i) swapped[i] = v[i ^ 1];
        return swapped;
    }
};
static_assert(sizeof(Rope) == 4 * sizeof(Global) + 32, "same layout as hk_core::plan::rope::RopeParams");

}  // namespace hk
