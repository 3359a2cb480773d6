// hk/warpgroup.h: GEMM by the warpgroup instructions of Hopper (wgmma): four waves multiply 64 rows of x by all rows of w, both in LDS.
//
//   rows of x, of w  --asynchronous copies-->  stages in LDS  --wgmma-->  accumulators
//
// A stage has 128 bytes of each row, in the 128-byte swizzle of the instruction. Rows are in LDS in the order of MMAs, so that a lane's
// accumulators are those of AccLayout<16>. Only where HK_WARPGROUPS is defined.
// Source: PTX ISA 8.4, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/tensor_map.h>
#include <hk/types.h>
#include <hk/wave.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HK_WARPGROUPS 1

namespace hk {

/// A stage of `kRows` rows: row r is that of MMA row r, and chunk c of it is at c ^ r % 8.
template <int kRows_>
struct alignas(1024) WarpgroupRows {
    static constexpr int kRows = kRows_, kBytes = 128, kChunks = 8;
    static_assert(kRows % 16 == 0, "whole MMAs");

    Vec<u32, 4> chunk[kRows * kChunks];

    HK_FN static constexpr u32 swizzle(u32 row) { return row % 8; }
    /// Of the 16 rows that an MMA multiplies, the one at place r: a lane's accumulators are of neighbouring rows.
    HK_FN static constexpr u32 of_mma(u32 r) { return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2; }

    /// Stores a wave's 16 rows from `row` on, of fragments of theirs.
    HK_FN void put(u32 row, const Frag (&x)[2]) {
        const u32 lane = lane_id();
        auto *words = reinterpret_cast<u32 *>(chunk);
#pragma unroll
        for (u32 i = 0; i < kChunks; ++i) {
#pragma unroll
            for (u32 r = 0; r < kRowsPerLane; ++r) {
                const u32 of_lane = row + lane / 4 + r * 8, at = of_lane * kChunks + (i ^ swizzle(of_lane));
                words[at * 4 + lane % 4] = x[i / 4][i % 4 + r * 4];
            }
        }
    }

    /// The matrix descriptor of rows from `row` on, from byte `byte` of each. As columns: of 64 columns, and of 64 more `kNext` bytes further
    /// on; of the rows that are multiplied.
    template <int kNext = 16>
    HK_FN u64 descriptor(u32 row, u32 byte) const {
        return descriptor_at<kNext>(detail::lds_address(chunk), row, byte);
    }
    /// The same of rows at an address.
    template <int kNext = 16>
    HK_FN static u64 descriptor_at(u32 first, u32 row, u32 byte) {
        constexpr u32 kEightRows = 8 * kBytes / 16, kSwizzle128 = 1;
        // The words apart: descriptors of a tile differ in a 32-bit constant.
        const u32 low = first / 16 + (row * kBytes + byte + (kNext << 16)) / 16;
        return u64(kEightRows | kSwizzle128 << 30) << 32 | low;
    }
};

/// Of a lane's accumulators d of an MMA: d[i] is accumulator place_of_sum(i) of the i / 8th tile of AccLayout<16>.
HK_FN constexpr int place_of_sum(int i) { return i % 8 / 4 * 2 + i % 4 / 2 * 4 + i % 2; }

/// Loads the rows of a stage in the order of MMAs.
template <int kRows, int kThreads, int kElement>
struct WarpgroupMover : Mover<WarpgroupRows<kRows>, kThreads, Access::Vectorized, kElement> {
    template <class RowOf>
    HK_FN WarpgroupMover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : Mover<WarpgroupRows<kRows>, kThreads, Access::Vectorized, kElement>(
              first, rows, layout, end, [&](u32 r) { return row_of(WarpgroupRows<kRows>::of_mma(r)); }) {}
};

/// A barrier in LDS at which arriving and waiting are apart (mbarrier). Phases alternate in parity, from 0 on.
class SplitBarrier {
    u64 state_;

    HK_FN u32 address() const { return detail::lds_address(&state_); }

  public:
    /// A phase ends when `waves` have arrived. By one thread; a block barrier follows.
    HK_FN void init(u32 waves) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address()), "r"(waves) : "memory");
    }
    /// Makes initialized barriers visible to bulk copies; a block barrier follows.
    HK_FN static void publish() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
    /// Arrives, and lets the phase last until `bytes` bytes have been copied. By one thread.
    HK_FN void expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "r"(address()), "r"(bytes)
                     : "memory");
    }
    /// Bulk copy of rows from (column, row) on to LDS, which this barrier expects. By one thread.
    HK_FN void copy_rows(void *to, const TensorMap &from, u32 column, u32 row) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            :
            : "r"(detail::lds_address(to)), "l"(&from), "r"(address()), "r"(column), "r"(row)
            : "memory");
    }
    /// The same of rows in the order of MMAs (WarpgroupRows::of_mma), which are axes 1 to 3 of the map; axis 4 counts 16 rows.
    HK_FN void copy_mma_rows(void *to, const TensorMap &from, u32 column, u32 row) {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %4, %4, %5}], [%2];"
            :
            : "r"(detail::lds_address(to)), "l"(&from), "r"(address()), "r"(column), "r"(0), "r"(row / 16)
            : "memory");
    }
    /// By all lanes of a wave.
    HK_FN void arrive() {
        asm volatile("bar.warp.sync 0xffffffff;" : : : "memory");
        if (lane_id() == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(address()) : "memory");
    }
    /// Arrives when the copies to LDS that the thread has started have landed (Window::load_to_lds).
    HK_FN void arrive_when_copied() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(address()) : "memory");
    }
    /// Waits for the end of the phase.
    HK_FN void wait(u32 parity) const {
        asm volatile(
            "{\n\t.reg .pred done;\nagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
            "@!done bra again;\n\t}"
            :
            : "r"(address()), "r"(parity)
            : "memory");
    }
};

/// kCount warpgroups in turn, the first one first. With one, nobody waits.
template <int kCount>
class Turns {
    u32 own_;

    static constexpr u32 kFirst = 1, kThreads = 2 * 128;  // barriers; of who passes and who takes

  public:
    HK_FN explicit Turns(u32 own) : own_(own) {
        if (last()) pass();
    }
    HK_FN bool last() const { return own_ == kCount - 1; }
    HK_FN void take() const {
        if (kCount > 1) asm volatile("bar.sync %0, %1;" : : "r"(kFirst + own_), "n"(kThreads) : "memory");
    }
    HK_FN void pass() const {
        if (kCount > 1)
            asm volatile("bar.arrive %0, %1;" : : "r"(kFirst + (last() ? 0 : own_ + 1)), "n"(kThreads) : "memory");
    }
};

namespace detail {

/// Leaves kCount registers to each thread of the warpgroup: more, which it waits for until others have given them, or fewer.
template <int kCount>
HK_FN void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kCount) : "memory");
}
template <int kCount>
HK_FN void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kCount) : "memory");
}

/// The address of something in LDS, the same in all lanes. The compiler knows that, and makes descriptors of it in uniform registers.
HK_FN u32 uniform_address(const auto &of) {
    u32 at;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(at) : "r"(lds_address(&of)));
    return at;
}

/// Copies that this thread has waited for may be read by wgmma of any wave, after a barrier.
HK_FN void publish_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
HK_FN void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
HK_FN void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
/// Waits until at most the last `kGroups` groups are in flight.
template <int kGroups>
HK_FN void wait_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}

/// The same, and that the compiler takes `d` for written by it: MMAs write their accumulators until then.
template <int kGroups, int kCount>
HK_FN void wait_wgmma(float (&d)[kCount]) {
    wait_wgmma<kGroups>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]));
}
/// Until here MMAs read the registers.
template <int kCount>
HK_FN void keep_until_here(const Frag (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < FragMma<bf16>::kWordsPerFrag; ++j) asm volatile("" : : "r"(u32(x[i][j])));
    }
}

/// d += x w^T over 32 bytes of each row: 64 rows of x, kN of w. Not of fp8, whose sums have some 14 bits.
template <class T, int kN>
struct Wgmma;

/// d = x w^T or d += x w^T over 16 columns: 64 rows of x, in LDS or in fragments of the waves, of which it is half `half`, and kN of w.
/// kColumnsX, kColumnsW: LDS has 16 rows of the operand, which are these columns.
template <class T, int kN>
struct WgmmaStep;

#define HK_REGISTERS_8(constraint, i)                                                                         \
    constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]), constraint(d[i + 4]), \
        constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define HK_REGISTERS_16(c, i) HK_REGISTERS_8(c, i), HK_REGISTERS_8(c, i + 8)
#define HK_REGISTERS_32(c, i) HK_REGISTERS_16(c, i), HK_REGISTERS_16(c, i + 16)
#define HK_REGISTERS_48(c, i) HK_REGISTERS_32(c, i), HK_REGISTERS_16(c, i + 32)
#define HK_REGISTERS_64(c, i) HK_REGISTERS_32(c, i), HK_REGISTERS_32(c, i + 32)
#define HK_REGISTERS_96(c, i) HK_REGISTERS_64(c, i), HK_REGISTERS_32(c, i + 64)
#define HK_REGISTERS_112(c, i) HK_REGISTERS_96(c, i), HK_REGISTERS_16(c, i + 96)
#define HK_REGISTERS_128(c, i) HK_REGISTERS_64(c, i), HK_REGISTERS_64(c, i + 64)
#define HK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HK_NAMES_32 HK_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HK_NAMES_48 \
    HK_NAMES_32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HK_NAMES_64                                                                      \
    HK_NAMES_32                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HK_NAMES_96                                                                      \
    HK_NAMES_64                                                                          \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HK_NAMES_112 \
    HK_NAMES_96      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HK_NAMES_128 \
    HK_NAMES_112     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HK_WGMMA(T, n, registers, cols, types, Number, constraint, x, w, flags)                              \
    template <>                                                                                              \
    struct Wgmma<T, n> {                                                                                     \
        HK_FN static void mma(Number (&d)[registers], u64 of_x, u64 of_w) {                                  \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k" cols "." types " {" HK_NAMES_##registers \
                         "}, %" x ", %" w ", 1" flags ";"                                                    \
                         : HK_REGISTERS_##registers(constraint, 0)                                           \
                         : "l"(of_x), "l"(of_w)                                                              \
                         : "memory");                                                                        \
        }                                                                                                    \
    };
#define HK_WGMMAS(T, cols, types, Number, constraint, flags)                    \
    HK_WGMMA(T, 64, 32, cols, types, Number, constraint, "32", "33", flags)     \
    HK_WGMMA(T, 96, 48, cols, types, Number, constraint, "48", "49", flags)     \
    HK_WGMMA(T, 128, 64, cols, types, Number, constraint, "64", "65", flags)    \
    HK_WGMMA(T, 192, 96, cols, types, Number, constraint, "96", "97", flags)    \
    HK_WGMMA(T, 224, 112, cols, types, Number, constraint, "112", "113", flags) \
    HK_WGMMA(T, 256, 128, cols, types, Number, constraint, "128", "129", flags)
#define HK_WGMMA_OF_LDS(constraint, n, registers, types, x, w, transposed_x, transposed_w, add) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16." types " {" HK_NAMES_##registers  \
                 "}, %" x ", %" w ", " add ", 1, 1, %" transposed_x ", %" transposed_w ";"      \
                 : HK_REGISTERS_##registers(constraint, 0)                                      \
                 : "l"(of_x), "l"(of_w), "n"(int(kColumnsX)), "n"(int(kColumnsW))               \
                 : "memory");
#define HK_WGMMA_OF_FRAG(constraint, n, registers, types, x0, x1, x2, x3, w, transposed_w, add)       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16." types " {" HK_NAMES_##registers        \
                 "}, {%" x0 ", %" x1 ", %" x2 ", %" x3 "}, %" w ", " add ", 1, 1, %" transposed_w ";" \
                 : HK_REGISTERS_##registers(constraint, 0)                                            \
                 : "r"(u32(x[2 * half])), "r"(u32(x[2 * half + 4])), "r"(u32(x[2 * half + 1])),       \
                   "r"(u32(x[2 * half + 5])), "l"(of_w), "n"(int(kColumnsW))                          \
                 : "memory");
// i0 to i5: the numbers of the operands behind the registers.
#define HK_WGMMA_STEP(T, n, registers, types, i0, i1, i2, i3, i4, i5)                     \
    template <>                                                                           \
    struct WgmmaStep<T, n> {                                                              \
        template <bool kColumnsX = false, bool kColumnsW = false>                         \
        HK_FN static void set(float (&d)[registers], u64 of_x, u64 of_w) {                \
            HK_WGMMA_OF_LDS("=f", n, registers, types, i0, i1, i2, i3, "0")               \
        }                                                                                 \
        template <bool kColumnsX = false, bool kColumnsW = false>                         \
        HK_FN static void add(float (&d)[registers], u64 of_x, u64 of_w) {                \
            HK_WGMMA_OF_LDS("+f", n, registers, types, i0, i1, i2, i3, "1")               \
        }                                                                                 \
        template <bool kColumnsW = false>                                                 \
        HK_FN static void set(float (&d)[registers], const Frag &x, int half, u64 of_w) { \
            HK_WGMMA_OF_FRAG("=f", n, registers, types, i0, i1, i2, i3, i4, i5, "0")      \
        }                                                                                 \
        template <bool kColumnsW = false>                                                 \
        HK_FN static void add(float (&d)[registers], const Frag &x, int half, u64 of_w) { \
            HK_WGMMA_OF_FRAG("+f", n, registers, types, i0, i1, i2, i3, i4, i5, "1")      \
        }                                                                                 \
    };
#define HK_WGMMA_STEPS(T, types)                                        \
    HK_WGMMA_STEP(T, 32, 16, types, "16", "17", "18", "19", "20", "21") \
    HK_WGMMA_STEP(T, 64, 32, types, "32", "33", "34", "35", "36", "37") \
    HK_WGMMA_STEP(T, 128, 64, types, "64", "65", "66", "67", "68", "69")
HK_WGMMA_STEPS(bf16, "f32.bf16.bf16")
HK_WGMMA_STEPS(f16, "f32.f16.f16")
#undef HK_WGMMA_STEPS
#undef HK_WGMMA_STEP
#undef HK_WGMMA_OF_FRAG
#undef HK_WGMMA_OF_LDS
HK_WGMMAS(bf16, "16", "f32.bf16.bf16", float, "+f", ", 1, 1, 0, 0")
HK_WGMMAS(f16, "16", "f32.f16.f16", float, "+f", ", 1, 1, 0, 0")
HK_WGMMAS(I8, "32", "s32.s8.s8", int, "+r", "")
#undef HK_WGMMAS
#undef HK_WGMMA
#undef HK_NAMES_16
#undef HK_NAMES_32
#undef HK_NAMES_48
#undef HK_NAMES_64
#undef HK_NAMES_96
#undef HK_NAMES_112
#undef HK_NAMES_128
#undef HK_REGISTERS_8
#undef HK_REGISTERS_16
#undef HK_REGISTERS_32
#undef HK_REGISTERS_48
#undef HK_REGISTERS_64
#undef HK_REGISTERS_96
#undef HK_REGISTERS_112
#undef HK_REGISTERS_128

/// d = x w^T of fragments, 16 columns a step; of_w(step) is the descriptor of w there.
template <class T, int kRegisters, int kFrags, class OfW>
HK_FN void multiply_frags(float (&d)[kRegisters], const Frag (&x)[kFrags], OfW of_w) {
    using Mma = WgmmaStep<T, 2 * kRegisters>;
    Mma::set(d, x[0], 0, of_w(0));
#pragma unroll
    for (int step = 1; step < 2 * kFrags; ++step) Mma::add(d, x[step / 2], step % 2, of_w(step));
}

}  // namespace detail

/// A ring of `kCount` stages: one is multiplied while the MMAs of the one before end, the others are in flight.
template <class A, class W, class Scales, int kCount>
class WarpgroupPipeline {
    static constexpr int kAhead = kCount - 2;  // stages in flight behind the one that is multiplied
    static constexpr int kLoads = A::kParts + W::kParts;
    static_assert(kAhead >= 2 && Scales::kParts == 0, "plain rows");

    const A &a_;
    const W &w_;
    Stages<A, W, Scales, kCount> &stages_;

    HK_FN void copy(u32 from, u32 stage) const {
        a_.copy(from, stages_.a[stage]);
        w_.copy(from, stages_.w[stage]);
        commit_loads();
    }

  public:
    using Lds = Stages<A, W, Scales, kCount>;

    HK_FN WarpgroupPipeline(const A &a, const W &w, const Scales &, Lds &stages) : a_(a), w_(w), stages_(stages) {}

    /// Multiplies `count` stages from byte `from` of the rows on, and adds to the accumulators of the wave's 16 rows.
    template <class T, int kN, class Acc>
    HK_FN void multiply(u32 from, u32 count, Acc (&acc)[1][kN / 16]) const {
        using Number = decltype(acc[0][0][0] + acc[0][0][0]);
        constexpr u32 kBytes = WarpgroupRows<64>::kBytes;
        Number d[kN / 2] = {};
        const u32 row = wave_id() / 4 * 64;
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) copy(from + i * kBytes, i);
        u32 now = 0, next = kAhead;
        from += kAhead * kBytes;
        for (u32 done = 0; done < count; ++done) {
            wait_loads<kAhead - 1, kLoads>();
            detail::publish_to_wgmma();
            // All waves have waited for the MMAs of the stage that `next` overwrites.
            block_barrier();
            detail::begin_wgmma();
#pragma unroll
            for (u32 byte = 0; byte < kBytes; byte += 32)
                detail::Wgmma<T, kN>::mma(d, stages_.a[now].descriptor(row, byte), stages_.w[now].descriptor(0, byte));
            detail::commit_wgmma();
            copy(from, next);
            detail::wait_wgmma<1>();
            from += kBytes;
            now = now + 1 == kCount ? 0 : now + 1;
            next = next + 1 == kCount ? 0 : next + 1;
        }
        detail::wait_wgmma<0>();
        // Full drain: loads in flight must not land after the block has freed its LDS.
        wait_loads<0, 0>();
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) acc[0][i / 8][place_of_sum(i)] = d[i];
    }
};

}  // namespace hk
#endif
