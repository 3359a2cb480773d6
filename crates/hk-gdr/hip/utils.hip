// utils.hip: the functions by which results on the device are compared
//   convert       y = x                       bf16 to f32, exact; f32 to bf16, to nearest even
//   diff          y = |a - b| or (a - b)^2    E = bf16 | f16 | f32 to f32
//   reduce        partials[b] = sum or maximum of elements 16384 b to 16384 (b + 1); reduce_parts: of those
// One axis of any length, contiguous. All arithmetic is f32. A lane has 16 bytes of the narrower type at a time, or one element where a
// tensor is not on 16 bytes. Sums are trees of a fixed shape: the same bits for the same length. NaN propagates.
// Floor: bytes of the tensors.
#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>

namespace {
using hk::bf16;
using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using hk::Vec;

struct Params {
    u64 a, b, y;  // b may be 0
    u64 n;
    u32 vectorized;
    u32 choice;  // squares, the maximum
};

constexpr u32 kThreads = 256;
constexpr u32 kPart = 16384;  // elements of a partial result

/// An element. Of 2 bytes by a relaxed atomic: otherwise the compiler merges neighbours into an access that need not be aligned.
template <class E>
HK_FN float element(u64 data, u64 i) {
    const auto at = reinterpret_cast<GlobalPtr<const E>>(data) + i;
    if constexpr (sizeof(E) == 2) {
        const auto bits = reinterpret_cast<GlobalPtr<const hk::u16>>(at);
        return float(__builtin_bit_cast(E, __scoped_atomic_load_n(bits, __ATOMIC_RELAXED, __MEMORY_SCOPE_SINGLE)));
    } else {
        return float(*at);
    }
}

/// V elements from `i` on, 16 bytes at a time.
template <class E, int V>
HK_FN void load(float (&v)[V], u64 data, u64 i) {
    const auto from = reinterpret_cast<GlobalPtr<const E>>(data) + i;
    constexpr int kStep = V < hk::kVecLen<E> ? V : hk::kVecLen<E>;
#pragma unroll
    for (int j = 0; j < V; j += kStep) {
        const auto part = *reinterpret_cast<GlobalPtr<const Vec<E, kStep>>>(from + j);
#pragma unroll
        for (int e = 0; e < kStep; ++e) v[j + e] = float(part[e]);
    }
}
template <class E, int V>
HK_FN void store(u64 data, u64 i, const float (&v)[V]) {
    const auto to = reinterpret_cast<GlobalPtr<E>>(data) + i;
    constexpr int kStep = V < hk::kVecLen<E> ? V : hk::kVecLen<E>;
#pragma unroll
    for (int j = 0; j < V; j += kStep) {
        Vec<float, kStep> part;
#pragma unroll
        for (int e = 0; e < kStep; ++e) part[e] = v[j + e];
        *reinterpret_cast<GlobalPtr<Vec<E, kStep>>>(to + j) = hk::narrow<E, kStep>(part);
    }
}

/// Calls `f.template operator()<V>(i)` for this lane's elements: V at once where whole vectors are there.
template <int V, class F>
HK_FN void for_elements(const Params &p, F f) {
    const u64 i = (u64(hk::block_x()) * kThreads + hk::thread_x()) * V;
    if (i >= p.n) return;
    if (p.vectorized && p.n - i >= V) return f.template operator()<V>(i);
    const u64 end = p.n - i < V ? p.n : i + V;
    for (u64 at = i; at < end; ++at) f.template operator()<1>(at);
}

template <class From, class To>
HK_FN void convert(const Params &p) {
    for_elements<8>(p, [&]<int V>(u64 i) {
        float v[V];
        load<From>(v, p.a, i);
        store<To>(p.y, i, v);
    });
}

template <class E>
HK_FN void diff(const Params &p) {
    for_elements<8>(p, [&]<int V>(u64 i) {
        float a[V], b[V];
        load<E>(a, p.a, i);
        load<E>(b, p.b, i);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float off = a[j] - b[j];
            a[j] = p.choice ? off * off : __builtin_fabsf(off);
        }
        store<float>(p.y, i, a);
    });
}

/// The sum, or the larger; of a NaN and a number, the NaN.
struct Combine {
    bool max;
    HK_FN float operator()(float a, float b) const {
        if (!max) return hk::Sum{}(a, b);
        return a != a || a > b ? a : b;
    }
    HK_FN float none() const { return max ? -__builtin_inff() : 0.0f; }
};

template <class E>
HK_FN void reduce(const Params &p) {
    const Combine op = {p.choice != 0};
    constexpr int V = 8;
    const u64 first = u64(hk::block_x()) * kPart;
    const u64 end = p.n - first < kPart ? p.n : first + kPart;
    float all = op.none();
    for (u64 i = first + hk::thread_x() * V; i < end; i += kThreads * V) {
        float v[V];
        if (p.vectorized && end - i >= V) {
            load<E>(v, p.a, i);
        } else {
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = i + j < end ? element<E>(p.a, i + j) : op.none();
        }
        // A tree of eight.
#pragma unroll
        for (int half = V / 2; half > 0; half /= 2) {
#pragma unroll
            for (int j = 0; j < half; ++j) v[j] = op(v[j], v[j + half]);
        }
        all = op(all, v[0]);
    }
    hk::GroupReducer<kThreads, kThreads> group;
    all = group.reduce(all, op);
    if (hk::thread_x() == 0) reinterpret_cast<GlobalPtr<float>>(p.y)[hk::block_x()] = all;
}

/// One block: of `n` partial results.
HK_FN void of_parts(const Params &p) {
    const Combine op = {p.choice != 0};
    float all = op.none();
    for (u64 i = hk::thread_x(); i < p.n; i += kThreads)
        all = op(all, reinterpret_cast<GlobalPtr<const float>>(p.a)[i]);
    hk::GroupReducer<kThreads, kThreads> group;
    all = group.reduce(all, op);
    if (hk::thread_x() == 0) reinterpret_cast<GlobalPtr<float>>(p.y)[0] = all;
}
}  // namespace

HK_ENTRY(convert_bf16_f32, kThreads, convert<bf16, float>)
HK_ENTRY(convert_f32_bf16, kThreads, convert<float, bf16>)
HK_ENTRY(diff_bf16, kThreads, diff<bf16>)
HK_ENTRY(diff_f16, kThreads, diff<hk::f16>)
HK_ENTRY(diff_f32, kThreads, diff<float>)
HK_ENTRY(reduce_bf16, kThreads, reduce<bf16>)
HK_ENTRY(reduce_f16, kThreads, reduce<hk::f16>)
HK_ENTRY(reduce_f32, kThreads, reduce<float>)
HK_ENTRY(reduce_parts, kThreads, of_parts)
