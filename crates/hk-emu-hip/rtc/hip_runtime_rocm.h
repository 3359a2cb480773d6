// What a program of hiprtc has without including it, where ROCm's headers are there: HIP's types and device functions, device malloc, 16-bit
// floats, complex numbers and constants. hip_runtime.h leaves most of them out for hiprtc, whose own text of them is in its library.
// gfx942 and gfx950 have no textures.
#pragma once
#include <hip/hip_runtime.h>

#include <hip/amd_detail/device_library_decls.h>
#include <hip/amd_detail/math_fwd.h>

#include <hip/amd_detail/hip_assert.h>
#if __has_include(<hip/amd_detail/amd_warp_functions.h>)
#include <hip/amd_detail/amd_warp_functions.h>
#endif
#if __has_include(<hip/amd_detail/amd_warp_sync_functions.h>)
#include <hip/amd_detail/amd_warp_sync_functions.h>
#endif
#include <hip/amd_detail/amd_device_functions.h>
#include <hip/amd_detail/amd_math_functions.h>
#if __has_include(<hip/amd_detail/amd_hip_unsafe_atomics.h>)
#include <hip/amd_detail/amd_hip_unsafe_atomics.h>
#endif

#include <hip/amd_detail/amd_hip_atomic.h>
#include <hip/driver_types.h>
#include <hip/hip_bfloat16.h>
#include <hip/hip_complex.h>
#include <hip/hip_fp16.h>
#include <hip/hip_math_constants.h>
#include <hip/hip_texture_types.h>
#include <hip/library_types.h>
#include <hip/surface_types.h>

#if __HIPRTC_PTRDIFF_T_IS_LONG_LONG__
typedef long long ptrdiff_t;
#else
typedef __PTRDIFF_TYPE__ ptrdiff_t;
#endif
