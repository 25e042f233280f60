// Runs the CUDA kernels on the emulator without Python, for the sanitizers and for planted faults.
//
//   attention_check SEED    exits with 0 when caching and attention give the right answers, else
//                           with 1, saying what went wrong
//
// Every array has exactly the size it needs, unused slots hold NaN, and unused table entries -1.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "cuda/device/ptx.cuh"
#include "cuda/operations.h"
#include "emulator.h"

namespace {

using namespace kvplane;
using namespace kvplane::cuda;

struct Sizes {
  Dtype dtype, pages_dtype;  // 8-bit pages have a scale for each head
  int64_t num_heads, num_kv_heads, head_size, block_size, window;
  std::vector<int64_t> query_lens, context_lens;
  int64_t shift = 0;  // elements by which tensors miss the start of what was allocated
  // One key takes nearly all of the weight: 2^-26 is left for each of the others.
  bool has_small_weights = false;
  bool has_options = false;  // a soft cap and sinks
  int64_t num_shared = 0;  // leading blocks that sequences have in common, or as many as they have
  bool has_mask = false;   // of blocks of keys
};

// Memory as a device gives it: aligned to 256 bytes, and of the size asked for behind `shift`
// bytes.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes, size_t shift = 0)
      : start_(static_cast<char*>(operator new(shift + bytes, kAlignment))), shift_(shift) {
    for (size_t i = 0; i < shift + bytes; ++i) start_[i] = static_cast<char>(0xFF);
  }
  ~DeviceMemory() { operator delete(start_, kAlignment); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return start_ + shift_; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  char* start_;
  size_t shift_;
};

// A number as pages of 8 bits store it.
double rounded(Dtype dtype, float number) {
  return dtype == Dtype::kFloat8E4M3 ? e4m3_to_float(float_to_e4m3(number))
                                     : e5m2_to_float(float_to_e5m2(number));
}

double number_at(Dtype dtype, const void* data, int64_t i) {
  switch (dtype) {
    case Dtype::kFloat32:
      return static_cast<const float*>(data)[i];
    case Dtype::kFloat16:
      return fp16_to_float(static_cast<const uint16_t*>(data)[i]);
    default:
      return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
  }
}

class Check {
 public:
  Check(const Sizes& sizes, unsigned seed) : s_(sizes), rng_(seed), has_plan_(seed % 2 == 1) {
    lay_out();
    const int64_t context = static_cast<int64_t>(slots_.size());
    for (int64_t h = 0; h < s_.num_kv_heads; ++h) {
      key_scales_.push_back(0.01f * static_cast<float>(h + 1));
      value_scales_.push_back(0.05f / static_cast<float>(h + 1));
    }
    for (int64_t h = 0; h < s_.num_heads; ++h) sinks_.push_back(static_cast<float>(h % 3) - 1.5f);
    for (size_t s = 0; s < s_.context_lens.size(); ++s) {
      for (int64_t i = 0; i < s_.num_heads * kMaskPeriod; ++i) {
        mask_.push_back(is_remote(s, i / kMaskPeriod, i % kMaskPeriod));
      }
    }
    mask_.shrink_to_fit();
    query_ = numbers(num_tokens_ * s_.num_heads * s_.head_size);
    key_ = numbers(context * s_.num_kv_heads * s_.head_size);
    value_ = numbers(context * s_.num_kv_heads * s_.head_size);
    if (s_.has_small_weights) make_small_weights();
    share(*key_);
    share(*value_);
    pages_ =
        memory(s_.pages_dtype, num_blocks_ * 2 * s_.num_kv_heads * s_.block_size * s_.head_size);
  }

  bool is_right() {
    int32_t faults = 0;
    run_caching(&faults);
    const auto out = memory(s_.dtype, num_tokens_ * s_.num_heads * s_.head_size);
    std::vector<float> lse(static_cast<size_t>(num_tokens_ * s_.num_heads));
    run_attention(out->data(), lse.data(), &faults);
    if (faults != 0) {
      std::printf("faults: %d\n", faults);
      return false;
    }
    return compare(out->data(), lse);
  }

 private:
  static constexpr int64_t kSplit = 64;
  static constexpr float kCap = 0.7f;
  static constexpr int64_t kMaskTokens = 32, kMaskPeriod = 3;

  // Whether a head of a sequence sees a block from everywhere.
  static bool is_remote(size_t sequence, int64_t head, int64_t block) {
    return block % kMaskPeriod == (static_cast<int64_t>(sequence) + head) % kMaskPeriod;
  }

  void lay_out() {
    std::vector<int64_t> blocks_of;
    for (const int64_t length : s_.context_lens) {
      blocks_of.push_back((length + s_.block_size - 1) / s_.block_size);
      max_blocks_ = std::max(max_blocks_, blocks_of.back());
      num_blocks_ += blocks_of.back() + 1;
    }
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), rng_);
    size_t next = 0;
    for (size_t s = 0; s < s_.context_lens.size(); ++s) {
      std::vector<int32_t> row(static_cast<size_t>(max_blocks_), -1);
      for (int64_t b = 0; b < blocks_of[s]; ++b) row[static_cast<size_t>(b)] = ids[next++];
      const int64_t num_shared = shared_blocks_of(s);
      std::copy_n(tables_.begin(), num_shared, row.begin());
      for (int64_t i = 0; i < s_.context_lens[s]; ++i) {
        const int64_t block = i / s_.block_size;
        const int64_t first = row[static_cast<size_t>(block)] * s_.block_size;
        slots_.push_back(block < num_shared ? -1 : first + i % s_.block_size);
      }
      tables_.insert(tables_.end(), row.begin(), row.end());
      num_tokens_ += s_.query_lens[s];
      query_starts_.push_back(num_tokens_);
    }
    // A vector may own more than it holds: AddressSanitizer must see the end.
    tables_.shrink_to_fit();
  }

  // The leading blocks that a sequence has in common with the first one, which writes them.
  int64_t shared_blocks_of(size_t s) const {
    const int64_t full = s_.context_lens[0] / s_.block_size;
    return s == 0 ? 0 : std::min({s_.num_shared, full, s_.context_lens[s] / s_.block_size});
  }

  // Tokens in blocks of the first sequence have its keys, or values.
  void share(const DeviceMemory& numbers) const {
    const size_t of_token =
        static_cast<size_t>(s_.num_kv_heads * s_.head_size * dtype_bytes(s_.dtype));
    size_t first_key = 0;
    for (size_t s = 0; s < s_.context_lens.size(); ++s) {
      const size_t tokens = static_cast<size_t>(shared_blocks_of(s) * s_.block_size);
      std::memmove(numbers.data() + first_key * of_token, numbers.data(), tokens * of_token);
      first_key += static_cast<size_t>(s_.context_lens[s]);
    }
  }

  std::unique_ptr<DeviceMemory> memory(Dtype dtype, int64_t count) const {
    return std::make_unique<DeviceMemory>(static_cast<size_t>(count * dtype_bytes(dtype)),
                                          static_cast<size_t>(s_.shift * dtype_bytes(dtype)));
  }

  std::unique_ptr<DeviceMemory> numbers(int64_t count) {
    std::normal_distribution<float> normal;
    auto result = memory(s_.dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      const float number = normal(rng_);
      if (s_.dtype == Dtype::kFloat32) {
        reinterpret_cast<float*>(result->data())[i] = number;
      } else {
        reinterpret_cast<uint16_t*>(result->data())[i] =
            s_.dtype == Dtype::kFloat16 ? float_to_fp16(number) : float_to_bf16(number);
      }
    }
    return result;
  }

  // All queries are 1; keys are 0 and values large, but for the first key of each sequence.
  void make_small_weights() {
    const auto fill = [&](const DeviceMemory& numbers, int64_t begin, int64_t end, float number) {
      for (int64_t i = begin; i < end; ++i) {
        reinterpret_cast<uint16_t*>(numbers.data())[i] = float_to_fp16(number);
      }
    };
    const int64_t of_token = s_.num_kv_heads * s_.head_size;
    const float score = 18.0f;
    fill(*query_, 0, num_tokens_ * s_.num_heads * s_.head_size, 1.0f);
    fill(*key_, 0, static_cast<int64_t>(slots_.size()) * of_token, 0.0f);
    fill(*value_, 0, static_cast<int64_t>(slots_.size()) * of_token, 60000.0f);
    int64_t first = 0;
    for (const int64_t length : s_.context_lens) {
      fill(*key_, first * of_token, (first + 1) * of_token,
           score / std::sqrt(static_cast<float>(s_.head_size)));
      fill(*value_, first * of_token, (first + 1) * of_token, 0.0f);
      first += length;
    }
  }

  PagesParams pages() const {
    const int64_t token = s_.head_size, head = token * s_.block_size, kv = head * s_.num_kv_heads;
    PagesParams p = {};
    p.data = pages_->data();
    p.dtype = s_.pages_dtype;
    p.num_blocks = num_blocks_;
    p.num_kv_heads = s_.num_kv_heads;
    p.block_size = s_.block_size;
    p.head_size = s_.head_size;
    p.value_head_size = s_.head_size;
    p.block_stride = 2 * kv;
    p.kv_stride = kv;
    p.head_stride = p.value_head_stride = head;
    p.token_stride = p.value_token_stride = token;
    if (is_8_bit(s_.pages_dtype)) {
      p.key_scales = key_scales_.data();
      p.value_scales = value_scales_.data();
      p.key_scale_stride = p.value_scale_stride = 1;
    }
    return p;
  }

  void run_caching(int32_t* faults) {
    ReshapeAndCacheParams p = {};
    p.key = key_->data();
    p.value = value_->data();
    p.slots = slots_.data();
    p.pages = pages();
    p.key_dtype = p.value_dtype = s_.dtype;
    p.num_tokens = static_cast<int64_t>(slots_.size());
    p.key_token_stride = p.value_token_stride = s_.num_kv_heads * s_.head_size;
    p.key_head_stride = p.value_head_stride = s_.head_size;
    reshape_and_cache(p, {0, faults});
  }

  void run_attention(void* out, float* lse, int32_t* faults) {
    PagedAttentionParams p = {};
    p.query = query_->data();
    p.out = out;
    p.lse = lse;
    p.block_tables = tables_.data();
    p.query_starts = query_starts_.data();
    p.context_lens = s_.context_lens.data();
    p.pages = pages();
    p.query_dtype = s_.dtype;
    p.num_tokens = num_tokens_;
    p.num_heads = s_.num_heads;
    p.num_sequences = static_cast<int64_t>(s_.context_lens.size());
    p.max_blocks = max_blocks_;
    p.query_token_stride = s_.num_heads * s_.head_size;
    p.query_head_stride = s_.head_size;
    p.share_reads = true;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s_.head_size));
    p.sliding_window_tokens = s_.window;
    if (s_.has_mask) {
      p.blocks = {mask_.data(), s_.num_heads * kMaskPeriod, kMaskPeriod, kMaskTokens, 1};
    }
    if (s_.has_options) {
      p.logit_soft_cap = kCap;
      p.sinks = sinks_.data();
    }
    // Exactly as large as the lengths need.
    std::vector<int64_t> counts(s_.context_lens.size());
    count_partials(p, kSplit, query_starts_.data(), s_.context_lens.data(), counts.data());
    const int64_t needed = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int64_t bytes = attention_workspace_bytes(p, needed);
    const DeviceMemory workspace(static_cast<size_t>(bytes));
    if (needed > 0) refuse_less(p, attention_workspace_bytes(p, 0));
    if (has_plan_) {
      attend_by_plan(p, workspace.data(), bytes, needed, faults);
    } else {
      paged_attention(p, {0, 0, kSplit, workspace.data(), bytes}, {0, faults});
      emulator::finish();
    }
  }

  int64_t out_bytes() const {
    return num_tokens_ * s_.num_heads * s_.head_size * dtype_bytes(s_.dtype);
  }

  // As two layers do: the second call finds what the first one left in the workspace.
  void attend_by_plan(const PagedAttentionParams& p, void* workspace, int64_t bytes,
                      int64_t num_partials, int32_t* faults) {
    const DeviceMemory memory(static_cast<size_t>(attention_plan_bytes(p.num_sequences)));
    const cuda::AttentionPlan plan =
        plan_attention(p, {0, 0, kSplit, nullptr, 0}, num_partials, memory.data(), {0, faults});
    for (int layer = 0; layer < 2; ++layer) {
      emulator::finish();
      std::memset(p.out, 0xFF, static_cast<size_t>(out_bytes()));
      paged_attention(p, {0, 0, kSplit, workspace, bytes, &plan}, {0, faults});
    }
    emulator::finish();
  }

  // Without room for its partial results a batch is reported, and nothing is written past the end.
  void refuse_less(const PagedAttentionParams& p, int64_t bytes) {
    int32_t faults = 0;
    const DeviceMemory workspace(static_cast<size_t>(bytes));
    paged_attention(p, {0, 0, kSplit, workspace.data(), bytes}, {0, &faults});
    emulator::finish();
    if (faults != kBadWorkspace) throw std::runtime_error("a workspace too small is not reported");
  }

  bool compare(const void* out, const std::vector<float>& lse) const {
    const double tolerance = s_.dtype == Dtype::kFloat32 ? 1e-5 : 0.02;
    int64_t first_key = 0;
    for (size_t s = 0; s < s_.context_lens.size(); ++s) {
      for (int64_t i = 0; i < s_.query_lens[s]; ++i) {
        for (int64_t h = 0; h < s_.num_heads; ++h) {
          const int64_t row = (query_starts_[s] + i) * s_.num_heads + h;
          const int64_t position = s_.context_lens[s] - s_.query_lens[s] + i;
          std::vector<double> expected;
          const double expected_lse = attend(s, row, h, first_key, position, &expected);
          for (int64_t d = 0; d < s_.head_size; ++d) {
            const double actual = number_at(s_.dtype, out, row * s_.head_size + d);
            if (std::abs(actual - expected[static_cast<size_t>(d)]) <= tolerance) continue;
            std::printf("sequence %zu token %ld head %ld dim %ld: %g, should be %g\n", s, i, h, d,
                        actual, expected[static_cast<size_t>(d)]);
            return false;
          }
          const double actual_lse = lse[static_cast<size_t>(row)];
          if (std::abs(actual_lse - expected_lse) <= 1e-4) continue;
          std::printf("sequence %zu token %ld head %ld: lse %g, should be %g\n", s, i, h,
                      actual_lse, expected_lse);
          return false;
        }
      }
      first_key += s_.context_lens[s];
    }
    return true;
  }

  // A number of a key or a value, as the pages hold it.
  double cached(const DeviceMemory& numbers, int64_t i, float scale) const {
    const double number = number_at(s_.dtype, numbers.data(), i);
    if (!is_8_bit(s_.pages_dtype)) return number;
    return rounded(s_.pages_dtype, static_cast<float>(number) / scale) * scale;
  }

  // In double: the output into `out`, the logarithm of the sum as the result.
  double attend(size_t sequence, int64_t row, int64_t head, int64_t first_key, int64_t position,
                std::vector<double>* out) const {
    const int64_t kv_head = head / (s_.num_heads / s_.num_kv_heads);
    const int64_t begin = s_.window > 0 ? std::max<int64_t>(0, position + 1 - s_.window) : 0;
    std::vector<double> scores;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;
    const auto key_row = [&](int64_t k) {
      return ((first_key + k) * s_.num_kv_heads + kv_head) * s_.head_size;
    };
    for (int64_t k = begin; k <= position; ++k) {
      double score = 0;
      for (int64_t d = 0; d < s_.head_size; ++d) {
        score += number_at(s_.dtype, query_->data(), row * s_.head_size + d) *
                 cached(*key_, key_row(k) + d, key_scales_[static_cast<size_t>(kv_head)]);
      }
      score /= std::sqrt(static_cast<double>(s_.head_size));
      const int64_t block = k / kMaskTokens;
      const bool is_seen = block == position / kMaskTokens || is_remote(sequence, head, block);
      if (s_.has_mask && !is_seen) score = -std::numeric_limits<double>::infinity();
      scores.push_back(s_.has_options ? kCap * std::tanh(score / kCap) : score);
      largest = std::max(largest, scores.back());
    }
    out->assign(static_cast<size_t>(s_.head_size), 0.0);
    for (int64_t k = begin; k <= position; ++k) {
      const double weight = std::exp(scores[static_cast<size_t>(k - begin)] - largest);
      sum += weight;
      for (int64_t d = 0; d < s_.head_size; ++d) {
        const float scale = value_scales_[static_cast<size_t>(kv_head)];
        (*out)[static_cast<size_t>(d)] += weight * cached(*value_, key_row(k) + d, scale);
      }
    }
    if (s_.has_options) sum += std::exp(sinks_[static_cast<size_t>(head)] - largest);
    for (double& number : *out) number /= sum;
    return largest + std::log(sum);
  }

  const Sizes s_;
  std::mt19937 rng_;
  const bool has_plan_;  // made once for two calls
  int64_t num_tokens_ = 0, num_blocks_ = 0, max_blocks_ = 0;
  std::vector<int32_t> tables_;
  std::vector<float> key_scales_, value_scales_, sinks_;
  std::vector<uint8_t> mask_;  // [num_sequences, num_heads, kMaskPeriod]
  std::vector<int64_t> slots_, query_starts_ = {0};
  std::unique_ptr<DeviceMemory> query_, key_, value_, pages_;
};

constexpr Dtype kBf16 = Dtype::kBFloat16, kFp16 = Dtype::kFloat16, kFp32 = Dtype::kFloat32;
constexpr Dtype kE4m3 = Dtype::kFloat8E4M3, kE5m2 = Dtype::kFloat8E5M2;
const Sizes kSizes[] = {
    {kBf16, kBf16, 4, 1, 40, 16, 0, {40, 3, 1, 1}, {90, 70, 16, 150}},
    {kFp16, kFp16, 2, 2, 64, 5, 30, {1, 33}, {200, 65}},
    {kFp32, kFp32, 2, 1, 24, 8, 0, {1, 20, 2}, {130, 40, 2}},
    {kBf16, kE4m3, 4, 2, 48, 16, 0, {20, 1, 2}, {40, 130, 19}},
    {kFp16, kE5m2, 2, 2, 64, 5, 0, {33, 1}, {35, 20}},
    {kFp16, kE4m3, 2, 2, 24, 8, 0, {1, 3}, {70, 9}},
    {kBf16, kE4m3, 2, 1, 16, 8, 0, {1, 3}, {70, 9}, 1},
    {kFp16, kFp16, 2, 1, 16, 8, 0, {1, 3}, {70, 9}, 4},
    {kFp32, kE5m2, 2, 1, 16, 8, 0, {1, 3}, {70, 9}, 2},
    {kFp16, kFp16, 2, 2, 64, 16, 0, {1, 33}, {200, 200}, 0, true},
    // Long sequences in splits, behind one that has shorter items; tiles of 32 rows with their
    // queries in shared memory.
    {kBf16, kBf16, 2, 1, 16, 16, 0, {33, 1, 40, 70}, {40, 300, 600, 530}},
    {kFp16, kE4m3, 2, 1, 16, 16, 270, {35}, {700}},
    {kBf16, kBf16, 20, 1, 128, 16, 0, {1, 1}, {70, 20}},
    {kBf16, kE5m2, 20, 1, 128, 16, 0, {1}, {70}},
    {kBf16, kBf16, 2, 1, 16, 8, 0, {1, 20, 1}, {100, 30, 9}, 0, false, true},
    {kFp32, kFp32, 2, 1, 16, 8, 0, {1, 1}, {100, 9}, 0, false, true},
    // Decodes that share blocks: all of them, or fewer, and not always as many as a tile has room.
    {kBf16,
     kBf16,
     8,
     2,
     16,
     16,
     0,
     {1, 1, 1, 40, 1, 1},
     {300, 290, 150, 100, 100, 400},
     0,
     false,
     false,
     9},
    {kFp16, kE4m3, 10, 1, 64, 5, 0, {1, 1, 1, 1, 1}, {200, 140, 260, 70, 150}, 0, false, true, 26},
    {kBf16, kBf16, 16, 1, 128, 16, 0, {1, 1, 1}, {70, 150, 140}, 0, false, false, 8},
    // Masks of blocks: short sequences, of up to 32 rows, and long ones.
    {kBf16, kBf16, 8, 1, 16, 16, 0, {1, 3, 20}, {250, 190, 150}, 0, false, false, 0, true},
    {kFp16, kE4m3, 2, 1, 64, 16, 0, {1, 40}, {100, 600}, 0, false, false, 0, true},
    {kFp32, kFp32, 4, 2, 16, 8, 0, {1, 9}, {150, 110}, 0, false, false, 0, true},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[1]));
  emulator::set_seed(seed);
  try {
    for (const Sizes& sizes : kSizes) {
      if (!Check(sizes, seed).is_right()) return 1;
    }
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
  return 0;
}
