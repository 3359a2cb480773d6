// mla_f16.hip: attention over latent rows in f16 (mla.h).
#include "mla.h"

namespace {
using mla::Params;
}

HK_MLA(mla_f16_512, false, hk::f16, 512, 64, false)
HK_MLA(mla_f16_256, false, hk::f16, 256, 64, false)
HK_MLA(mla_f16_512_any, true, hk::f16, 512, 128, false)
HK_MLA(mla_f16_256_any, true, hk::f16, 256, 128, false)
HK_MLA(mla_f16_512_rope, false, hk::f16, 512, 64, true)
HK_MLA(mla_f16_256_rope, false, hk::f16, 256, 64, true)
HK_MLA(mla_f16_512_any_rope, true, hk::f16, 512, 128, true)
HK_MLA(mla_f16_256_any_rope, true, hk::f16, 256, 128, true)
