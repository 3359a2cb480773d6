// problem.h: the parameters of the prefill kernels, and the queries and keys of a block.
//
//   s[i, j] = q[i] . k[j]  ->  p = softmax(s)  ->  out[i] = sum over j of p[i, j] v[j]
//
// The keys of a sequence are those of a paged cache, then fresh ones; either part may be empty. Query i of Sq stands at key
// i + Sk - Sq. Rows of a tile are (query, head of the group of a key head), head fastest: K and V are read once for all heads of a
// group, and a tile spans few queries, so that few of its keys are masked.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention {

using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Element types beside that of the kernel, which the kernel widens. Same values as in src/prefill/problem.rs.
enum ElementType : u32 {
    kOwn = 0,
    kFp8 = 1,  // e4m3 of the target
    kI8 = 2,
    kF32 = 3,  // outputs and biases
    kF16 = 4,  // outputs of fp8
};

/// Rows [batch, row, head, column], unit stride on the columns; strides in bytes.
struct HeadRows {
    u64 data;  // 0: absent
    i64 batch, row, head;
};

/// Rows of keys or values [batch or page, head, token, column]; strides in bytes. Tokens and columns can be in groups of 2^shift:
/// then `token_group` is the stride of groups, `token` that within a group.
struct KeyRows {
    u64 data;
    i64 batch, head, token_group, token, column_group, column;
    u32 token_shift, column_shift;
    u64 descale;  // f32, by batch and head, strides in elements; 0: 1
    i64 descale_batch, descale_head;

    /// Address of a token's row, column 0.
    HK_FN u64 row(u64 batch_index, u32 head_index, u32 token_index) const {
        return data +
               u64(i64(batch_index) * batch + i64(head_index) * head + i64(token_index >> token_shift) * token_group +
                   i64(token_index & ((1u << token_shift) - 1u)) * token);
    }
    HK_FN i64 column_offset(u32 c) const {
        return i64(c >> column_shift) * column_group + i64(c & ((1u << column_shift) - 1u)) * column;
    }
    HK_FN float scale(u32 batch_index, u32 head_index) const {
        if (!descale) return 1.0f;
        return hk::load_uniform<float>(descale +
                                       u64(i64(batch_index) * descale_batch + i64(head_index) * descale_head) * 4);
    }
};

/// The keys and values of a cache, or the fresh ones.
struct KeysValues {
    KeyRows k, v;
    u32 element;  // ElementType
    // Eight columns of any row of K, and of V if its columns are contiguous, are aligned; columns are multiples of eight.
    u32 vectorized;
};

/// Pages of a cache: page p of sequence n and key head h is table[n * row + h * head + p], or table[starts[n] + p].
struct Pages {
    u64 table;  // i32; 0: there is no cache
    u64 starts;  // i32 [sequences + 1], or 0
    i64 row, head;
    u32 width;  // entries of a sequence; with `starts`: of the table
    u32 n_pages;  // of the cache
    u32 tokens, inverse;  // of a page, see hk::DivMod
};

/// Lengths of sequences. Packed queries begin at q_starts[n] of total_q rows, other ones at row 0 of batch n.
struct Sequences {
    u64 q_starts;  // i32 [n + 1] or, with q_lens and tiles_of_one, [n]; 0: not packed
    u64 q_lens;  // i32 [n]; 0: up to the next start, or sq
    u64 k_starts;  // the same for fresh keys
    u64 k_lens;
    u64 cache_starts;  // i32 [n + 1]: cached keys of a sequence are the differences
    u64 total_lens;  // i32 [n]: cached and fresh keys
    u32 n;
    u32 sq, sk;  // lengths where they are not packed
    u32 total_q, total_k;  // rows of packed tensors
    u32 tiles;  // tiles of a head, of all sequences: at least as many as there are
    u32 tiles_of_one;  // tiles of each sequence; 0: found by a scan of the starts
    u32 k_consecutive;  // keys, or whole pages of them, of sequences of k_lens keys are one after the other
};

/// What scores are made of.
struct Scores {
    float scale;  // of q . k
    float softcap;  // 0: none
    i32 left, right;  // keys before and after the query's own place that are visible
    u64 alibi;  // f32 slopes; 0: none
    i64 alibi_batch;
    u64 sink;  // f32 [heads]; 0: none
    HeadRows bias;  // f32 or the kernel's type; columns are keys
    u32 bias_type;
    u32 bias_fresh;  // its columns are the last keys, as many as there are queries
    u32 bias_rows, bias_cols;
    u64 mask;  // u8 [queries, keys] of each sequence; 0: none
    u64 mask_starts;  // i32 [n + 1]
    u64 mask_bytes;
    u32 mask_fresh_only;  // cached keys are visible whatever it says
    u32 dropout;  // u >= dropout * 2^-24 is kept; 0: none
    float kept;  // 1 / (1 - p)
    u32 longest_q, longest_k;
    u32 pad;
    u64 seed, offset;
};

/// Mask of `hstu_attn`.
struct Hstu {
    u64 targets;  // i32 [n]; 0: none
    u32 causal, reach, contextual;  // reach: 0: any
    float inverse_longest;
};

/// Splits of the keys: each has the keys [i keys, (i + 1) keys) of a sequence, the last one those beyond, too. With more than one,
/// blocks write partial results, f32, by split and row (query rows of all sequences by heads): unnormalized sums [dv rounded up to 4], and
/// the row's maximum in units of log2 and sum of exponentials.
struct Splits {
    u64 acc, sums;
    u32 count, keys;
    u32 rows;  // of a split
    u32 pad;
};

struct Params {
    HeadRows q, out, lse;
    KeysValues fresh, cache;
    Pages pages;
    Sequences sequences;
    Scores scores;
    Hstu hstu;
    Splits splits;
    u64 q_descale;  // f32, by batch and head
    i64 q_descale_batch, q_descale_head;
    u64 out_scale;  // f32; 0: 1
    u32 heads, kv_heads;
    u32 group, group_inverse;  // query heads of a key head, see hk::DivMod
    u32 dqk, dv;
    u32 q_type, out_type;
    u32 q_vectorized, out_vectorized;  // eight columns are aligned, four columns are
    u32 skip_single;  // sequences of one query are left untouched
    u32 single_cached;  // those of one query have all their keys in the cache
};

HK_FN i32 index_at(u64 array, u64 i) { return hk::load_uniform<i32>(array + 4 * i); }

/// The queries of a block: rows [first, first + kRows) of those of a sequence and a key head.
struct Work {
    u32 sequence, first;
    u32 q_start, q_len;  // packed row of the sequence's first query; queries
    u32 kv_head;
    u32 split;  // of the keys
    bool poison;  // lengths contradict each other: all outputs are NaN
    u32 cached, fresh;  // keys
    u32 k_start;  // packed row of the first fresh key
    u64 pages;  // of the sequence, in the table

    HK_FN u32 keys() const { return cached + fresh; }
};

/// The lane, for addresses of the work's queries and outputs.
HK_FN u32 lane_of(const Work &) { return hk::lane_id(); }

namespace detail {

/// Start and length of sequence n among packed rows.
struct Span {
    i32 start, length;
    bool valid;

    HK_FN Span(u64 starts, u64 lens, u32 n, u32 total, auto load) {
        start = load(starts, n);
        length = lens ? load(lens, n) : i32(u32(load(starts, n + 1)) - u32(start));
        valid = start >= 0 && length >= 0 && u32(start) <= total && u32(length) <= total - u32(start);
    }
};

HK_FN u32 tiles_of(u32 queries, u32 group, u32 rows) { return (queries * group + rows - 1) / rows; }

}  // namespace detail

/// The block's work. False: there is none. Starts that are no partition of the packed rows are one sequence, all outputs of which are NaN.
template <int kRows, class P>
HK_FN bool find_work(const P &p, u32 task, Work &work) {
    const Sequences &s = p.sequences;
    work.split = task % p.splits.count;
    task /= p.splits.count;
    work.kv_head = task / s.tiles;
    u32 tile = task % s.tiles;
    if (work.kv_head >= p.kv_heads) return false;
    work.poison = false;
    if (s.tiles_of_one) {
        work.sequence = tile / s.tiles_of_one;
        tile %= s.tiles_of_one;
        work.q_start = 0, work.q_len = s.sq;
        if (s.q_starts) {
            // Of a sequence that is not all there, or longer than the tiles, the rows that are there are poisoned.
            const detail::Span span(s.q_starts, s.q_lens, work.sequence, s.total_q, index_at);
            const i64 first = span.start < 0 ? 0 : span.start, end = i64(span.start) + span.length;
            const i64 rows = (end < s.total_q ? end : s.total_q) - first;
            work.poison = !span.valid || u32(span.length) > s.sq;
            work.q_start = u32(first), work.q_len = rows < 0 ? 0 : rows < s.sq ? u32(rows) : s.sq;
        } else if (s.q_lens) {
            const u32 used = u32(index_at(s.q_lens, work.sequence));
            work.poison = used > s.sq;
            work.q_len = used > s.sq ? s.sq : used;
        }
    } else {
        // Lanes have a sequence each.
        const auto of_lane = [](u64 array, u32 i) { return reinterpret_cast<GlobalPtr<const i32>>(array)[i]; };
        u32 before = 0, found = ~0u, first_tile = 0;
        for (u32 base = 0; base < s.n; base += hk::kWaveSize) {
            const u32 n = base + hk::lane_id();
            u32 tiles = 0, poison = 0;
            i32 start = 0, length = 0;
            bool valid = true;
            if (n < s.n) {
                const detail::Span span(s.q_starts, 0, n, s.total_q, of_lane);
                start = span.start, length = span.length, valid = span.valid;
                if (n == 0) valid = valid && start == 0;
                if (n + 1 == s.n) valid = valid && u32(start + length) == s.total_q;
                if (s.q_lens) {
                    const i32 used = of_lane(s.q_lens, n);
                    poison = u32(used) > u32(length);
                    length = poison ? length : used;
                }
                tiles = valid ? detail::tiles_of(u32(length), p.group, kRows) : 0;
            }
            if (hk::ballot(!valid) != 0) {
                work.poison = true;
                found = ~0u;
                break;
            }
            const u32 upto = before + hk::wave_scan(tiles);
            const u64 mine = hk::ballot(upto > tile && upto - tiles <= tile);
            if (mine != 0) {
                const u32 lane = u32(__builtin_ctzll(mine));
                found = base + lane;
                first_tile = hk::broadcast(upto - tiles, lane);
                work.q_start = u32(hk::broadcast(start, lane));
                work.q_len = u32(hk::broadcast(length, lane));
                work.poison = hk::broadcast(poison, lane) != 0;
            }
            before = hk::last_lane(upto);
        }
        if (work.poison && found == ~0u) {
            found = 0, first_tile = 0;
            work.q_start = 0, work.q_len = s.total_q;
        }
        if (found == ~0u) return false;
        work.sequence = found;
        tile -= first_tile;
    }
    // The last tiles first: where keys after a query are masked, they have most keys.
    const u32 tiles = detail::tiles_of(work.q_len, p.group, kRows);
    if (tile >= tiles) return false;
    work.first = (tiles - 1 - tile) * kRows;
    return true;
}

/// The keys of the work's sequence.
HK_FN void find_keys(const Params &p, Work &work) {
    const Sequences &s = p.sequences;
    const u32 n = work.sequence;
    work.k_start = 0, work.fresh = 0, work.cached = 0, work.pages = 0;
    if (p.fresh.k.data && !(p.single_cached && work.q_len == 1)) {
        if (s.k_consecutive) {
            u64 start = 0;
            bool valid = true;
            for (u32 i = 0; i <= n; ++i) {
                const i32 length = index_at(s.k_lens, i);
                valid = valid && length >= 0;
                if (i < n) start += u32(length);
                work.fresh = u32(length);
            }
            valid = valid && start + work.fresh <= s.total_k;
            work.poison |= !valid;
            work.k_start = valid ? u32(start) : 0;
            work.fresh = valid ? work.fresh : 0;
        } else if (s.k_starts) {
            const detail::Span span(s.k_starts, s.k_lens, n, s.total_k, index_at);
            bool valid = span.valid;
            if (s.k_lens && !s.tiles_of_one) {
                valid = valid && span.length <= i64(index_at(s.k_starts, n + 1)) - span.start;
            }
            work.poison |= !valid;
            work.k_start = valid ? u32(span.start) : 0;
            work.fresh = valid ? u32(span.length) : 0;
        } else {
            work.fresh = s.sk;
            if (s.k_lens) {
                const u32 used = u32(index_at(s.k_lens, n));
                work.poison |= used > s.sk;
                work.fresh = used > s.sk ? 0 : used;
            }
        }
    }
    if (p.pages.table) {
        i64 cached;
        if (s.total_lens) {
            cached = i64(index_at(s.total_lens, n)) - work.fresh;
        } else {
            cached = i64(index_at(s.cache_starts, n + 1)) - index_at(s.cache_starts, n);
        }
        work.pages = u64(i64(n) * p.pages.row + i64(work.kv_head) * p.pages.head);
        i64 room = i64(p.pages.width) * p.pages.tokens;
        if (p.pages.starts) {
            const i64 start = index_at(p.pages.starts, n);
            work.poison |= start < 0 || start > p.pages.width;
            work.pages = u64(start);
            room = (p.pages.width - start) * p.pages.tokens;
        }
        const bool valid = cached >= 0 && cached <= room && cached < (1 << 30) - i64(work.fresh);
        work.poison |= !valid;
        work.cached = valid && !work.poison ? u32(cached) : 0;
    }
}

/// Keys [first, last] of a sequence.
struct KeyRange {
    i32 first, last;

    HK_FN KeyRange clipped(i32 begin, i32 end) const {
        return {first < begin ? begin : first, last < end ? last : end - 1};
    }
};

/// The keys of the work's split.
HK_FN KeyRange keys_of(const Params &p, const Work &work) {
    const i32 keys = i32(work.keys());
    if (p.splits.count <= 1) return {0, keys - 1};
    const i32 begin = i32(work.split * p.splits.keys);
    return KeyRange{begin, keys - 1}.clipped(0, work.split + 1 < p.splits.count ? begin + i32(p.splits.keys) : keys);
}

/// The keys that a query sees by causality and window, of those of the work.
template <class W>
HK_FN KeyRange key_range(const Params &p, const W &work, u32 query) {
    constexpr i32 kUnbounded = 1 << 29;
    const i32 keys = i32(work.keys()), at = i32(query) + keys - i32(work.q_len);
    const i32 first = p.scores.left >= kUnbounded ? 0 : at - p.scores.left;
    const i32 last = p.scores.right >= kUnbounded ? keys - 1 : at + p.scores.right;
    const KeyRange own = keys_of(p, work);
    return KeyRange{first, last}.clipped(own.first, own.last + 1);
}

/// Which tokens of the work's sequence see each other in `hstu_attn`.
class HstuMask {
    const Hstu &of_;
    i32 limit_;

    HK_FN i32 id(i32 t) const {
        const i32 context = i32(of_.contextual);
        if (context) t = t - context + 1 < 0 ? 0 : t - context + 1;
        return of_.targets && t > limit_ ? limit_ : t;
    }

  public:
    HK_FN HstuMask(const Hstu &of, const Work &work) : of_(of) {
        const i32 n = i32(work.keys()), context = i32(of.contextual);
        limit_ = context ? n - context + 1 : n;
        if (of.targets) limit_ -= index_at(of.targets, work.sequence);
    }
    HK_FN bool sees(i32 i, i32 j) const {
        const i32 of_query = id(i), of_key = id(j);
        i32 ahead = of_query - of_key;
        if (!of_.causal && ahead < 0) ahead = -ahead;
        const bool visible = (i == j || ahead > 0) && (of_.reach == 0 || ahead <= i32(of_.reach));
        return visible || (of_.contextual && of_query == 0 && of_key < limit_);
    }
};

/// Whether the targets of the work's sequence are as many as it can have.
HK_FN bool targets_fit(const Hstu &of, const Work &work) {
    return !of.targets || u32(index_at(of.targets, work.sequence)) <= work.q_len;
}

}  // namespace attention
