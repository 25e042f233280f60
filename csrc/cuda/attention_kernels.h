// How the attention kernels are started; attention.cu decides which.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvplane/dtype.h"

namespace kvplane::cuda {

struct Work;

constexpr int kRowsOfFmaTile = 16;
constexpr int kRowsOfLongTile = 64;

// Rows of a short tile: queries are taken eight or sixteen at a time. Sixteen of the largest heads
// would not fit a thread's registers.
constexpr int short_tile_rows(int64_t group, int64_t head_size) {
  return group <= 8 || head_size > 192 ? 8 : 16;
}

// The shared memory that a block can have on every device from Ampere on; sm_86, sm_89 and sm_120
// have no more.
constexpr int kSharedBytesOfEveryDevice = 99 * 1024;

void launch_plan(const Work& work, uintptr_t stream);
// `max_items`: no plan has more; the grid is not larger. For each type of pages there is a file of
// instances of the first two.
template <typename Kv>
void launch_short(const Work& work, int64_t max_items, uintptr_t stream);
// The least shared memory that it can do with.
template <typename Kv>
size_t least_shared_bytes_of_short(int64_t head_size);
template <typename Kv>
void launch_long(const Work& work, int64_t max_items, uintptr_t stream);
void launch_fma(const Work& work, int64_t max_items, uintptr_t stream);
void launch_combine(const Work& work, uintptr_t stream);

}  // namespace kvplane::cuda
