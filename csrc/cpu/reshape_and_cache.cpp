// Scatters new keys and values into the slots of one layer's pages.

#include <cstring>
#include <vector>

#include "kvplane/checks.h"
#include "kvplane/params.h"
#include "row_ops.h"

namespace kvplane {
namespace {

// One row of a head, converted when the types differ.
void write_row(const void* source, Dtype from, int64_t head_size, Dtype to, void* destination,
               float* scratch) {
  if (from == to) {
    std::memcpy(destination, source, static_cast<size_t>(head_size * dtype_bytes(to)));
    return;
  }
  row_ops().load(source, from, head_size, scratch);
  row_ops().store(scratch, head_size, to, destination);
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p) {
  const PagesParams& pages = p.pages;
  const int64_t num_slots = pages.num_blocks * pages.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (p.slots[i] >= 0) require_in_range(p.slots[i], 0, num_slots, [&] { return at("slots", i); });
  }

  const char* key = static_cast<const char*>(p.key);
  const char* value = static_cast<const char*>(p.value);
  char* data = static_cast<char*>(pages.data);
  const int64_t key_bytes = dtype_bytes(p.key_dtype);
  const int64_t value_bytes = dtype_bytes(p.value_dtype);
  const int64_t page_bytes = dtype_bytes(pages.dtype);
  std::vector<float> scratch(static_cast<size_t>(pages.head_size));
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    const int64_t slot = p.slots[i];
    if (slot < 0) continue;
    const int64_t token =
        slot / pages.block_size * pages.block_stride + slot % pages.block_size * pages.token_stride;
    for (int64_t h = 0; h < pages.num_kv_heads; ++h) {
      const int64_t key_row = i * p.key_token_stride + h * p.key_head_stride;
      const int64_t value_row = i * p.value_token_stride + h * p.value_head_stride;
      char* to = data + (token + h * pages.head_stride) * page_bytes;
      write_row(key + key_row * key_bytes, p.key_dtype, pages.head_size, pages.dtype, to,
                scratch.data());
      write_row(value + value_row * value_bytes, p.value_dtype, pages.head_size, pages.dtype,
                to + pages.kv_stride * page_bytes, scratch.data());
    }
  }
}

}  // namespace kvplane
