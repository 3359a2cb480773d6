// hk/amd/shared.h: transposing reads of LDS of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

/// Reads four matrices of 8 x 8 16-bit elements from LDS; lane l has the address of row l % 8 of matrix l / 8, and gets two elements
/// of each. Where kHasLdmatrix.
HK_FN void ldmatrix_x4(u32 (&word)[4], const void *at);

/// The same, transposed: the lane gets, of each matrix, rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
HK_FN void ldmatrix_x4_trans(u32 (&word)[4], const void *at);

/// ds_read_b64_tr_b16: four 16-bit elements of a column. Where kHasReadTr.
HK_FN Vec<short, 4> read_transposed(const Vec<short, 4> *at) {
    return __builtin_amdgcn_ds_read_tr16_b64_v4i16((__attribute__((address_space(3))) Vec<short, 4> *)at);
}

}  // namespace detail

}  // namespace hk
