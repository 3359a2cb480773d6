// mla_f16.hip: attention over latent rows in f16, or widened to it (mla.h).
#include "mla.h"

namespace {
using mla::Params;
using mla::Rows;
}  // namespace

HK_MLA(mla_f16_512, hk::f16, 512, 64, Rows::Vectors)
HK_MLA(mla_f16_512_any, hk::f16, 512, 128, Rows::Any)
HK_MLA(mla_f16_512_fp8, hk::f16, 512, 64, Rows::Fp8)
HK_MLA(mla_f16_256, hk::f16, 256, 64, Rows::Vectors)
HK_MLA(mla_f16_256_any, hk::f16, 256, 128, Rows::Any)
HK_MLA(mla_f16_256_fp8, hk::f16, 256, 64, Rows::Fp8)
