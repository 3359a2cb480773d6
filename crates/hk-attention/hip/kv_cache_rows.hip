// kv_cache_rows.hip: rows of heads, rotated or copied, to outputs and to the slots of a cache.
//   out[t, h, :] = rope(in[t, h, :]) at position[t]                      tokens that have a position, else a copy
//   cache[slot[t], h, :] = cast(rope(in[t, h, :]) * (1 / scale))         tokens that have a slot
// Positions and slots are given, or follow from the lengths of sequences that the tokens continue (Append).
// A launch does a few jobs (Job), each over one tensor in [tokens, heads, cols] of T = bf16 | f16: those of
// rope_reshape_and_cache and flash_attn_fwd_decode are q, k and v, those of rope_cat_and_cache_mla the columns of q and k. All arithmetic is f32 with one
// rounding; columns that are not rotated, scaled or narrowed keep their bits. A token whose position the tables
// do not have gives rows of NaN and does not go to the cache; a slot that the cache does not have is skipped.
//
// How the work is split
//   A unit is a lane's share of a row: two vectors of 8 columns (16 bytes), on the scalar path two columns. NeoX rotates the
//   two vectors together, interleaved pairs lie within a vector: no lane needs another's columns. The lanes of a wave are
//   units x rows: several heads of one token, or neighbouring tokens where heads are few or the tokens of a block are
//   contiguous in the cache. A task is kPasses such sets of heads, with all loads in flight before the first use and one load
//   of the tables. Waves loop over the tasks of all jobs.
//   Values in the paged layouts are column-major, with contiguous tokens of a block: a lane takes 16 bytes of tokens x 8
//   columns, transposes them in registers and writes 16 bytes per column. The slots of these tokens must be consecutive from a
//   multiple of 16 bytes in a block; each wave finds such groups in its window of tokens. Other tokens take the scalar path.
// Floor
//   Memory: every input once, every output and cache row once; tables and slots stay in cache. 3 flop an element.
#include <hk/entry.h>
#include <hk/rope.h>
#include <hk/wave.h>

#include "kv_cache.h"

namespace {
using cache::Common;
using cache::Place;
using cache::Target;
using hk::Access;
using hk::GlobalPtr;
using hk::i64;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Columns of a vector of a lane.
constexpr int kPart = 8;
/// The same for copies to fp8, where 16 columns are 16 bytes.
constexpr int kWidePart = 16;
/// Sets of heads in flight per wave, rotating and copying: 64 bytes per lane.
constexpr u32 kPasses = 2;
constexpr u32 kCopyPasses = 4;
constexpr u32 kWideCopyPasses = 2;
/// Most targets of a job.
constexpr u32 kTargets = 2;

/// One tensor's rows.
struct Job {
    hk::Global in;  // (1, tokens, heads, cols)
    Target targets[kTargets];
    u32 rotary;  // columns that are rotated, from rotary_at on
    u32 rotary_at;
    u32 passed_at;  // the columns that are not rotated, end exclusive
    u32 passed_end;
    // Lanes: units of a row, and rows of tokens_per_wave x heads_per_wave; 2^16 / n rounded up for division by n.
    u32 units, inv_units, tokens_per_wave, inv_tokens_per_wave, heads_per_wave;
    u32 heads;  // of a task
    u32 groups;  // tasks per set of tokens
    u32 window;  // tokens of a task, if the target is column-major
    u32 end;  // tasks of this job and those before it
    u32 wide;  // copies kWidePart columns at a time
    u32 cached;  // a target is a cache
    u32 of_sequence;  // tokens of a sequence, of those that continue one
};

/// Tokens that continue the sequences of a cache: token i of a sequence of `len` tokens is at position len + i, and in that slot of
/// the sequence's pages.
struct Append {
    u64 lens;  // i32 [sequences]; 0: positions and slots are given
    u64 totals;  // i32 [sequences]: gets the lengths with the new tokens; 0: nobody asks. `lens` itself: a launch without jobs
    u64 table;  // i32 [sequences, width]: pages; 0: each sequence has one, of its own index
    i64 table_row;
    u32 sequences, width;
    u32 tokens;  // new ones of a sequence
    u32 pad;

    /// A negative length stays one, and one that is too large stays too large.
    HK_FN void store_totals(u32 first, u32 step) const {
        for (u32 n = first; n < sequences; n += step) {
            const hk::i32 len = reinterpret_cast<GlobalPtr<const hk::i32>>(lens)[n];
            const hk::i32 most = 0x7fffffff, room = most - hk::i32(tokens);
            reinterpret_cast<GlobalPtr<hk::i32>>(totals)[n] = len < 0 ? len : len > room ? most : len + hk::i32(tokens);
        }
    }

    /// A token whose position the tables do not have is NaN, in the cache, too: nobody is to see what was there.
    HK_FN Place place_of(const Common &c, u32 token, u32 of_sequence, bool rotates, bool slots) const {
        Place place = {};
        const u32 n = token / of_sequence;
        const hk::i32 len = reinterpret_cast<GlobalPtr<const hk::i32>>(lens)[n];
        const u64 at = u64(i64(len) + (token - n * of_sequence));
        if (rotates) {
            place.row = u32(at);
            place.rotate = at < c.rope.cos.rows();
            place.poison = !place.rotate;
        }
        if (slots && len >= 0 && at < u64(width) * c.block_tokens) {
            const u32 page = u32(at) / c.block_tokens, within = u32(at) - page * c.block_tokens;
            const u32 entry =
                table ? u32(reinterpret_cast<GlobalPtr<const hk::i32>>(table)[i64(n) * table_row + page]) : n;
            place.slot = u64(entry) * c.block_tokens + within;
            place.cached = place.slot < c.n_slots;
        }
        return place;
    }
};

struct Params {
    Common common;
    Append append;
    Job jobs[4];
    // Ends of the tasks of each kind: jobs that rotate, that copy, and that copy to a column-major cache.
    u32 rotations, copies, columns;
    u32 pad;
};

/// This lane's share of a task: a token, some of its heads, and a unit of each.
struct Share {
    u32 token;
    u32 unit;  // the first; those of a row longer than a wave are kWaveSize apart
    u32 head, last_head;  // the first, and past the last
    u32 first_head;  // of the task
    bool live;

    HK_FN Share(const Job &job, u32 task) {
        const u32 set = task / job.groups;
        const u32 group = task - set * job.groups;
        const u32 side = hk::thread_x() * job.inv_units >> 16;
        const u32 head_side = side * job.inv_tokens_per_wave >> 16;
        unit = hk::thread_x() - side * job.units;
        token = set * job.tokens_per_wave + side - head_side * job.tokens_per_wave;
        first_head = group * job.heads;
        head = first_head + head_side;
        last_head = (group + 1) * job.heads < job.in.shape[2] ? (group + 1) * job.heads : job.in.shape[2];
        live = head_side < job.heads_per_wave && token < job.in.shape[1] && head < last_head;
    }
};

/// Addresses of the first head of a token in the targets of a job; 0: not stored.
struct Sinks {
    u64 at[kTargets];
    float scale[kTargets];
    u32 sequence;  // of tokens that continue one

    /// What a head is multiplied by.
    HK_FN float factor(const Job &job, u32 i, u32 head) const {
        const Target &to = job.targets[i];
        if (to.scale_heads == 0) return scale[i];
        return 1.0f / reinterpret_cast<GlobalPtr<const float>>(to.scale)[u64(sequence) * to.scale_heads + head];
    }

    template <class T>
    HK_FN static Sinks of(const Job &job, const Common &c, const Place &place, u32 token) {
        Sinks s;
        s.sequence = job.of_sequence ? token / job.of_sequence : 0;
        const u32 block = u32(place.slot) / c.block_tokens;
        const u32 within = u32(place.slot) - block * c.block_tokens;
#pragma unroll
        for (u32 i = 0; i < kTargets; ++i) {
            const Target &to = job.targets[i];
            const bool cache = to.tokens == Target::kSlots;
            const bool takes = cache ? place.cached : token < to.tokens;
            const i64 row = cache ? to.row(block, within) : to.row(token, 0);
            s.at[i] = takes ? to.data + u64(row * i64(to.element_bytes<T>())) : 0;
            s.scale[i] = cache::scale_of(to);
        }
        return s;
    }
};

HK_FN Place place_of(const Job &job, const Params &p, u32 token, bool rotates) {
    if (p.append.lens) return p.append.place_of(p.common, token, job.of_sequence, rotates, job.cached);
    return cache::place_of(p.common, token, job.cached);
}

/// One task of a job that rotates.
template <class T, Access kAccess>
HK_FN void rotate_rows(const Job &job, const Params &p, u32 task) {
    constexpr int N = kAccess == Access::Vectorized ? kPart : 1;
    const Share mine(job, task);
    if (!mine.live) return;
    const Common &c = p.common;
    const Place place = place_of(job, p, mine.token, true);
    const Sinks sinks = Sinks::of<T>(job, c, place, mine.token);
    for (u32 unit = mine.unit; unit < job.units; unit += hk::kWaveSize) {
        const bool rotary = unit * 2 * N < job.rotary;
        const u32 a = rotary ? job.rotary_at + c.rope.column<N>(unit, 0) : job.passed_at + unit * 2 * N - job.rotary;
        const u32 b = rotary ? job.rotary_at + c.rope.column<N>(unit, 1) : a + N;
        const bool has_b = b < (rotary ? job.in.shape[3] : job.passed_end);
        const bool rotates = rotary && place.rotate;
        hk::Factors<N> factors;
        if (rotates) factors = c.rope.factors<T, N>(place.row, unit);
        const auto row = job.in.row<const T>(0) + i64(mine.token) * job.in.strides[1];
        for (u32 set = mine.first_head; set < mine.last_head; set += kPasses * job.heads_per_wave) {
            const u32 first = set + mine.head - mine.first_head;
            if (first >= mine.last_head) break;
            Vec<T, N> in[kPasses][2];
#pragma unroll
            for (u32 pass = 0; pass < kPasses; ++pass) {
                // No lane has a head: done. Only this lane has none: it loads the first head again and ignores it.
                if (set + pass * job.heads_per_wave >= mine.last_head) break;
                const u32 head = first + pass * job.heads_per_wave;
                const auto at = row + i64(head < mine.last_head ? head : first) * job.in.strides[2];
                in[pass][0] = cache::load<T, N>(at + a);
                in[pass][1] = cache::load<T, N>(at + (has_b ? b : a));
            }
#pragma unroll
            for (u32 pass = 0; pass < kPasses; ++pass) {
                const u32 head = first + pass * job.heads_per_wave;
                if (head >= mine.last_head) continue;
                Vec<float, N> x[2] = {hk::widen<T, N>(in[pass][0]), hk::widen<T, N>(in[pass][1])};
                if (rotates) c.rope.rotate<N>(x, factors);
#pragma unroll
                for (u32 i = 0; i < kTargets; ++i) {
                    if (sinks.at[i] == 0) continue;
                    const Target &to = job.targets[i];
                    const auto put = [&](u32 column, Vec<float, N> v) {
                        cache::write<T, N>(to, sinks.at[i], i64(head) * to.head + to.column(column), v, place.poison);
                    };
                    const float scale = sinks.factor(job, i, head);
                    put(a, x[0] * scale);
                    if (has_b) put(b, x[1] * scale);
                }
            }
        }
    }
}

/// One task of a job that copies, bit for bit if a target has the type of the input and no scale.
template <class T, int N, u32 kCopyPasses>
HK_FN void copy_rows(const Job &job, const Params &p, u32 task) {
    const Share mine(job, task);
    if (!mine.live) return;
    const Common &c = p.common;
    const Place place = place_of(job, p, mine.token, false);
    const Sinks sinks = Sinks::of<T>(job, c, place, mine.token);
    const auto row = job.in.row<const T>(0) + i64(mine.token) * job.in.strides[1];
    for (u32 unit = mine.unit; unit < job.units; unit += hk::kWaveSize) {
        const u32 a = unit * N;
        for (u32 set = mine.first_head; set < mine.last_head; set += kCopyPasses * job.heads_per_wave) {
            const u32 first = set + mine.head - mine.first_head;
            if (first >= mine.last_head) break;
            Vec<T, N> x[kCopyPasses];
#pragma unroll
            for (u32 pass = 0; pass < kCopyPasses; ++pass) {
                if (set + pass * job.heads_per_wave >= mine.last_head) break;
                const u32 head = first + pass * job.heads_per_wave;
                x[pass] = cache::load<T, N>(row + i64(head < mine.last_head ? head : first) * job.in.strides[2] + a);
            }
#pragma unroll
            for (u32 i = 0; i < kTargets; ++i) {
                if (sinks.at[i] == 0) continue;
                const Target &to = job.targets[i];
                const i64 at = to.column(a);
#pragma unroll
                for (u32 pass = 0; pass < kCopyPasses; ++pass) {
                    const u32 head = first + pass * job.heads_per_wave;
                    if (head >= mine.last_head) continue;
                    const Vec<T, N> v = place.poison ? hk::Rope::poison<T, N>() : x[pass];
                    if (to.is_copy()) {
                        cache::store<T, N>(reinterpret_cast<GlobalPtr<T>>(sinks.at[i]) + i64(head) * to.head + at, v);
                    } else {
                        const Vec<float, N> scaled = hk::widen<T, N>(v) * sinks.factor(job, i, head);
                        cache::write<T, N>(to, sinks.at[i], i64(head) * to.head + at, scaled, place.poison);
                    }
                }
            }
        }
    }
}

/// Stores this lane's columns of the kTokens tokens from `token` on, whose slots are consecutive.
template <class T, int kTokens>
HK_FN void write_group(const Job &job, const Target &to, float scale, u32 token, i64 in, i64 out, u32 col) {
    Vec<T, kPart> bits[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        bits[i] = cache::load<T, kPart>(job.in.row<const T>(0) + in + i64(token + i) * job.in.strides[1]);
    }
    if (to.element_bytes<T>() == sizeof(T)) {
        if (!to.is_copy()) {
#pragma unroll
            for (int i = 0; i < kTokens; ++i) bits[i] = hk::narrow<T, kPart>(hk::widen<T, kPart>(bits[i]) * scale);
        }
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            Vec<T, kTokens> column;
#pragma unroll
            for (int j = 0; j < kTokens; ++j) column[j] = bits[j][i];
            cache::store<T, kTokens>(reinterpret_cast<GlobalPtr<T>>(to.data) + out + to.column(col + i), column);
        }
    } else {
        Vec<u8, kPart> quantized[kTokens];
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            quantized[i] = cache::to_fp8<kPart>(hk::widen<T, kPart>(bits[i]) * scale, to.format);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            Vec<u8, kTokens> column;
#pragma unroll
            for (int j = 0; j < kTokens; ++j) column[j] = quantized[j][i];
            cache::store<u8, kTokens>(reinterpret_cast<GlobalPtr<u8>>(to.data) + out + to.column(col + i), column);
        }
    }
}

/// One task of a job with a column-major cache: a window of tokens, kPart columns per lane. kTokens elements are 16 bytes.
template <class T, int kTokens>
HK_FN void columns(const Job &job, const Common &c, u32 task) {
    const u32 set = task / job.groups;
    const u32 group = task - set * job.groups;
    const u32 parts = job.in.shape[3] / kPart;
    const u32 part = group * hk::kWaveSize + hk::thread_x();
    const u32 head = part / parts;
    const u32 col = (part - head * parts) * kPart;
    const bool live = head < job.in.shape[2];
    const i64 in = i64(head) * job.in.strides[2] + col;
    const Target &to = job.targets[0];
    const float scale = cache::scale_of(to);

    // One token per lane: those of the window, and before and after it those that can share a group with one of them.
    constexpr u32 kAround = kTokens - 1;
    const u32 first = set * job.window - kAround;  // wraps below 0, and is then no token
    const u32 token = first + hk::thread_x();
    bool cached = false;
    bool followed = false;
    bool begins = false;
    if (hk::thread_x() < job.window + 2 * kAround && token < c.cached_tokens) {
        const Place place = cache::place_of(c, token, true);
        cached = place.cached;
        const u32 within = u32(place.slot) % c.block_tokens;
        begins = to.grouped && within % kTokens == 0 && within + kTokens <= c.block_tokens;
        if (token + 1 < c.cached_tokens) {
            followed = cache::slot_of(c, token + 1) == place.slot + 1;
        }
    }
    constexpr u64 kAll = (u64(1) << kTokens) - 1;
    const u64 places = hk::ballot(cached);
    const u64 follow = hk::ballot(followed);
    const u32 lane = hk::thread_x();
    const bool leads = begins && (places >> lane & kAll) == kAll && (follow >> lane & kAll >> 1) == kAll >> 1;
    const u64 leaders = hk::ballot(leads);
    u64 grouped = leaders;
#pragma unroll
    for (int i = 1; i < kTokens; i *= 2) grouped |= grouped << i;
    const u64 window = ((u64(1) << job.window) - 1) << kAround;

    for (u64 left = leaders & window; left != 0; left &= left - 1) {
        const u32 t = first + __builtin_ctzll(left);
        const u32 slot = u32(cache::slot_of(c, t));
        const u32 block = slot / c.block_tokens;
        const i64 out = to.row(block, slot - block * c.block_tokens) + i64(head) * to.head;
        if (live) write_group<T, kTokens>(job, to, scale, t, in, out, col);
    }
    for (u64 left = places & ~grouped & window; left != 0; left &= left - 1) {
        const u32 t = first + __builtin_ctzll(left);
        const u32 slot = u32(cache::slot_of(c, t));
        const u32 block = slot / c.block_tokens;
        const i64 out = to.row(block, slot - block * c.block_tokens) + i64(head) * to.head;
        if (live) {
            const auto bits = cache::load<T, kPart>(job.in.row<const T>(0) + in + i64(t) * job.in.strides[1]);
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                const Vec<T, 1> one = bits[i];
                if (to.is_copy()) {
                    cache::store<T, 1>(reinterpret_cast<GlobalPtr<T>>(to.data) + out + to.column(col + i), one);
                } else {
                    cache::write<T, 1>(to, to.data, out + to.column(col + i), hk::widen<T, 1>(one) * scale, false);
                }
            }
        }
    }
}

/// Calls `f(job, params, task)` for this block's tasks from `task` to `end`.
template <class F>
HK_FN void for_tasks(const Params &p, u32 end, u32 &task, F f) {
    for (; task < end; task += hk::grid_x()) {
        u32 index = 0;
        u32 first = 0;
        while (task >= p.jobs[index].end) first = p.jobs[index++].end;
        const Params &reloaded = hk::reload_params(p);
        f(reloaded.jobs[index], reloaded, task - first);
    }
}

template <class T, Access kAccess>
HK_FN void cache_rows(const Params &p) {
    if (p.append.totals)
        p.append.store_totals(hk::block_x() * hk::kWaveSize + hk::thread_x(), hk::grid_x() * hk::kWaveSize);
    u32 task = hk::block_x();
    for_tasks(p, p.rotations, task,
              [](const Job &job, const Params &all, u32 t) { rotate_rows<T, kAccess>(job, all, t); });
    for_tasks(p, p.copies, task, [](const Job &job, const Params &all, u32 t) {
        if constexpr (kAccess == Access::Scalar) {
            copy_rows<T, 1, kCopyPasses>(job, all, t);
        } else if (job.wide) {
            copy_rows<T, kWidePart, kWideCopyPasses>(job, all, t);
        } else {
            copy_rows<T, kPart, kCopyPasses>(job, all, t);
        }
    });
    if constexpr (kAccess == Access::Vectorized) {
        for_tasks(p, p.columns, task, [](const Job &job, const Params &all, u32 t) {
            if (job.targets[0].element_bytes<T>() == sizeof(T)) {
                columns<T, hk::kVecLen<T>>(job, all.common, t);
            } else {
                columns<T, hk::kVecLen<u8>>(job, all.common, t);
            }
        });
    }
}
}  // namespace

// Entry points, see `KERNELS` in src/kv_cache/cache.rs. Name = dtype of the rows, access.
HK_ENTRY(kv_cache_rows_bf16, hk::kWaveSize, cache_rows<hk::bf16, Access::Vectorized>)
HK_ENTRY(kv_cache_rows_f16, hk::kWaveSize, cache_rows<hk::f16, Access::Vectorized>)
HK_ENTRY(kv_cache_rows_bf16_scalar, hk::kWaveSize, cache_rows<hk::bf16, Access::Scalar>)
HK_ENTRY(kv_cache_rows_f16_scalar, hk::kWaveSize, cache_rows<hk::f16, Access::Scalar>)
