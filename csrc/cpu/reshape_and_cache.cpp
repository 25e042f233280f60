// Scatters new keys and values into the slots of one layer's pages.

#include <algorithm>
#include <cstring>

#include "kvplane/checks.h"
#include "kvplane/params.h"
#include "row_ops.h"
#include "scales.h"
#include "thread_pool.h"

namespace kvplane {
namespace {

constexpr int64_t kThreadBytes = int64_t{1} << 18;  // that pay for waking a thread

// Writes one row of a head, converted when the types differ.
void write_row(const void* source, Dtype from, int64_t head_size, float scale, Dtype to,
               void* destination) {
  if (from == to) {
    std::memcpy(destination, source, static_cast<size_t>(head_size * dtype_bytes(to)));
    return;
  }
  float row[kMaxRowSize];
  row_ops().load(source, from, head_size, row);
  if (scale != 1.0f) {
    for (int64_t d = 0; d < head_size; ++d) row[d] = row[d] / scale;
  }
  row_ops().store(row, head_size, to, destination);
}

void write_heads(const ReshapeAndCacheParams& p, int64_t first_head, int64_t end_head) {
  const PagesParams& pages = p.pages;
  const char* key = static_cast<const char*>(p.key);
  const char* value = static_cast<const char*>(p.value);
  char* data = static_cast<char*>(pages.data);
  const int64_t key_bytes = dtype_bytes(p.key_dtype);
  const int64_t value_bytes = dtype_bytes(p.value_dtype);
  const int64_t page_bytes = dtype_bytes(pages.dtype);
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    const int64_t slot = p.slots[i];
    if (slot < 0) continue;
    const int64_t block = slot / pages.block_size * pages.block_stride;
    const int64_t offset = slot % pages.block_size;
    for (int64_t h = first_head; h < end_head; ++h) {
      const int64_t key_row = i * p.key_token_stride + h * p.key_head_stride;
      const int64_t to = block + h * pages.head_stride + offset * pages.token_stride;
      write_row(key + key_row * key_bytes, p.key_dtype, pages.head_size, key_scale(pages, h),
                pages.dtype, data + to * page_bytes);
      if (value == nullptr) continue;
      const int64_t value_row = i * p.value_token_stride + h * p.value_head_stride;
      const int64_t value_to =
          block + pages.kv_stride + h * pages.value_head_stride + offset * pages.value_token_stride;
      write_row(value + value_row * value_bytes, p.value_dtype, pages.value_head_size,
                value_scale(pages, h), pages.dtype, data + value_to * page_bytes);
    }
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p) {
  const PagesParams& pages = p.pages;
  check_scales(pages);
  const int64_t num_slots = pages.num_blocks * pages.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (p.slots[i] >= 0) require_in_range(p.slots[i], 0, num_slots, [&] { return at("slots", i); });
  }

  // Each thread writes some heads of all tokens: of equal slots, the last token has to win.
  const int64_t row_bytes = pages.head_size * dtype_bytes(pages.dtype);
  const bool large = p.num_tokens * pages.num_kv_heads * row_bytes >= kThreadBytes;
  const int64_t wanted = std::min<int64_t>(large ? p.num_threads : 1, pages.num_kv_heads);
  parallel_for(wanted, static_cast<int>(wanted), [&](int, int64_t i) {
    write_heads(p, i * pages.num_kv_heads / wanted, (i + 1) * pages.num_kv_heads / wanted);
  });
}

}  // namespace kvplane
