// How likely prefixes are used again, by how often they were used and how long they have waited.
#pragma once

#include <array>
#include <cstdint>

namespace kvplane::blocks {

// Prefixes are classed by their number of uses: 1, 2, 3, more. For each class and range of ages,
// counts how often a prefix of that age was used again, and for how long prefixes of that age
// waited. The quotient is the rate of reuse at that age. The worth of waiting on, in reuses for the
// time that a block is occupied, is the best over all horizons from the age on: the Gittins index
// of a prefix that is dropped at the horizon. Ages have no unit here.
class ReuseStatistics {
 public:
  static constexpr uint32_t kNumClasses = 4;
  static constexpr uint32_t kNumAges = 64;  // ranges: two to an octave, the last is open

  ReuseStatistics() { update(1.0); }

  static uint32_t class_of(uint32_t num_uses) {
    return (num_uses < kNumClasses ? num_uses : kNumClasses) - 1;
  }

  // The range that an age is in.
  static uint32_t range_of(uint64_t age) {
    if (age == 0) return 0;
    const uint32_t octave = 63 - static_cast<uint32_t>(__builtin_clzll(age));
    // The upper half of an octave begins at sqrt(2): 181/128.
    const bool upper = octave < 56 && (age << 7) >= (uint64_t{181} << octave);
    const uint32_t range = 1 + 2 * octave + upper;
    return range < kNumAges ? range : kNumAges - 1;
  }

  void add_reuse(uint32_t use_class, uint64_t age, uint32_t num) {
    num_reuses_[use_class][range_of(age)] += num;
  }
  void add_wait(uint32_t use_class, uint32_t range, double time) {
    wait_[use_class][range] += time;
  }

  // Learns from the added counts; `keep`: how much of the past counts from now on, 0 to 1.
  void update(double keep);

  double worth(uint32_t use_class, uint32_t range) const { return worth_[use_class][range]; }

 private:
  using Row = std::array<double, kNumAges>;

  std::array<Row, kNumClasses> num_reuses_{};
  std::array<Row, kNumClasses> wait_{};
  std::array<Row, kNumClasses> worth_{};
};

}  // namespace kvplane::blocks
