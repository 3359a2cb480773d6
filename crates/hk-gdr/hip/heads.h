// heads.h: rows of the heads of a tensor.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>

namespace gdr {

/// Rows of heads of a tensor, strides in elements.
struct Heads {
    hk::u64 data;
    hk::i64 batch, token, head;

    /// The row of a head, of `bytes`.
    template <class T>
    HK_FN hk::Window row(hk::i64 b, hk::i64 t, hk::u32 h, hk::u32 bytes) const {
        return hk::Window(reinterpret_cast<hk::GlobalPtr<T>>(data) + b * batch + t * token + h * head, bytes);
    }
};

}  // namespace gdr
