// schedule.h: the order of instructions between two scheduling barriers.
#pragma once

#include <hk/arch.h>

namespace hk {

/// What kind of unit instructions are for. Values are those of AMD's scheduling groups.
enum class Issue { Vector = 0x2, Matrix = 0x8, LdsRead = 0x100 };

}  // namespace hk

#include HK_TARGET_HEADER(schedule.h)
