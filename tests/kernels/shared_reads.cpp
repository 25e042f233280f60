// Attention of sequences that share blocks: how often tiles are attended to, and that no bit
// depends on it, nor on a bound of memory, which is kept; and that tiles that a mask hides are not
// attended to. Prints what is wrong and exits with 1.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "kvplane/params.h"
#include "row_ops.h"

namespace {

std::atomic<int64_t> num_bytes{0}, most_bytes{0};  // in use, and the most of it
constexpr size_t kHeader = 64;

void* take(size_t size, size_t alignment) {
  const size_t whole = (size + kHeader + alignment - 1) / alignment * alignment;
  char* memory = static_cast<char*>(std::aligned_alloc(alignment, whole));
  if (memory == nullptr) std::abort();
  std::memcpy(memory, &size, sizeof(size));
  const int64_t now = num_bytes += static_cast<int64_t>(size);
  if (now > most_bytes) most_bytes = now;  // roughly, where there are threads
  return memory + kHeader;
}

void give(void* memory) {
  if (memory == nullptr) return;
  char* begin = static_cast<char*>(memory) - kHeader;
  size_t size;
  std::memcpy(&size, begin, sizeof(size));
  num_bytes -= static_cast<int64_t>(size);
  std::free(begin);
}

}  // namespace

void* operator new(size_t size) { return take(size, kHeader); }
void* operator new(size_t size, std::align_val_t) { return take(size, kHeader); }
void operator delete(void* memory) noexcept { give(memory); }
void operator delete(void* memory, size_t) noexcept { give(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { give(memory); }

namespace kvplane {

RowOps row_ops_baseline();

namespace {

std::atomic<int64_t> num_calls{0};  // of `attend`: one for each tile and KV head
std::atomic<int64_t> num_loads{0};  // of keys or values of a tile that are not used in place

const RowOps kBaseline = row_ops_baseline();

RowOps counting_ops() {
  RowOps ops = kBaseline;
  ops.attend = [](const AttendArgs& args) {
    ++num_calls;
    kBaseline.attend(args);
  };
  ops.load_tile = [](const LoadArgs& args) {
    ++num_loads;
    kBaseline.load_tile(args);
  };
  return ops;
}

}  // namespace

const RowOps& row_ops() {
  static const RowOps ops = counting_ops();
  return ops;
}

}  // namespace kvplane

namespace {

using kvplane::BlockMask;
using kvplane::Dtype;
using kvplane::PagedAttentionParams;

constexpr int64_t kKvHeads = 2, kGroup = 4, kHeads = kKvHeads * kGroup;
constexpr int64_t kHeadSize = 16, kBlockSize = 64, kMaxBlocks = 32;
constexpr int64_t kBlocksOfSplit = 512 / kBlockSize, kTilesOfSplit = 16;
constexpr int64_t kBlockElements = 2 * kKvHeads * kBlockSize * kHeadSize;

int num_failures = 0;

struct Sequence {
  int64_t query_len;
  int64_t context_len;
  std::vector<int64_t> blocks;  // that it shares; its other blocks are its own
};

struct Answer {
  std::vector<float> out, lse;
  int64_t num_calls, num_loads;
  int64_t num_bytes;  // of memory that it took
};

class Batch {
 public:
  Batch(const std::vector<Sequence>& sequences, int64_t window, int64_t num_common_blocks)
      : window_(window), num_blocks_(num_common_blocks) {
    for (const Sequence& s : sequences) {
      starts_.push_back(starts_.back() + s.query_len);
      lens_.push_back(s.context_len);
      const int64_t used = (s.context_len + kBlockSize - 1) / kBlockSize;
      for (int64_t b = 0; b < kMaxBlocks; ++b) {
        const bool shared = b < static_cast<int64_t>(s.blocks.size());
        const int64_t own = b < used ? num_blocks_++ : -1;
        tables_.push_back(shared ? s.blocks[static_cast<size_t>(b)] : own);
      }
    }
    // A block that nobody has is full of NaN.
    pool_.resize(static_cast<size_t>(num_blocks_ * kBlockElements), std::nanf(""));
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (const int64_t block : tables_) {
      if (block < 0) continue;
      for (int64_t i = 0; i < kBlockElements; ++i) {
        pool_[static_cast<size_t>(block * kBlockElements + i)] = normal(random);
      }
    }
    query_.resize(static_cast<size_t>(starts_.back() * kHeads * kHeadSize));
    for (float& x : query_) x = normal(random);
  }

  Answer attend(bool share_reads, int num_threads, int64_t max_state_bytes = 1 << 30,
                const BlockMask& mask = {}, int64_t head_size = kHeadSize) const {
    Answer answer;
    answer.out.resize(query_.size());
    answer.lse.resize(static_cast<size_t>(starts_.back() * kHeads));
    PagedAttentionParams p = {};
    p.scale = 0.25f;
    p.sliding_window_tokens = window_;
    p.blocks = mask;
    p.query = query_.data();
    p.out = answer.out.data();
    p.lse = answer.lse.data();
    p.block_tables = tables_.data();
    p.query_starts = starts_.data();
    p.context_lens = lens_.data();
    p.pages.data = const_cast<float*>(pool_.data());
    p.pages.dtype = p.query_dtype = Dtype::kFloat32;
    p.pages.num_blocks = num_blocks_;
    p.pages.num_kv_heads = kKvHeads;
    p.pages.block_size = kBlockSize;
    p.pages.head_size = p.pages.value_head_size = head_size;
    p.pages.block_stride = kBlockElements;
    p.pages.kv_stride = kBlockElements / 2;
    p.pages.head_stride = p.pages.value_head_stride = kBlockSize * kHeadSize;
    p.pages.token_stride = p.pages.value_token_stride = kHeadSize;
    p.wide_block_tables = true;
    p.share_reads = share_reads;
    p.num_tokens = starts_.back();
    p.num_heads = kHeads;
    p.num_sequences = static_cast<int64_t>(lens_.size());
    p.max_blocks = kMaxBlocks;
    p.query_token_stride = kHeads * kHeadSize;
    p.query_head_stride = kHeadSize;
    p.num_threads = num_threads;
    p.max_state_bytes = max_state_bytes;
    kvplane::num_calls = kvplane::num_loads = 0;
    const int64_t before = num_bytes;
    most_bytes = before;
    kvplane::paged_attention(p);
    answer.num_calls = kvplane::num_calls;
    answer.num_loads = kvplane::num_loads;
    answer.num_bytes = most_bytes - before;
    return answer;
  }

 private:
  const int64_t window_;
  int64_t num_blocks_;
  std::vector<int64_t> tables_, starts_ = {0}, lens_;
  std::vector<float> pool_, query_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// `saved`: tiles that are read once less, counted for each KV head and sequence.
void check(const char* name, const std::vector<Sequence>& sequences, int64_t num_common_blocks,
           int64_t saved, int64_t window = 0) {
  const Batch batch(sequences, window, num_common_blocks);
  const Answer apart = batch.attend(false, 1);
  for (const int num_threads : {1, 3, 16}) {
    const Answer shared = batch.attend(true, num_threads);
    const bool same = same_bits(shared.out, apart.out) && same_bits(shared.lse, apart.lse);
    // With so many threads, KV heads go to items of their own, but tiles are read as often.
    if (same && shared.num_calls == apart.num_calls - saved) continue;
    std::printf("%s, %d threads: %s bits, %lld tiles of %lld, should be %lld\n", name, num_threads,
                same ? "the same" : "other", static_cast<long long>(shared.num_calls),
                static_cast<long long>(apart.num_calls),
                static_cast<long long>(apart.num_calls - saved));
    ++num_failures;
  }
}

std::vector<int64_t> blocks(int64_t first, int64_t num) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < num; ++i) ids.push_back(first + i);
  return ids;
}

// Many forks of a long context, and a bound on the memory for their states.
void check_bound() {
  const Batch batch(std::vector<Sequence>(400, {1, 1124, blocks(0, 2 * kBlocksOfSplit)}), 0, 16);
  const Answer apart = batch.attend(false, 1), whole = batch.attend(true, 1);
  constexpr int64_t kOthers = 128 << 10;  // items, and what a thread has
  for (const int64_t most : {1, 100 << 10, 300 << 10}) {
    for (const int num_threads : {1, 3}) {
      const Answer answer = batch.attend(true, num_threads, most);
      const bool same = same_bits(answer.out, apart.out) && same_bits(answer.lse, apart.lse);
      const bool shares = most == 1 || answer.num_calls < apart.num_calls / 2;
      if (same && shares && answer.num_bytes < most + kOthers && whole.num_bytes > 900 << 10)
        continue;
      std::printf(
          "at most %lld bytes, %d threads: %s bits, %lld tiles of %lld, %lld bytes of %lld\n",
          static_cast<long long>(most), num_threads, same ? "the same" : "other",
          static_cast<long long>(answer.num_calls), static_cast<long long>(apart.num_calls),
          static_cast<long long>(answer.num_bytes), static_cast<long long>(whole.num_bytes));
      ++num_failures;
    }
  }
}

// A mask of blocks of 64 tokens, two tiles, in which two are local: tiles that no row sees are not
// read. In every eight blocks the first KV head's queries see one from everywhere, and the second's
// see two; those of a second sequence see none.
void check_mask() {
  constexpr int64_t kRepeated = 8;
  std::vector<uint8_t> seen(2 * kHeads * kRepeated, 0);
  for (int64_t head = 0; head < kHeads; ++head) {
    seen[static_cast<size_t>(head * kRepeated + 3)] = 1;
    if (head >= kGroup) seen[static_cast<size_t>(head * kRepeated + 5)] = 1;
  }
  const BlockMask mask = {seen.data(), kHeads * kRepeated, kRepeated, 64, 2};
  const auto check_tiles = [&](const std::vector<Sequence>& sequences, int64_t num_blocks) {
    const Batch batch(sequences, 0, 0);
    for (const int num_threads : {1, 3}) {
      // Heads of 8 numbers are not used in place: tiles are loaded.
      const Answer answer = batch.attend(true, num_threads, 1 << 30, mask, 8);
      if (answer.num_calls == 2 * num_blocks && answer.num_loads == 4 * num_blocks) continue;
      std::printf("masked, %d threads: %lld tiles and %lld loads, should be %lld and twice that\n",
                  num_threads, static_cast<long long>(answer.num_calls),
                  static_cast<long long>(answer.num_loads), static_cast<long long>(2 * num_blocks));
      ++num_failures;
    }
  };
  check_tiles({{1, 1024, {}}}, (2 + 2) + (4 + 2));
  check_tiles({{1, 2048, {}}}, (4 + 2) + (8 + 2));
  check_tiles({{1, 1024, {}}, {1, 2048, {}}}, (2 + 2) + (4 + 2) + 2 * 2);
}

}  // namespace

int main() {
  const int64_t split = kTilesOfSplit * kKvHeads;  // tiles of one
  const auto prefix = blocks(0, 2 * kBlocksOfSplit);
  std::vector<Sequence> sequences(20, {1, 1124, prefix});
  check("20 decodes, 16 at a time", sequences, 16, 2 * (20 - 2) * split);

  auto other_end = prefix;
  other_end.back() = 16;
  sequences = {{1, 1100, prefix}, {1, 1200, other_end}, {1, 1300, prefix}, {1, 1400, other_end}};
  check("two that part in the last block", sequences, 17, (3 + 2) * split);

  sequences = {{1, 1024, prefix}, {1, 1000, prefix}, {3, 1026, prefix}, {3, 1025, prefix}};
  check("contexts that end in a shared split", sequences, 16, (3 + 2) * split);

  sequences = {{12, 1100, prefix}, {12, 1100, prefix}, {1, 1100, prefix}};
  check("many query tokens", sequences, 16, 0);
  sequences = {{8, 1100, prefix}, {8, 1100, prefix}, {1, 1100, prefix}};
  check("64 rows together", sequences, 16, 2 * split);

  sequences = {{1, 1100, blocks(0, 17)}, {1, 1090, blocks(0, 17)}, {2, 1088, blocks(0, 17)}};
  check("a window that ends in the first split", sequences, 17, 2 * split, 700);

  // Blocks are shared behind others that are not.
  auto late = blocks(17, kBlocksOfSplit);
  late.insert(late.end(), prefix.begin() + kBlocksOfSplit, prefix.end());
  sequences = {{1, 1100, prefix}, {1, 1100, late}};
  check("the second split alone", sequences, 17 + kBlocksOfSplit, split);

  // Nothing is shared; with several threads the last sequences are computed by their splits.
  sequences.assign(20, {1, 1124, {}});
  check("the last ones by splits", sequences, 0, 0);

  check_bound();
  check_mask();
  return num_failures == 0 ? 0 : 1;
}
