// The shared memory of a block that attends to a tile of a long sequence's rows.
#pragma once

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/tiles.cuh"

namespace kvplane::cuda {

// The parts, in bytes. The largest values are attended to in parts, each by an item of its own.
template <typename Kv, int kHeadSize>
struct LongTile {
  static constexpr int kTokens = tokens_of_long_tile(kHeadSize);
  static constexpr int kValueSize = kHeadSize <= kDimsOfLongPart ? kHeadSize : kDimsOfLongPart;
  static constexpr int kQueryPitch = kPitch<FactorOf<Kv>, kHeadSize>;
  static constexpr int kQueries = kRowsOfLongTile * kQueryPitch;
  static constexpr int kKeys = kTokens * kPitch<Kv, kHeadSize>;
  static constexpr int kValues = kTokens * kPitch<Kv, kValueSize>;
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = kQueries + kStages * (kKeys + kValues);
  // The end of the first row of queries, where a row is padded. For two integers.
  static constexpr int kPadding = kHeadSize * 2;
  static_assert(kQueryPitch - kPadding >= 8);
  static_assert(kHeadSize > 256 || kSharedBytes <= kSharedBytesOfEveryDevice);
};

}  // namespace kvplane::cuda
