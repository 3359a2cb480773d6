// math.hip: y[i] = f(x[i]), one kernel per function of hk/math.h; for those of two arguments, f(x[2i], x[2i + 1]).
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>

namespace {
struct Params {  // same fields, same order as `Params` in tests/common/mod.rs
    hk::Global x, y;
    float a;
    hk::u32 pad;
};

template <int Arguments, class F>
HK_FN void map(const Params &p, F f) {
    const auto x = p.x.row<const float>(0);
    const auto y = p.y.row<float>(0);
    for (hk::u32 i = hk::block_x() * 64 + hk::thread_x(); i < p.y.cols(); i += hk::grid_x() * 64) {
        if constexpr (Arguments == 1) y[i] = f(x[i]);
        if constexpr (Arguments == 2) y[i] = f(x[2 * i], x[2 * i + 1]);
    }
}

/// `f` of the first of two elements of a vector, the other one being another number.
template <class F>
HK_FN auto of_pair(F f) {
    return [f](float x) { return f(hk::Vec<float, 2>{x, 1.0f})[0]; };
}
}  // namespace

#define ENTRY(name, function)                                                                       \
    HK_ENTRY(name, 64, [](const Params &p) { map<1>(p, [](float x) { return hk::function(x); }); }) \
    HK_ENTRY(name##_pair, 64, [](const Params &p) { map<1>(p, of_pair([](auto x) { return hk::function(x); })); })

ENTRY(exp2_fast, exp2_fast)
ENTRY(log2_fast, log2_fast)
ENTRY(rcp_fast, rcp_fast)
ENTRY(exp2, exp2)
ENTRY(exp, exp)
ENTRY(log2, log2)
ENTRY(log, log)
ENTRY(sigmoid, sigmoid)
ENTRY(tanh, tanh)
ENTRY(erf, erf)
ENTRY(erfc, erfc)
ENTRY(normal_cdf, normal_cdf)
HK_ENTRY(rsqrt, 64, [](const Params &p) { map<1>(p, [](float x) { return hk::rsqrt(x); }); })
HK_ENTRY(divide, 64, [](const Params &p) { map<2>(p, [](float a, float b) { return hk::divide(a, b); }); })
