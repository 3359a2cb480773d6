// hk/nvidia/shared.h: transposing reads and writes of LDS of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

/// Reads four matrices of 8 x 8 16-bit elements from LDS; lane l has the address of row l % 8 of matrix l / 8, and gets two elements
/// of each. Where kHasLdmatrix.
HK_FN void ldmatrix_x4(u32 (&word)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(lds_address(at))
                 : "memory");
}

/// The same, transposed: the lane gets, of each matrix, rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
HK_FN void ldmatrix_x4_trans(u32 (&word)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(lds_address(at))
                 : "memory");
}

/// Writes four matrices of 8 x 8 16-bit elements to LDS, as ldmatrix_x4 reads them.
HK_FN void stmatrix_x4(const u32 (&word)[4], void *at) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(lds_address(at)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

/// The same, transposed, as ldmatrix_x4_trans reads them.
HK_FN void stmatrix_x4_trans(const u32 (&word)[4], void *at) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(lds_address(at)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

/// ds_read_b64_tr_b16: four 16-bit elements of a column. Where kHasReadTr.
HK_FN Vec<short, 4> read_transposed(const Vec<short, 4> *at);

}  // namespace detail

}  // namespace hk
