// fence.h: order of accesses to memory that other blocks see.
//   release_to_device(): blocks of the device see what the thread has stored before what it stores from here on.
//   acquire_from_device(): it sees, from here on, what blocks of the device have released before what it has read of them.
#pragma once

#include <hk/arch.h>

#include HK_TARGET_HEADER(fence.h)
