// Where to look for chunks of tokens that sequences with one prefix can share: by the entry of the
// index at which a chunk ends. A hint owns no chunk and may be stale: the chunk may have been freed
// or rewritten, or another entry's hint may be in its place. So compare tokens before sharing it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

class ChunkHints {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  // For about so many chunks.
  explicit ChunkHints(uint64_t num_chunks) {
    while (num_chunks > (uint64_t{1} << (64 - shift_)) && shift_ > 40) --shift_;
    chunks_.assign(size_t{1} << (64 - shift_), kNone);
  }

  uint32_t find(EntryId e) const { return chunks_[place_of(e)]; }
  void set(EntryId e, uint32_t chunk) { chunks_[place_of(e)] = chunk; }

 private:
  // The high bits of a product with 2^64 divided by the golden ratio.
  size_t place_of(EntryId e) const { return (e * 0x9E3779B97F4A7C15u) >> shift_; }

  int shift_ = 58;  // 64 places at least
  std::vector<uint32_t> chunks_;
};

}  // namespace kvplane::blocks
