// a16w16_bulk.hip: GEMM of bf16 or f16 by bulk tensor copies, on sm_90a; see gemm/bulk.h. Other targets have no such kernels.
#include <hk/entry.h>

#include <gemm/bulk.h>

namespace {
using Params = gemm::BulkParams;
}  // namespace

#if defined(HK_WARPGROUPS) || defined(HK_DESCRIBE)
#define A16W16_BULK(T)                                                                              \
    HK_ENTRY(gemm_##T##_64x64_bulk, 5 * hk::kWaveSize, gemm::bulk_gemm<hk::T, 64, 64>)              \
    HK_ENTRY(gemm_##T##_128x128_bulk, 9 * hk::kWaveSize, gemm::bulk_gemm_of_width<hk::T, 128, 128>) \
    HK_ENTRY(gemm_##T##_128x256_bulk, 9 * hk::kWaveSize, gemm::bulk_gemm_of_width<hk::T, 128, 256>)

A16W16_BULK(bf16)
A16W16_BULK(f16)
#endif
