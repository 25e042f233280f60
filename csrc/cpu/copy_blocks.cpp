// Copies of whole blocks: inside a pool, between pools, and to and from the canonical order.

#include <cstring>

#include "kvplane/checks.h"
#include "kvplane/params.h"

namespace kvplane {
namespace {

void check_ids(const PackBlocksParams& p) {
  for (int64_t i = 0; i < p.num_block_ids; ++i) {
    require_in_range(p.block_ids[i], 0, p.num_blocks, [&] { return at("block_ids", i); });
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const int64_t* pair = p.pairs + 2 * i;
    require_in_range(pair[0], 0, p.source_num_blocks, [&] { return at("pairs", i, 0); });
    require_in_range(pair[1], 0, p.destination_num_blocks, [&] { return at("pairs", i, 1); });
  }
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const char* from = p.source + p.pairs[2 * i] * p.source_block_bytes;
    char* to = p.destination + p.pairs[2 * i + 1] * p.destination_block_bytes;
    std::memmove(to, from, static_cast<size_t>(p.copy_bytes));  // A pair may name one block twice.
  }
}

void gather_blocks(const PackBlocksParams& p) {
  check_ids(p);
  for (int64_t i = 0; i < p.num_block_ids; ++i) {
    const char* block = p.pool + p.block_ids[i] * p.block_bytes;
    for (int64_t layer = 0; layer < p.num_layers; ++layer) {
      std::memcpy(p.blocks + (layer * p.num_block_ids + i) * p.page_bytes,
                  block + layer * p.page_bytes, static_cast<size_t>(p.page_bytes));
    }
  }
}

void scatter_blocks(const PackBlocksParams& p) {
  check_ids(p);
  for (int64_t i = 0; i < p.num_block_ids; ++i) {
    char* block = p.pool + p.block_ids[i] * p.block_bytes;
    for (int64_t layer = 0; layer < p.num_layers; ++layer) {
      std::memcpy(block + layer * p.page_bytes,
                  p.blocks + (layer * p.num_block_ids + i) * p.page_bytes,
                  static_cast<size_t>(p.page_bytes));
    }
  }
}

}  // namespace kvplane
