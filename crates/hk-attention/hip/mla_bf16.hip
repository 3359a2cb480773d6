// mla_bf16.hip: attention over latent rows in bf16, or widened to it (mla.h).
#include "mla.h"

namespace {
using mla::Params;
using mla::Rows;
}  // namespace

HK_MLA(mla_bf16_512, hk::bf16, 512, 64, Rows::Vectors)
HK_MLA(mla_bf16_512_any, hk::bf16, 512, 128, Rows::Any)
HK_MLA(mla_bf16_512_fp8, hk::bf16, 512, 64, Rows::Fp8)
HK_MLA(mla_bf16_256, hk::bf16, 256, 64, Rows::Vectors)
HK_MLA(mla_bf16_256_any, hk::bf16, 256, 128, Rows::Any)
HK_MLA(mla_bf16_256_fp8, hk::bf16, 256, 64, Rows::Fp8)
HK_MLA(mla_bf16_512_scaled, hk::bf16, 512, 64, Rows::Scaled)
