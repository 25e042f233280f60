// Launches of the attention kernels; attention.cu decides which run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/tile_sizes.h"
#include "cuda/device/launch.h"
#include "kvplane/dtype.h"

namespace kvplane::cuda {

struct Work;

// How a kernel of a call is launched.
struct Launch {
  int64_t max_items;  // an upper bound on the plan's items, and so on the grid
  uintptr_t stream;
  Begins begins;
};

// The shared memory that a block can have on every device from Ampere on: that of sm_86, sm_89 and
// sm_120.
constexpr int kSharedBytesOfEveryDevice = 99 * 1024;

void launch_plan(const Work& work, uintptr_t stream);
void launch_families(const Work& work, uintptr_t stream);
// The first kernel of a call, on tensor cores; launch_fma elsewhere. The templates are instantiated
// in a file for each type of pages.
template <typename Kv>
void launch_short(const Work& work, const Launch& how);
// Items of several decodes. The second returns the kernel's shared memory; 0 if there is no kernel.
template <typename Kv>
void launch_shared(const Work& work, const Launch& how);
template <typename Kv>
size_t shared_memory_of_families(int64_t head_size);
// The least shared memory that the short and the long kernel need.
template <typename Kv>
size_t least_shared_bytes(int64_t head_size);
template <typename Kv>
void launch_long(const Work& work, const Launch& how);
void launch_fma(const Work& work, const Launch& how);
void launch_combine(const Work& work, uintptr_t stream);

}  // namespace kvplane::cuda
