// What a layer group has done, counted by those who did it.
#pragma once

#include <cstdint>

namespace kvplane::blocks {

struct Counters {
  int64_t num_lookup_tokens = 0;
  int64_t num_hit_tokens = 0;
  int64_t num_copies_on_write = 0;
  int64_t num_swapped_out = 0;
  int64_t num_swapped_in = 0;
  int64_t num_publications = 0;
  int64_t max_held = 0;
  int64_t num_host_hit_tokens = 0;
  int64_t num_demoted = 0;
  int64_t num_forgotten = 0;
};

}  // namespace kvplane::blocks
