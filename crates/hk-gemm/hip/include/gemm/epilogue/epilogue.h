// epilogue.h: from accumulators to outputs: scales, bias, activation, fused operation, one rounding.
#pragma once

#include <gemm/epilogue/gated.h>
#include <gemm/epilogue/mul_add.h>
#include <gemm/epilogue/split_cat.h>
#include <gemm/epilogue/store.h>

namespace gemm {
/// Outputs (m, n .. n + N), given their accumulators.
template <int N, class Params>
HK_FN void run_epilogue(const Params &p, const TileCoord &coord, u32 m, u32 n, Vec<float, N> sum) {
    const Epilogue &e = p.epilogue;
    if (m >= e.rows || n >= e.cols || !e.groups.has(coord.batch, m)) return;
    sum = apply_scales<N>(e, coord, m, n, sum);
    // With partial sums, the first split-K slice adds the bias.
    if (e.bias && (e.store == StoreMode::Round || coord.split == 0)) {
        sum += load_floats<N>(e.bias, e.bias_type, i64(coord.matrix) * e.bias_batch + n, e.cols - n);
    }
    if (e.store == StoreMode::Round) {
        sum = activate<N>(e.activation, sum);
        if constexpr (requires { p.fusion; }) {
            const Fusion &f = p.fusion;
            if (f.divisor) sum = sum / hk::load_uniform<float>(f.divisor);
            if (f.kind == Fusion::Kind::SplitCat) {
                with_type(e.y_type, [&]<class T>(T) { store_split_cat<T, N>(e, f, m, n, sum); });
                return;
            }
            if (f.kind != Fusion::Kind::None) {
                const Vec<float, N> a = load_term<N>(f.a, m, n, e.cols - n), b = load_term<N>(f.b, m, n, e.cols - n);
                sum = f.kind == Fusion::Kind::ScaleAdd ? a * sum + b : a * b + sum;
            }
        }
    }
    store_output<N>(e, coord, m, n, sum);
}

}  // namespace gemm
