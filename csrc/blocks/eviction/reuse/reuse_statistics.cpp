#include "eviction/reuse/reuse_statistics.h"

#include <cmath>

namespace kvplane::blocks {
namespace {

constexpr uint32_t kNumAges = ReuseStatistics::kNumAges;

double begin_of(uint32_t range) { return range == 0 ? 0 : std::exp2((range - 1) / 2.0); }

// The best quotient of reuses and time over all horizons, for each range of ages to begin in.
// Ranges join the run after them while that has the better quotient.
void set_worth(const std::array<double, kNumAges>& rate, std::array<double, kNumAges>& worth) {
  struct Run {
    double reused;  // share of those at the begin that is used again in the run
    double time;    // that one of them waits in the run
  };
  std::array<Run, kNumAges> runs;
  uint32_t num_runs = 0;
  for (uint32_t i = kNumAges; i-- > 0;) {
    const double length = begin_of(i + 1) - begin_of(i);
    const double reused = -std::expm1(-rate[i] * length);
    Run run = {reused, reused / rate[i]};
    while (num_runs &&
           runs[num_runs - 1].reused * run.time > run.reused * runs[num_runs - 1].time) {
      const Run& next = runs[--num_runs];
      const double left = 1 - run.reused;
      run = {run.reused + left * next.reused, run.time + left * next.time};
    }
    runs[num_runs++] = run;
    worth[i] = run.reused / run.time;
  }
}

}  // namespace

void ReuseStatistics::update(double keep) {
  // Where little is known, one reuse is assumed at the rate of the younger ages, falling as
  // 1/age: by that alone the oldest are worth least. A class assumes one at the rate of all.
  Row rate_of_all;
  double expected = 1;
  for (uint32_t i = 0; i < kNumAges; ++i) {
    double reuses = 0;
    double wait = 0;
    for (uint32_t c = 0; c < kNumClasses; ++c) {
      reuses += num_reuses_[c][i];
      wait += wait_[c][i];
    }
    if (i) expected = rate_of_all[i - 1] * (i == 1 ? M_SQRT1_2 : begin_of(i) / begin_of(i + 1));
    rate_of_all[i] = (reuses + 1) / (wait + 1 / expected);
  }
  for (uint32_t c = 0; c < kNumClasses; ++c) {
    Row rate;
    for (uint32_t i = 0; i < kNumAges; ++i) {
      rate[i] = (num_reuses_[c][i] + 1) / (wait_[c][i] + 1 / rate_of_all[i]);
      num_reuses_[c][i] *= keep;
      wait_[c][i] *= keep;
    }
    set_worth(rate, worth_[c]);
  }
}

}  // namespace kvplane::blocks
