// launch_site.h: where a block of a launch finds its index, LDS and kernel arguments.
//   SingleSite: the launch is one GEMM.
//   PairSite:   the launch is two GEMMs; the first blocks compute the first, the others the second.
#pragma once

#include <gemm/args.h>

#include <hk/block.h>

namespace gemm {
/// A launch of one GEMM. `reload` reads the kernel arguments again (hk::reload_params), which frees scalar registers.
struct SingleSite {
    HK_FN static u32 block() { return hk::block_x(); }
    template <class Lds>
    HK_FN static Lds &lds() {
        return hk::block_lds<Lds>();
    }
    template <class Params>
    HK_FN static const Params &reload(const Params &p) {
        return hk::reload_params(p);
    }
};

/// Arguments of two GEMMs.
template <class First>
struct DualParams {
    First first;
    Params second;
};

/// One GEMM of a pair in one launch. `kSecond`: which one.
template <bool kSecond, class First, class Lds>
struct PairSite {
    const DualParams<First> &all;
    Lds &shared;

    HK_FN u32 block() const {
        const u32 block = hk::block_x();
        return kSecond ? block - all.first.grid.blocks : block;
    }
    template <class Own>
    HK_FN Own &lds() const {
        if constexpr (kSecond)
            return shared.second;
        else
            return shared.first;
    }
    /// hk::reload_params takes the kernel's whole argument, not one GEMM's part of it.
    template <class Own>
    HK_FN const Own &reload(const Own &) const {
        const DualParams<First> &again = hk::reload_params(all);
        if constexpr (kSecond)
            return again.second;
        else
            return again.first;
    }
};

}  // namespace gemm
