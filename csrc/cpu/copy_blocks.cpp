// Copies of whole blocks: inside a pool, between pools, and to and from the canonical order.

#include <algorithm>
#include <cstring>

#include "kvplane/checks.h"
#include "kvplane/params.h"
#include "row_ops.h"
#include "thread_pool.h"

namespace kvplane {
namespace {

// Fewer bytes in all are likely to be read again from the cache, and do not pay for a thread.
constexpr int64_t kStreamBytes = int64_t{4} << 20;
constexpr int64_t kSliceAlignment = 4096;  // bytes

int64_t align_up(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Copies bytes [begin, end) of the blocks of every pair, in order.
void copy_slices(const CopyBlocksParams& p, int64_t begin, int64_t end, bool stream) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const char* from = p.source + p.pairs[2 * i] * p.source_block_bytes + begin;
    char* to = p.destination + p.pairs[2 * i + 1] * p.destination_block_bytes + begin;
    if (from == to) continue;  // A block may be paired with itself.
    if (stream) {
      row_ops().stream(to, from, end - begin);
    } else {
      std::memcpy(to, from, static_cast<size_t>(end - begin));
    }
  }
}

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
  // Each thread copies a part of every block, since the order of the pairs matters.
  const bool stream = p.num_pairs * p.copy_bytes >= kStreamBytes;
  const int64_t wanted = stream ? p.num_threads : 1;
  const int64_t slice = align_up((p.copy_bytes + wanted - 1) / wanted, kSliceAlignment);
  const int64_t num_slices = (p.copy_bytes + slice - 1) / slice;
  parallel_for(num_slices, static_cast<int>(std::min(wanted, num_slices)), [&](int, int64_t i) {
    copy_slices(p, i * slice, std::min((i + 1) * slice, p.copy_bytes), stream);
  });
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
