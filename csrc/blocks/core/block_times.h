// How long published blocks live, wait and are evicted, counted for metrics.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvplane::blocks {

// Why a published block was allocated for another use: it was the next of the eviction policy; it
// was retained, and nothing else was left; or the session that had just released it took it back.
enum class Eviction : uint8_t { kPolicy, kRetained, kOwn };
constexpr int kNumEvictions = 3;

// A histogram of durations in seconds.
struct Durations {
  static constexpr std::array<double, 17> kBounds = {
      0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400};
  std::array<int64_t, kBounds.size() + 1> counts{};
  double sum_s = 0;
  size_t last = 0;  // the range of the last one

  // The first of the bounds that is not below the duration; their number when all are.
  static size_t range_of(double duration_s) {
    return static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), duration_s) -
                               kBounds.begin());
  }
  void add(double duration_s) {
    // Blocks of one prompt were mostly published and used together.
    const bool is_as_before = (last == 0 || duration_s > kBounds[last - 1]) &&
                              (last == kBounds.size() || duration_s <= kBounds[last]);
    if (!is_as_before) last = range_of(duration_s);
    ++counts[last];
    sum_s += duration_s;
  }
};

// Times of one tier's blocks, since the pool was made.
struct BlockTimes {
  std::array<int64_t, kNumEvictions> num_evictions{};
  Durations lifetime;   // from publication to eviction
  Durations idle;       // from the last admission that found it, or publication, to eviction
  Durations reuse_gap;  // between two admissions that found it, or publication and the first
};

}  // namespace kvplane::blocks
