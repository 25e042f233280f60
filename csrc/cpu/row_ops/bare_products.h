// A bare loop of fused products and sums, for measurements: the upper bound of the arithmetic
// units. For files of an instruction set, after row_ops_stored.h.
#pragma once

#include "row_ops_stored.h"

namespace kvplane {
namespace {

constexpr int kChains = 12;  // sums that do not wait for one another: more than the units have

// Computes kChains times num_rounds vectors of add(sum). Returns something of all sums.
template <typename Add>
KVPLANE_INLINE float add_in_chains(int64_t num_rounds, const Add& add) {
  Vector sums[kChains];
  KVPLANE_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = Vector{} + static_cast<float>(i);
  for (int64_t n = 0; n < num_rounds; ++n) {
    KVPLANE_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = hold(add(sums[i]));
  }
  Vector all = {};
  KVPLANE_UNROLL for (int i = 0; i < kChains; ++i) all += sums[i];
  return max_of(all);
}

float fused_products(int64_t num_rounds) {
  const Vector a = hold(Vector{} + 1.0f), b = hold(Vector{} + 1e-6f);
  return add_in_chains(num_rounds,
                       [&](Vector sum) __attribute__((always_inline)) { return fused(a, b, sum); });
}

}  // namespace
}  // namespace kvplane
