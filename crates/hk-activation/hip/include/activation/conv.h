// conv.h: depthwise causal convolution along the tokens of sequences, with states that chain calls
//   y[c, t] = act(bias[c] + sum_j w[c, j] h[c, t - (W - 1) + j]),  j = 0 .. W - 1,  act = identity | silu
//   h: the history of a sequence (its slot of the states, or zeros) followed by its tokens x
//   x, y    [batch, C, L] T = bf16 | f16 | f32   unit stride on C or on L; or packed [C, tokens], sequence b from starts[b] to
//                                               starts[b + 1]; y may alias x if a lane walks whole sequences
//   weight  [C, W]        T | f32                contiguous, W = 2 | 3 | 4
//   bias    [C]           as weight, optional    contiguous
//   states  [slots, C, W - 1]  T, optional       any strides; becomes the last W - 1 tokens of h
// One f32 fused multiply-add per tap, starting from the bias with rising j; one rounding.
//
// How the work is split
//   A lane walks a run of tokens with the last W - 1 of them in registers: each token is read once, except the W - 1 before a
//   run.
//   channels  unit stride on channels: a lane has 16 bytes of channels (scalar path: one channel), a wave one run.
//   tokens    unit stride on tokens: a lane has a tile of 16 bytes of tokens by four channels (scalar path: 8 tokens of one
//             channel), and gets the tokens before it from the lane below. Weights of neighbouring channels are adjacent, and
//             neighbouring channels share packed instructions. Lanes with a sequence boundary in their tile walk as above.
//   Runs have one length, but the lane with the first token of a sequence walks its first W - 1 tokens: it alone reads the
//   history, and then writes the state.
// Indices are on the device and checked here: a slot out of range makes its sequence NaN, slot -1 skips it, and starts are
// clamped to the tokens.
// Results go to y, or by ranges of channels to several tensors: `Out`.
// Floor
//   Memory: 2 C L sizeof(T) a sequence, and twice its state. W + silu (11 and 2 special functions, hk/math.h) VALU instructions an
//   element, two elements per instruction except for silu's special functions and one other.
#pragma once

#include <hk/activate.h>
#include <hk/global.h>
#include <hk/wave.h>

namespace conv {

using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

struct Strides {
    i64 outer, channel, inner;  // sequence and token, or slot and tap
};

/// How a lane reaches the states of neighbouring channels, `StateAccess` in src/causal_conv1d.rs.
enum class StateAccess : u32 { Scalar = 0, Channels = 1, Taps = 2 };

struct Params {
    hk::Global x, weight, bias, y, states, starts, slots, has_initial;
    Strides x_at, y_at, state_at;
    u32 batch;
    u32 channels;
    u32 tokens;  // of a sequence, or of all packed sequences
    u32 run;  // tokens of a lane
    u32 runs;  // of a sequence, or of all
    u32 width;
    u32 n_slots;
    u32 weight_is_f32;
    u32 silu;
    StateAccess state_access;
    u32 update;  // every sequence continues from its slot
    u32 pad;
};

/// Where results go: to one tensor.
struct OneOutput {
    HK_FN u64 data(const Params &p, u32) const { return p.y.data; }
    HK_FN Strides at(const Params &p, u32) const { return p.y_at; }
    /// Channel of the tensor's first one.
    HK_FN u32 first(u32) const { return 0; }
};

/// Loads or stores an aligned vector or an element. 2-byte accesses are relaxed atomics: otherwise the compiler merges two
/// neighbours into a 4-byte access, which need not be aligned. They cost nothing.
template <class V, class T>
HK_FN V load_at(GlobalPtr<const T> p) {
    if constexpr (sizeof(V) == 2) {
        const auto bits = reinterpret_cast<GlobalPtr<const hk::u16>>(p);
        return __builtin_bit_cast(V, __scoped_atomic_load_n(bits, __ATOMIC_RELAXED, __MEMORY_SCOPE_SINGLE));
    } else {
        return *reinterpret_cast<GlobalPtr<const V>>(p);
    }
}
template <class T, class V>
HK_FN void store_at(GlobalPtr<T> p, V v) {
    if constexpr (sizeof(V) == 2) {
        const auto bits = reinterpret_cast<GlobalPtr<hk::u16>>(p);
        __scoped_atomic_store_n(bits, __builtin_bit_cast(hk::u16, v), __ATOMIC_RELAXED, __MEMORY_SCOPE_SINGLE);
    } else {
        *reinterpret_cast<GlobalPtr<V>>(p) = v;
    }
}

/// A sequence of a call.
struct Sequence {
    i64 x, y;  // of its first token, in elements
    i64 state;  // of its slot
    u32 length;
    bool skip;  // neither y nor the state is written
    bool poison;  // y is NaN
    bool keeps;  // has a slot
    bool begins;  // with the history in that slot
};

/// The tokens of packed sequence `b`, clamped; false if it is out of range.
HK_FN bool clamp_to_tokens(const Params &p, u32 b, u32 &start, u32 &end) {
    const auto starts = p.starts.row<const i32>(0);
    const i32 from = starts[b], to = starts[b + 1];
    const i32 tokens = i32(p.tokens);
    const auto within = [&](i32 t) { return u32(t < 0 ? 0 : t > tokens ? tokens : t); };
    start = within(from);
    end = within(to);
    const bool whole = from >= 0 && from <= to && to <= tokens;
    if (end < start) end = start;
    return whole;
}

HK_FN Sequence sequence(const Params &p, const Strides &y_at, u32 b, i64 first, u32 length, bool whole) {
    Sequence s = {};
    s.length = length;
    s.poison = !whole;
    const i64 outer = p.starts.present() ? 0 : b;
    s.x = outer * p.x_at.outer + first * p.x_at.inner;
    s.y = outer * y_at.outer + first * y_at.inner;
    if (p.states.present()) {
        const i32 slot = p.slots.present() ? p.slots.row<const i32>(0)[b] : i32(b);
        s.skip = slot == -1;
        const bool there = u32(slot) < p.n_slots;
        s.poison |= !there;
        s.keeps = there && whole;
        s.begins = s.keeps && (p.has_initial.present() ? p.has_initial.row<const u8>(0)[b] != 0 : p.update != 0);
        s.state = there ? i64(slot) * p.state_at.outer : 0;
    }
    return s;
}

/// A lane's channels, `V` of them from `channel` on, with W taps.
template <class T, int V, int W, class Out>
struct Lane {
    using Values = Vec<T, V>;
    using Floats = Vec<float, V>;
    static constexpr int kHistory = W - 1;

    const Params &p;
    Out out;
    u32 channel;
    Floats taps[W];
    Floats bias;

    HK_FN Lane(const Params &p, const Out &out, u32 channel) : p(p), out(out), channel(channel) {
        if (p.weight_is_f32) {
            load_weights<float>();
        } else {
            load_weights<T>();
        }
    }

    template <class E>
    HK_FN void load_weights() {
        // The taps of a lane's channels are adjacent.
        constexpr int kPart = V > 1 && V * W % hk::kVecLen<E> == 0 ? hk::kVecLen<E> : V;
        const auto from = p.weight.row<const E>(0) + u64(channel) * W;
#pragma unroll
        for (int i = 0; i < V * W; i += kPart) {
            const auto part = load_at<Vec<E, kPart>>(from + i);
#pragma unroll
            for (int j = 0; j < kPart; ++j) taps[(i + j) % W][(i + j) / W] = float(part[j]);
        }
        bias = Floats(0.0f);
        if (p.bias.present()) {
            constexpr int kLen = V < hk::kVecLen<E> ? V : hk::kVecLen<E>;
#pragma unroll
            for (int i = 0; i < V; i += kLen) {
                const auto part = load_at<Vec<E, kLen>>(p.bias.row<const E>(0) + channel + i);
#pragma unroll
                for (int j = 0; j < kLen; ++j) bias[i + j] = float(part[j]);
            }
        }
    }

    HK_FN GlobalPtr<const T> x(const Sequence &s, i64 t) const {
        return reinterpret_cast<GlobalPtr<const T>>(p.x.data) + s.x + own(p.x_at) + t * p.x_at.inner;
    }
    HK_FN GlobalPtr<T> y(const Sequence &s, i64 t) const {
        const Strides at = y_at();
        const i64 mine = channel - out.first(channel);
        return reinterpret_cast<GlobalPtr<T>>(out.data(p, channel)) + s.y + (V > 1 ? mine : mine * at.channel) +
               t * at.inner;
    }
    HK_FN Strides y_at() const { return out.at(p, channel); }
    /// Offset of the lane's channels. Several have unit stride.
    HK_FN i64 own(const Strides &at) const { return V > 1 ? i64(channel) : channel * at.channel; }
    HK_FN GlobalPtr<T> state(const Sequence &s) const {
        return reinterpret_cast<GlobalPtr<T>>(p.states.data) + s.state + channel * p.state_at.channel;
    }

    HK_FN GlobalPtr<T> tap(GlobalPtr<T> state, int v, int i) const {
        return state + v * p.state_at.channel + i * p.state_at.inner;
    }

    /// The history of a sequence.
    HK_FN void load_state(const Sequence &s, Values (&h)[kHistory]) const {
#pragma unroll
        for (int i = 0; i < kHistory; ++i) h[i] = Values(T(0.0f));
        if (!s.begins) return;
        const auto from = state(s);
        if (V > 1 && p.state_access == StateAccess::Channels) {
#pragma unroll
            for (int i = 0; i < kHistory; ++i) h[i] = load_at<Values>(GlobalPtr<const T>(from + i * p.state_at.inner));
        } else if (V > 1 && p.state_access == StateAccess::Taps) {
            // The history of a lane's channels is adjacent.
#pragma unroll
            for (int n = 0; n < kHistory; ++n) {
                const auto part = load_at<Values>(GlobalPtr<const T>(from + n * V));
#pragma unroll
                for (int j = 0; j < V; ++j) h[(n * V + j) % kHistory][(n * V + j) / kHistory] = part[j];
            }
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
#pragma unroll
                for (int i = 0; i < kHistory; ++i) h[i][v] = load_at<T>(GlobalPtr<const T>(tap(from, v, i)));
            }
        }
    }

    HK_FN void store_state(const Sequence &s, const Values (&h)[kHistory]) const {
        const auto to = state(s);
        if (V > 1 && p.state_access == StateAccess::Channels) {
#pragma unroll
            for (int i = 0; i < kHistory; ++i) store_at(to + i * p.state_at.inner, h[i]);
        } else if (V > 1 && p.state_access == StateAccess::Taps) {
#pragma unroll
            for (int n = 0; n < kHistory; ++n) {
                Values part;
#pragma unroll
                for (int j = 0; j < V; ++j) part[j] = h[(n * V + j) % kHistory][(n * V + j) / kHistory];
                store_at(to + n * V, part);
            }
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
#pragma unroll
                for (int i = 0; i < kHistory; ++i) store_at(tap(to, v, i), T(h[i][v]));
            }
        }
    }

    /// The W - 1 tokens of h before token `t`, which is the first of a sequence or not among the first W - 1.
    HK_FN void load_before(const Sequence &s, u32 t, Values (&h)[kHistory]) const {
        if (t == 0) {
            load_state(s, h);
        } else {
#pragma unroll
            for (int i = 0; i < kHistory; ++i) h[i] = load_at<Values>(x(s, i64(t) + i - kHistory));
        }
    }

    /// The results of N channels from `v` on at the token after h, before rounding.
    template <int N>
    HK_FN Vec<float, N> sum(const Values (&h)[kHistory], Values newest, int v) const {
        const auto part = [&](auto from) {
            Vec<float, N> to;
#pragma unroll
            for (int i = 0; i < N; ++i) to[i] = float(from[v + i]);
            return to;
        };
        Vec<float, N> sum = part(bias);
#pragma unroll
        for (int j = 0; j < kHistory; ++j) sum = __builtin_elementwise_fma(part(taps[j]), part(h[j]), sum);
        sum = __builtin_elementwise_fma(part(taps[kHistory]), part(newest), sum);
        return p.silu ? hk::silu(sum) : sum;
    }

    /// Makes `newest` the newest of h.
    HK_FN static void shift(Values (&h)[kHistory], Values newest) {
#pragma unroll
        for (int j = 0; j + 1 < kHistory; ++j) h[j] = h[j + 1];
        h[kHistory - 1] = newest;
    }

    /// The result at a token, which then is the newest of h.
    HK_FN Values step(Values (&h)[kHistory], Values newest) const {
        // Four channels at a time: the registers of silu for eight would cost a wave per SIMD.
        constexpr int kPart = V < 4 ? V : 4;
        Values result;
#pragma unroll
        for (int v = 0; v < V; v += kPart) {
            const auto rounded = hk::narrow<T, kPart>(sum<kPart>(h, newest, v));
#pragma unroll
            for (int i = 0; i < kPart; ++i) result[v + i] = rounded[i];
        }
        shift(h, newest);
        return result;
    }

    /// Tokens `from` to `to` of a sequence, kAhead of them prefetched; also its state if `from` is 0.
    template <int kAhead>
    HK_FN void walk(const Sequence &s, u32 from, u32 to) const {
        if (s.skip) return;
        if (s.poison) {
            for (u32 t = from; t < to; ++t) store_at(y(s, t), Values(T(__builtin_nanf(""))));
            return;
        }
        Values h[kHistory];
        load_before(s, from, h);
        u32 t = from;
        for (; t + kAhead <= to; t += kAhead) {
            Values ahead[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) ahead[i] = load_at<Values>(x(s, i64(t) + i));
#pragma unroll
            for (int i = 0; i < kAhead; ++i) store_at(y(s, i64(t) + i), step(h, ahead[i]));
        }
        for (; t < to; ++t) store_at(y(s, t), step(h, load_at<Values>(x(s, t))));

        if (from == 0 && s.keeps && s.length > 0) {
            if (to < s.length) load_before(s, s.length, h);
            store_state(s, h);
        }
    }

    /// As `walk`, for the N tokens from `t` on and the four before them, one vector per channel; they are the first of their
    /// sequence, or not among its first W - 1.
    template <int N>
    HK_FN void walk_tile(const Sequence &s, u32 t, const Vec<T, 4> (&before)[V], Vec<T, N> (&tile)[V]) const {
        Values h[kHistory];
        if (t == 0) {
            load_state(s, h);
        } else {
#pragma unroll
            for (int i = 0; i < kHistory; ++i) {
#pragma unroll
                for (int v = 0; v < V; ++v) h[i][v] = before[v][4 - kHistory + i];
            }
        }
        // Two tokens at a time, to round them together.
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            Floats sums[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                Values newest;
#pragma unroll
                for (int v = 0; v < V; ++v) newest[v] = tile[v][i + j];
                sums[j] = sum<V>(h, newest, 0);
                shift(h, newest);
            }
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const auto rounded = hk::narrow<T, 2>(Vec<float, 2>{sums[0][v], sums[1][v]});
                tile[v][i] = rounded[0];
                tile[v][i + 1] = rounded[1];
            }
        }
    }
};

/// The last sequence that begins at or before packed token `t`, or the first.
HK_FN u32 sequence_of(const Params &p, u32 t) {
    const auto starts = p.starts.row<const i32>(0);
    u32 low = 0, high = p.batch;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (starts[middle] <= i32(t)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Run number `run` of a lane's channels.
template <int kAhead, class L>
HK_FN void walk_run(const Params &p, const L &lane, u32 b, u32 run) {
    const u32 from = run * p.run;
    const u32 to = p.tokens - from < p.run ? p.tokens : from + p.run;
    const bool packed = p.starts.present();
    for (b = packed ? sequence_of(p, from) : b; b < p.batch; ++b) {
        u32 start = 0, end = p.tokens;
        const bool whole = !packed || clamp_to_tokens(p, b, start, end);
        if (start >= to) break;
        // Tokens of this run, but for the first of a sequence, which belong to the run with the very first.
        const u32 mine = start + L::kHistory;
        const u32 first = start >= from ? start : mine > from ? mine : from;
        const u32 last = start >= from && mine > to ? mine : to;
        const u32 until = end < last ? end : last;
        if (first < until) {
            const Sequence s = sequence(hk::reload_params(p), lane.y_at(), b, start, end - start, whole);
            lane.template walk<kAhead>(s, first - start, until - start);
        }
        if (!packed) break;
    }
}

/// Lanes along channels, V each: a wave has one run of kWaveSize * V channels.
template <class T, int V, int W, class Out>
HK_FN void along_channels(const Params &p, const Out &out) {
    const u32 tiles = (p.channels + hk::kWaveSize * V - 1) / (hk::kWaveSize * V);
    const u32 channel = (hk::block_x() % tiles * hk::kWaveSize + hk::thread_x()) * V;
    const u32 item = hk::block_x() / tiles;
    if (channel < p.channels) walk_run<4>(p, Lane<T, V, W, Out>(p, out, channel), item / p.runs, item % p.runs);
}

/// A lane's place: lanes go along the runs of V channels, then along channels, then along sequences.
template <int V>
struct Place {
    u32 run, channel;
    u64 b;
    bool there;

    HK_FN explicit Place(const Params &p) {
        const u64 index = u64(hk::block_x()) * hk::kWaveSize + hk::thread_x();
        run = u32(index % p.runs);
        const u64 row = index / p.runs;
        channel = u32(row % (p.channels / V)) * V;
        b = row / (p.channels / V);
        there = b < (p.starts.present() ? 1 : p.batch);
    }
};

/// Runs of 8 tokens of a channel.
template <class T, int W, class Out>
HK_FN void along_tokens(const Params &p, const Out &out) {
    const Place<1> place(p);
    if (place.there) walk_run<8>(p, Lane<T, 1, W, Out>(p, out, place.channel), u32(place.b), place.run);
}

/// Tiles of 16 bytes of tokens by four channels.
template <class T, int W, class Out>
HK_FN void in_tiles(const Params &p, const Out &out) {
    constexpr int V = 4, N = hk::kVecLen<T>, kHistory = W - 1;
    using Tokens = Vec<T, N>;
    // The tokens before: the last four of the lane below.
    using Before = Vec<T, 4>;
    using Dwords = Vec<u32, sizeof(Before) / 4>;
    const Place<V> place(p);
    const u32 from = place.run * N;
    const u32 b = u32(place.b);
    const i64 outer = p.starts.present() ? 0 : b;
    const auto x = [&](int v) {
        return reinterpret_cast<GlobalPtr<const T>>(p.x.data) + outer * p.x_at.outer +
               (place.channel + v) * p.x_at.channel;
    };
    const bool whole = place.there && p.tokens - from >= N;
    Tokens tile[V] = {};
    Before before[V] = {};
    if (whole) {
#pragma unroll
        for (int v = 0; v < V; ++v) tile[v] = load_at<Tokens>(x(v) + from);
    }
    // Lane 0 has no lane below. It loads together with the others, for a single wait.
    if (whole && from > 0 && hk::lane_id() == 0) {
#pragma unroll
        for (int v = 0; v < V; ++v) before[v] = load_at<Before>(x(v) + from - 4);
    }
    const Lane<T, V, W, Out> lane(p, out, place.channel);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        const Before last = __builtin_shufflevector(tile[v], tile[v], N - 4, N - 3, N - 2, N - 1);
        const Dwords dwords = __builtin_bit_cast(Dwords, last), first = __builtin_bit_cast(Dwords, before[v]);
        Dwords below;
#pragma unroll
        for (u32 i = 0; i < sizeof(Dwords) / 4; ++i) below[i] = hk::shuffle_up(dwords[i], first[i]);
        before[v] = __builtin_bit_cast(Before, below);
    }
    if (!place.there) return;

    u32 start = 0, end = p.tokens, number = b;
    bool valid = true;
    if (p.starts.present()) {
        number = sequence_of(p, from);
        valid = clamp_to_tokens(p, number, start, end);
    }
    const Strides y_at = lane.y_at();
    const Sequence s = sequence(p, y_at, number, start, end - start, valid);
    const bool first = from == start;
    if (whole && !s.skip && !s.poison && (first || (from >= start && from - start >= kHistory)) && from + N <= end) {
        lane.walk_tile(s, from - start, before, tile);
        const auto y = reinterpret_cast<GlobalPtr<T>>(out.data(p, place.channel)) + outer * y_at.outer +
                       (place.channel - out.first(place.channel)) * y_at.channel + from;
#pragma unroll
        for (int v = 0; v < V; ++v) store_at(y + v * y_at.channel, tile[v]);
        if (first && s.keeps) {
            Vec<T, V> h[kHistory];
#pragma unroll
            for (int v = 0; v < V; ++v) {
#pragma unroll
                for (int i = 0; i < kHistory; ++i) h[i][v] = load_at<T>(x(v) + i64(end) + i - kHistory);
            }
            lane.store_state(s, h);
        }
    } else {
        // A sequence boundary in the tile, or a sequence without results.
#pragma nounroll
        for (u32 v = 0; v < V; ++v) {
            const Params &reloaded = hk::reload_params(p);
            walk_run<1>(reloaded, Lane<T, 1, W, Out>(reloaded, out, place.channel + v), b, place.run);
        }
    }
}

template <class T, hk::Access kAccess, class Out>
HK_FN void channels(const Params &p, const Out &out) {
    constexpr int V = kAccess == hk::Access::Vectorized ? hk::kVecLen<T> : 1;
    switch (p.width) {
        case 2:
            return along_channels<T, V, 2>(p, out);
        case 3:
            return along_channels<T, V, 3>(p, out);
        case 4:
            return along_channels<T, V, 4>(p, out);
    }
}

template <class T, hk::Access kAccess, class Out>
HK_FN void tokens(const Params &p, const Out &out) {
    const auto with_width = [&]<int W>() {
        if constexpr (kAccess == hk::Access::Vectorized) {
            in_tiles<T, W>(p, out);
        } else {
            along_tokens<T, W>(p, out);
        }
    };
    switch (p.width) {
        case 2:
            return with_width.template operator()<2>();
        case 3:
            return with_width.template operator()<3>();
        case 4:
            return with_width.template operator()<4>();
    }
}

}  // namespace conv
