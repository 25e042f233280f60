// A CUDA device in software: what a kernel's source needs to be compiled by a C++ compiler and run.
//
//   launch     blocks one after another; each CUDA thread is a fiber
//   schedule   the runnable warp of the highest priority runs; priorities are random, from the
//              seed, and drawn again for each block and at each of its barriers
//   memory     shared memory starts out as NaNs (all bits set); an asynchronous copy overwrites its
//              destination with NaNs at once and arrives when its thread waits for it, not before
//   order      a kernel that is launched to begin early is ordered after the one before by its
//              wait only: ThreadSanitizer sees what it touches earlier
//   collective all lanes in the mask must arrive, at the same line; otherwise the launch fails
//
// A launch that goes wrong throws EmulationError, which says which thread did what, and where.
// Not emulated: the memory order inside a warp (ThreadSanitizer sees some of it), time, registers,
// clusters, and waits of one block for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace kvplane::emulator {

struct EmulationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// The built-in variables of the running thread.
struct Builtins {
  Index thread, block, block_size, grid_size;
};
extern Builtins builtins;

// That asynchronous copies have read in all launches, for tests.
extern int64_t num_copied_bytes;

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The place of a call in the source; the default arguments give the caller's.
struct Site {
  const char* file;
  int line;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// What one lane passes to a collective, and what it gets back.
struct alignas(8) Slot {
  unsigned char bytes[32];

  template <typename T>
  static Slot of(const T& value) {
    static_assert(sizeof(T) <= sizeof(bytes));
    Slot slot = {};
    std::memcpy(slot.bytes, &value, sizeof value);
    return slot;
  }
  template <typename T>
  T as() const {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
};

// Computes what the lanes of `mask` get back; called once, by the last lane to arrive.
using Combine = void (*)(const Slot* given, unsigned mask, Slot* got);

// Sets the seed for the order of threads in the following launches.
void set_seed(uint64_t seed);

// Calls `thread` for every thread of the grid; block sizes are one-dimensional. is_early: each
// thread must call wait_for_kernel_before.
void launch(Index grid_size, Index block_size, size_t shared_bytes, std::function<void()> thread,
            bool is_early = false);
// Before the host reads what kernels wrote that let the next begin: tells ThreadSanitizer that they
// have ended.
void finish();

// Called by the running thread.
[[noreturn]] void fail(const char* what, Site site = Site::here());
unsigned char* dynamic_shared();
void sync_threads(Site site);
void sync_warp(unsigned mask, Site site);
Slot collective(const char* name, unsigned mask, const Slot& given, Combine combine, Site site);
void fence();
void wait_for_kernel_before();
void let_next_kernel_begin();
void copy_async(void* destination, const void* source, size_t bytes, size_t source_bytes,
                Site site);
void commit_copies();
void wait_for_copies(int num_groups_left);

template <typename T>
T shuffle(unsigned mask, T value, int source_lane, Site site) {
  struct Given {
    T value;
    int source_lane;
  };
  const Combine combine = [](const Slot* given, unsigned mask, Slot* got) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (!(mask >> lane & 1)) continue;
      const int source = given[lane].as<Given>().source_lane & (kWarpSize - 1);
      if (!(mask >> source & 1)) fail("a shuffle reads a lane that takes no part in it");
      got[lane] = Slot::of(given[source].as<Given>().value);
    }
  };
  return collective("__shfl_sync", mask, Slot::of(Given{value, source_lane}), combine, site)
      .template as<T>();
}

unsigned ballot(unsigned mask, bool predicate, Site site);
int lane_index();

}  // namespace kvplane::emulator

#define threadIdx (::kvplane::emulator::builtins.thread)
#define blockIdx (::kvplane::emulator::builtins.block)
#define blockDim (::kvplane::emulator::builtins.block_size)
#define gridDim (::kvplane::emulator::builtins.grid_size)

// The same under CUDA's names. The last argument of each is the place of the call.
using EmulatorSite = kvplane::emulator::Site;

inline void __syncthreads(EmulatorSite site = EmulatorSite::here()) {
  kvplane::emulator::sync_threads(site);
}
inline void __syncwarp(unsigned mask = kvplane::emulator::kAllLanes,
                       EmulatorSite site = EmulatorSite::here()) {
  kvplane::emulator::sync_warp(mask, site);
}
inline void __threadfence() { kvplane::emulator::fence(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, EmulatorSite site = EmulatorSite::here()) {
  return kvplane::emulator::shuffle(mask, value, lane, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, EmulatorSite site = EmulatorSite::here()) {
  return kvplane::emulator::shuffle(mask, value, kvplane::emulator::lane_index() ^ bits, site);
}
// As on the device, a lane with no source keeps its own value.
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, EmulatorSite site = EmulatorSite::here()) {
  const int lane = kvplane::emulator::lane_index();
  const int source = lane >= static_cast<int>(by) ? lane - static_cast<int>(by) : lane;
  return kvplane::emulator::shuffle(mask, value, source, site);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate,
                              EmulatorSite site = EmulatorSite::here()) {
  return kvplane::emulator::ballot(mask, predicate, site);
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

// Relaxed, as on the device: they create no order.
template <typename T>
T atomicOr(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicMax(T* address, T value) {
  T before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(address, &before, value, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
