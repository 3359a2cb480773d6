// row_broadcast.h: a lane's numbers for all lanes of its row of 16.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>
#include HK_TARGET_HEADER(row_broadcast.h)
