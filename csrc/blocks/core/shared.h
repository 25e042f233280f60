// What all classes of a layer group share: its settings, its clock and what they count.
#pragma once

#include <cstdint>
#include <utility>

#include "core/block_times.h"
#include "core/pool_config.h"

namespace kvplane::blocks {

// Counted by those who did it.
struct Counters {
  int64_t num_lookup_tokens = 0;
  int64_t num_hit_tokens = 0;
  int64_t num_copies_on_write = 0;
  int64_t num_swapped_out = 0;
  int64_t num_swapped_in = 0;
  int64_t num_evictions = 0;
  int64_t num_publications = 0;
  int64_t max_held = 0;
  int64_t num_host_hit_tokens = 0;
  int64_t num_demoted = 0;
  int64_t num_forgotten = 0;
};

struct Shared {
  explicit Shared(PoolConfig given) : config(std::move(given)) {}

  PoolConfig config;
  double now_s = 0;
  Counters counters;
  BlockTimes block_times[2];  // by tier
};

}  // namespace kvplane::blocks
