// pod_bf16.hip: attention of prompts and of single tokens in bf16 in one launch (pod.h).
#include "pod.h"

namespace {
using Params = attention::PodParams;
}  // namespace

HK_POD(pod_bf16_d64, hk::bf16, 64)
HK_POD(pod_bf16_d128, hk::bf16, 128)
