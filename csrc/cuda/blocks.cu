// Copies of whole blocks. Ids travel in the parameters of the launch: nothing is copied to the
// device for them, nothing has to stay alive, and a graph may hold the launch.

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "kvplane/checks.h"
#include "launch.h"
#include "operations.h"

namespace kvplane::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkBytes = 16;
constexpr int kChunksOfThread = 4;
constexpr int64_t kBytesOfBlock = int64_t{kThreads} * kChunksOfThread * kChunkBytes;
constexpr int64_t kMaxParts = 1024;  // that the bytes of one copy are cut into
constexpr int kIdsOfLaunch = 224;    // parameters are limited to 4 KiB

struct alignas(kChunkBytes) Chunk {
  uint32_t words[4];
};

struct Pair {
  int64_t from, to;
};

struct Pairs {
  Pair pair[kIdsOfLaunch];
};

struct Ids {
  int64_t block[kIdsOfLaunch];
  int64_t index[kIdsOfLaunch];  // of the block in the canonical order
};

// A block of threads' share of a copy. A thread loads several chunks before it stores the first, so
// that enough bytes are on their way.
__device__ void copy_part(char* to, const char* from, int64_t bytes, bool in_chunks) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  if (!in_chunks) {
    for (int64_t i = first; i < bytes; i += step) to[i] = from[i];
    return;
  }
  const Chunk* source = reinterpret_cast<const Chunk*>(from);
  Chunk* destination = reinterpret_cast<Chunk*>(to);
  const int64_t num_chunks = bytes / kChunkBytes;
  for (int64_t i = first; i < num_chunks; i += kChunksOfThread * step) {
    Chunk chunks[kChunksOfThread];
#pragma unroll
    for (int j = 0; j < kChunksOfThread; ++j) {
      if (i + j * step < num_chunks) chunks[j] = source[i + j * step];
    }
#pragma unroll
    for (int j = 0; j < kChunksOfThread; ++j) {
      if (i + j * step < num_chunks) destination[i + j * step] = chunks[j];
    }
  }
}

__global__ void copy_pairs(CopyBlocksParams p, Pairs pairs, bool in_chunks) {
  const Pair pair = pairs.pair[blockIdx.y];
  copy_part(p.destination + pair.to * p.destination_block_bytes,
            p.source + pair.from * p.source_block_bytes, p.copy_bytes, in_chunks);
}

template <bool kIntoPool>
__global__ void copy_pages(PackBlocksParams p, Ids ids, bool in_chunks) {
  char* pool = p.pool + ids.block[blockIdx.y] * p.block_bytes;
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    char* page = pool + layer * p.page_bytes;
    char* canonical = p.blocks + (layer * p.num_block_ids + ids.index[blockIdx.y]) * p.page_bytes;
    copy_part(kIntoPool ? page : canonical, kIntoPool ? canonical : page, p.page_bytes, in_chunks);
  }
}

int64_t parts_of(int64_t bytes) { return std::min(div_ceil(bytes, kBytesOfBlock), kMaxParts); }

bool in_chunks(const void* a, const void* b, int64_t x, int64_t y, int64_t z) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
          static_cast<uintptr_t>(x | y | z)) %
             kChunkBytes ==
         0;
}

void check_pairs(const CopyBlocksParams& p) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    require_in_range(p.pairs[2 * i], 0, p.source_num_blocks, [&] { return at("pairs", i, 0); });
    require_in_range(p.pairs[2 * i + 1], 0, p.destination_num_blocks,
                     [&] { return at("pairs", i, 1); });
  }
}

// Pairs in waves: those of one wave touch no block that another of the wave writes, and come after
// all that they must see. Without such pairs, as on copies before a write, there is one wave.
std::vector<std::vector<Pair>> waves_of(const CopyBlocksParams& p) {
  struct Uses {
    size_t after_write = 0;  // the first wave that may read the block
    size_t after_read = 0;   // the first wave that may write it
  };
  std::unordered_map<int64_t, Uses> uses;
  std::vector<std::vector<Pair>> waves;
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const Pair pair = {p.pairs[2 * i], p.pairs[2 * i + 1]};
    if (pair.from == pair.to) continue;
    Uses& from = uses[pair.from];
    Uses& to = uses[pair.to];  // References into the map stay good.
    const size_t wave = std::max(from.after_write, to.after_read);
    from.after_read = std::max(from.after_read, wave + 1);
    to.after_write = to.after_read = wave + 1;
    if (waves.size() <= wave) waves.emplace_back();
    waves[wave].push_back(pair);
  }
  return waves;
}

template <bool kIntoPool>
void pack(const PackBlocksParams& p, const Context& context) {
  for (int64_t i = 0; i < p.num_block_ids; ++i) {
    require_in_range(p.block_ids[i], 0, p.num_blocks, [&] { return at("block_ids", i); });
  }
  if (p.num_layers == 0 || p.page_bytes == 0) return;
  // Of equal ids the last one stays: into the pool, the others are left out.
  std::unordered_set<int64_t> written;
  std::vector<int64_t> indices;
  for (int64_t i = p.num_block_ids - 1; i >= 0; --i) {
    if (!kIntoPool || written.insert(p.block_ids[i]).second) indices.push_back(i);
  }
  const bool chunks = in_chunks(p.pool, p.blocks, p.block_bytes, p.page_bytes, 0);
  for (size_t first = 0; first < indices.size(); first += kIdsOfLaunch) {
    const size_t count = std::min<size_t>(kIdsOfLaunch, indices.size() - first);
    Ids ids = {};
    for (size_t i = 0; i < count; ++i) {
      ids.index[i] = indices[first + i];
      ids.block[i] = p.block_ids[ids.index[i]];
    }
    const Grid grid = {parts_of(p.page_bytes), static_cast<int64_t>(count)};
    launch(&copy_pages<kIntoPool>, grid, kThreads, 0, context.stream, p, ids, chunks);
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p, const Context& context) {
  check_pairs(p);
  if (p.copy_bytes == 0) return;
  const bool chunks = in_chunks(p.source, p.destination, p.source_block_bytes,
                                p.destination_block_bytes, p.copy_bytes);
  for (const std::vector<Pair>& wave : waves_of(p)) {
    for (size_t first = 0; first < wave.size(); first += kIdsOfLaunch) {
      const size_t count = std::min<size_t>(kIdsOfLaunch, wave.size() - first);
      Pairs pairs = {};
      std::copy_n(wave.begin() + static_cast<std::ptrdiff_t>(first), count, pairs.pair);
      const Grid grid = {parts_of(p.copy_bytes), static_cast<int64_t>(count)};
      launch(&copy_pairs, grid, kThreads, 0, context.stream, p, pairs, chunks);
    }
  }
}

void swap_blocks(const CopyBlocksParams& p, const Context& context) {
  check_pairs(p);
  if (p.copy_bytes == 0) return;
  for (int64_t i = 0, end; i < p.num_pairs; i = end) {
    const int64_t* pairs = p.pairs;
    end = i + 1;
    while (end < p.num_pairs && pairs[2 * end] == pairs[2 * end - 2] + 1 &&
           pairs[2 * end + 1] == pairs[2 * end - 1] + 1) {
      ++end;
    }
    copy_rows(p.destination + pairs[2 * i + 1] * p.destination_block_bytes,
              static_cast<size_t>(p.destination_block_bytes),
              p.source + pairs[2 * i] * p.source_block_bytes,
              static_cast<size_t>(p.source_block_bytes), static_cast<size_t>(p.copy_bytes),
              static_cast<size_t>(end - i), context.stream);
  }
}

void gather_blocks(const PackBlocksParams& p, const Context& context) { pack<false>(p, context); }

void scatter_blocks(const PackBlocksParams& p, const Context& context) { pack<true>(p, context); }

int device_count() { return num_devices(); }

}  // namespace kvplane::cuda
