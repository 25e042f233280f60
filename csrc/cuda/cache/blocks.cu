// Copies of whole blocks. Ids are passed in the parameters of the launch: they need no copy to the
// device and no memory that has to stay alive, and a graph may contain the launch.

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cuda/device/batch_copies.h"
#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/operations.h"
#include "kvplane/checks.h"

namespace kvplane::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunksOfThread = 4;
constexpr int64_t kBytesOfBlock = int64_t{kThreads} * kChunksOfThread * 16;
constexpr int64_t kMaxParts = 1024;  // into which the bytes of one copy are divided
// The most ids that fit in 4 KiB of parameters, or in the 32764 bytes that drivers allow from
// CUDA 12.1 on.
constexpr int kIdsOfLaunch = 224;
constexpr int kIdsOfLargeLaunch = 2016;

// The link is idle for about 3 us between two copies by the copy engine. On an H200, whose link
// moves 55 GB/s, pieces of 128 KiB went at 23 to 26 GB/s and those of 2 MiB at 51 to 52, and a
// kernel copied pieces of 64 KiB at 46 to 51. So a kernel copies what is smaller than this.
constexpr int64_t kMinBytesOfEngine = 1 << 20;
// In a batch of copies the host spends less on each, but smaller ones leave the link idle again:
// others measured that from 28 KiB down a kernel is faster (vLLM #57342).
constexpr int64_t kMinBytesOfBatch = 32 << 10;
// Thread blocks that keep the link busy: 2 us of 64 GB/s are 8 times the bytes that one has in
// flight. No more than that, since attention runs beside a swap.
constexpr int64_t kBlocksOfLink = 32;

// A thread copies at once 16 bytes where addresses and sizes allow it, as in most pools; otherwise
// 8, otherwise 1.
struct alignas(16) Chunk16 {
  uint32_t words[4];
};
struct alignas(8) Chunk8 {
  uint32_t words[2];
};

struct Pair {
  int64_t from, to;
};

template <int kIds>
struct Pairs {
  int32_t count;
  Pair pair[kIds];
};

template <int kIds>
struct Ids {
  int64_t block[kIds];
  int64_t index[kIds];  // of the block in the canonical order
};

// A thread block's share of a copy. A thread loads several chunks before it stores the first, so
// that enough bytes are in flight.
template <typename Chunk>
__device__ void copy_part(char* to, const char* from, int64_t bytes) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const Chunk* source = reinterpret_cast<const Chunk*>(from);
  Chunk* destination = reinterpret_cast<Chunk*>(to);
  const int64_t num_chunks = bytes / static_cast<int64_t>(sizeof(Chunk));
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

template <typename Chunk, int kIds>
__global__ void copy_pairs(CopyBlocksParams p, Pairs<kIds> pairs) {
  for (int32_t i = static_cast<int32_t>(blockIdx.y); i < pairs.count;
       i += static_cast<int32_t>(gridDim.y)) {
    copy_part<Chunk>(p.destination + pairs.pair[i].to * p.destination_block_bytes,
                     p.source + pairs.pair[i].from * p.source_block_bytes, p.copy_bytes);
  }
}

template <bool kIntoPool, typename Chunk, int kIds>
__global__ void copy_pages(PackBlocksParams p, Ids<kIds> ids) {
  char* pool = p.pool + ids.block[blockIdx.y] * p.block_bytes;
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    char* page = pool + layer * p.page_bytes;
    char* canonical = p.blocks + (layer * p.num_block_ids + ids.index[blockIdx.y]) * p.page_bytes;
    copy_part<Chunk>(kIntoPool ? page : canonical, kIntoPool ? canonical : page, p.page_bytes);
  }
}

int64_t parts_of(int64_t bytes) { return std::min(div_ceil(bytes, kBytesOfBlock), kMaxParts); }

// Calls `run` with a chunk that all these addresses, strides and sizes are multiples of.
template <typename Run>
void with_chunk(std::initializer_list<int64_t> numbers, const Run& run) {
  int64_t bits = 0;
  for (const int64_t number : numbers) bits |= number;
  if (bits % 16 == 0) return run(Chunk16{});
  if (bits % 8 == 0) return run(Chunk8{});
  return run(char{});
}

// Calls `run` for parts of `num_ids` ids, with the size of the parameters for each: the large one
// where it saves launches.
template <typename Run>
void in_launches(size_t num_ids, const Run& run) {
  size_t first = 0;
  while (num_ids - first > kIdsOfLaunch && allows_large_parameters()) {
    const size_t count = std::min<size_t>(kIdsOfLargeLaunch, num_ids - first);
    run(std::integral_constant<int, kIdsOfLargeLaunch>{}, first, count);
    first += count;
  }
  while (first < num_ids) {
    const size_t count = std::min<size_t>(kIdsOfLaunch, num_ids - first);
    run(std::integral_constant<int, kIdsOfLaunch>{}, first, count);
    first += count;
  }
}

int64_t number_of(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
}

void check_pairs(const CopyBlocksParams& p) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    require_in_range(p.pairs[2 * i], 0, p.source_num_blocks, [&] { return at("pairs", i, 0); });
    require_in_range(p.pairs[2 * i + 1], 0, p.destination_num_blocks,
                     [&] { return at("pairs", i, 1); });
  }
}

// Divides pairs into waves: no pair touches a block that another pair of its wave writes, and a
// pair comes after those that it depends on. If no pair depends on another, as with copies before a
// write, there is one wave.
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
    Uses& to = uses[pair.to];  // References into the map stay valid.
    const size_t wave = std::max(from.after_write, to.after_read);
    from.after_read = std::max(from.after_read, wave + 1);
    to.after_write = to.after_read = wave + 1;
    if (waves.size() <= wave) waves.emplace_back();
    waves[wave].push_back(pair);
  }
  return waves;
}

// Copies pairs of which none writes what another reads or writes, in as many launches as they need.
// max_blocks: thread blocks at once; 0: as many as there is work for.
void launch_pairs(const CopyBlocksParams& p, const std::vector<Pair>& all, int64_t max_blocks,
                  const Context& context) {
  const auto run = [&](auto chunk) {
    in_launches(all.size(), [&](auto num_ids, size_t first, size_t count) {
      Pairs<num_ids> pairs;
      pairs.count = static_cast<int32_t>(count);
      std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(first), count, pairs.pair);
      Grid grid = {parts_of(p.copy_bytes), pairs.count};
      if (max_blocks > 0) {
        grid.x = std::min(grid.x, max_blocks);
        grid.y = std::min(grid.y, div_ceil(max_blocks, grid.x));
      }
      launch<&copy_pairs<decltype(chunk), num_ids>>(grid, kThreads, 0, context.stream, p, pairs);
    });
  };
  with_chunk({number_of(p.source), number_of(p.destination), p.source_block_bytes,
              p.destination_block_bytes, p.copy_bytes},
             run);
}

// Between pools that do not overlap, only the last pair into each block counts. Returns those,
// sorted by destination, so that neighbours are side by side.
std::vector<Pair> last_pairs_of(const CopyBlocksParams& p) {
  std::vector<Pair> pairs;
  pairs.reserve(static_cast<size_t>(p.num_pairs));
  for (int64_t i = 0; i < p.num_pairs; ++i) pairs.push_back({p.pairs[2 * i], p.pairs[2 * i + 1]});
  const auto before = [](const Pair& a, const Pair& b) { return a.to < b.to; };
  if (!std::is_sorted(pairs.begin(), pairs.end(), before)) {
    std::stable_sort(pairs.begin(), pairs.end(), before);
  }
  size_t count = 0;
  for (const Pair& pair : pairs) {
    if (count > 0 && pairs[count - 1].to == pair.to) --count;
    pairs[count++] = pair;
  }
  pairs.resize(count);
  return pairs;
}

bool overlap(const CopyBlocksParams& p) {
  const auto end = [&](const char* data, int64_t num_blocks, int64_t block_bytes) {
    return data + (num_blocks - 1) * block_bytes + p.copy_bytes;
  };
  return p.source < end(p.destination, p.destination_num_blocks, p.destination_block_bytes) &&
         p.destination < end(p.source, p.source_num_blocks, p.source_block_bytes);
}

// Returns the copies with addresses that a kernel can use; none if it cannot reach the memory.
std::optional<CopyBlocksParams> on_device(CopyBlocksParams p) {
  const auto mapped = [&](const char* data, int64_t num_blocks, int64_t block_bytes) {
    return static_cast<char*>(
        device_address(data, static_cast<size_t>((num_blocks - 1) * block_bytes + p.copy_bytes)));
  };
  p.source = mapped(p.source, p.source_num_blocks, p.source_block_bytes);
  p.destination = mapped(p.destination, p.destination_num_blocks, p.destination_block_bytes);
  if (p.source == nullptr || p.destination == nullptr) return std::nullopt;
  return p;
}

template <bool kIntoPool>
void pack(const PackBlocksParams& p, const Context& context) {
  for (int64_t i = 0; i < p.num_block_ids; ++i) {
    require_in_range(p.block_ids[i], 0, p.num_blocks, [&] { return at("block_ids", i); });
  }
  if (p.num_layers == 0 || p.page_bytes == 0) return;
  // Into the pool, only the last of equal ids counts; the others are left out.
  std::unordered_set<int64_t> written;
  std::vector<int64_t> indices;
  for (int64_t i = p.num_block_ids - 1; i >= 0; --i) {
    if (!kIntoPool || written.insert(p.block_ids[i]).second) indices.push_back(i);
  }
  const auto run = [&](auto chunk) {
    in_launches(indices.size(), [&](auto num_ids, size_t first, size_t count) {
      Ids<num_ids> ids;
      for (size_t i = 0; i < count; ++i) {
        ids.index[i] = indices[first + i];
        ids.block[i] = p.block_ids[ids.index[i]];
      }
      const Grid grid = {parts_of(p.page_bytes), static_cast<int64_t>(count)};
      launch<&copy_pages<kIntoPool, decltype(chunk), num_ids>>(grid, kThreads, 0, context.stream, p,
                                                               ids);
    });
  };
  with_chunk({number_of(p.pool), number_of(p.blocks), p.block_bytes, p.page_bytes}, run);
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p, const Context& context) {
  check_pairs(p);
  if (p.copy_bytes == 0) return;
  for (const std::vector<Pair>& wave : waves_of(p)) launch_pairs(p, wave, 0, context);
}

namespace {

// In order, by the copy engines: pools that overlap.
void swap_in_order(const CopyBlocksParams& p, const Context& context) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const char* from = p.source + p.pairs[2 * i] * p.source_block_bytes;
    char* to = p.destination + p.pairs[2 * i + 1] * p.destination_block_bytes;
    if (from == to) continue;  // CUDA does not define a copy onto itself.
    const size_t bytes = static_cast<size_t>(p.copy_bytes);
    copy_rows(to, bytes, from, bytes, bytes, 1, context.stream);
  }
}

// Copies of neighbours by the copy engines, queued when the last one has been added.
class EngineCopies {
 public:
  // is_pinned: the memory of the host. The driver takes no other in a batch.
  EngineCopies(const CopyBlocksParams& p, bool is_pinned, uintptr_t stream)
      : p_(p),
        stream_(stream),
        in_batch_(is_pinned && has_batch_copies(stream)),
        runs_are_whole_(p.copy_bytes == p.source_block_bytes &&
                        p.copy_bytes == p.destination_block_bytes) {}

  // Whether a kernel would be faster.
  bool is_small(int64_t num_blocks) const {
    const int64_t bytes = p_.copy_bytes * (runs_are_whole_ ? num_blocks : 1);
    return bytes < (in_batch_ ? kMinBytesOfBatch : kMinBytesOfEngine);
  }

  void add(const Pair& first, int64_t num_blocks) {
    char* to = p_.destination + first.to * p_.destination_block_bytes;
    const char* from = p_.source + first.from * p_.source_block_bytes;
    const size_t bytes = static_cast<size_t>(p_.copy_bytes);
    if (!in_batch_) {
      copy_rows(to, static_cast<size_t>(p_.destination_block_bytes), from,
                static_cast<size_t>(p_.source_block_bytes), bytes, static_cast<size_t>(num_blocks),
                stream_);
    } else if (runs_are_whole_) {
      batch_.add(to, from, bytes * static_cast<size_t>(num_blocks));
    } else {
      for (int64_t i = 0; i < num_blocks; ++i) {
        batch_.add(to + i * p_.destination_block_bytes, from + i * p_.source_block_bytes, bytes);
      }
    }
  }

  void finish() {
    if (in_batch_) copy_batch(batch_, stream_);
  }

 private:
  const CopyBlocksParams& p_;
  const uintptr_t stream_;
  const bool in_batch_;
  const bool runs_are_whole_;
  BatchCopies batch_;
};

}  // namespace

void swap_blocks(const CopyBlocksParams& p, const Context& context) {
  check_pairs(p);
  if (p.copy_bytes == 0 || p.num_pairs == 0) return;
  if (overlap(p)) return swap_in_order(p, context);
  // Small runs are left for the kernel, if it can reach the memory.
  const std::optional<CopyBlocksParams> reachable = on_device(p);
  EngineCopies engine(p, reachable.has_value(), context.stream);
  const std::vector<Pair> pairs = last_pairs_of(p);
  std::vector<Pair> small;
  for (size_t i = 0, end; i < pairs.size(); i = end) {
    end = i + 1;
    while (end < pairs.size() && pairs[end].to == pairs[end - 1].to + 1 &&
           pairs[end].from == pairs[end - 1].from + 1) {
      ++end;
    }
    const int64_t num_blocks = static_cast<int64_t>(end - i);
    if (reachable && engine.is_small(num_blocks)) {
      small.insert(small.end(), pairs.begin() + static_cast<std::ptrdiff_t>(i),
                   pairs.begin() + static_cast<std::ptrdiff_t>(end));
    } else {
      engine.add(pairs[i], num_blocks);
    }
  }
  engine.finish();
  if (!small.empty()) launch_pairs(*reachable, small, kBlocksOfLink, context);
}

void gather_blocks(const PackBlocksParams& p, const Context& context) { pack<false>(p, context); }

void scatter_blocks(const PackBlocksParams& p, const Context& context) { pack<true>(p, context); }

int device_count() { return num_devices(); }

}  // namespace kvplane::cuda
