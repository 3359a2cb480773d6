// pod_f16.hip: attention of prompts and of single tokens in f16 in one launch (pod.h).
#include "pod.h"

namespace {
using Params = attention::PodParams;
}  // namespace

HK_POD(pod_f16_d64, hk::f16, 64)
HK_POD(pod_f16_d128, hk::f16, 128)
