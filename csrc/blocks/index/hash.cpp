#include "index/hash.h"

#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(XXH_VERSION_NUMBER >= 800, "xxh3 has its final form since version 0.8.0");

namespace kvplane::blocks {
namespace {

constexpr std::string_view kRootPrefix("kvplane.v1.tenant\0", 18);

// The hash of two parts as if they were one. Short inputs are hashed at once: setting up xxHash's
// streams costs more than hashing a block of 16 tokens.
[[gnu::always_inline]] inline Hash hash_of(const void* first, size_t first_bytes,
                                           const void* second, size_t second_bytes) {
  constexpr size_t kShortBytes = 2048;
  XXH128_hash_t hash;
  if (first_bytes + second_bytes <= kShortBytes) {
    char joined[kShortBytes];
    std::memcpy(joined, first, first_bytes);
    if (second_bytes > 0) std::memcpy(joined + first_bytes, second, second_bytes);
    hash = XXH3_128bits(joined, first_bytes + second_bytes);
  } else {
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, first, first_bytes);
    XXH3_128bits_update(&state, second, second_bytes);
    hash = XXH3_128bits_digest(&state);
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Hash bytes;
  static_assert(sizeof(canonical.digest) == sizeof(bytes));
  std::memcpy(bytes.data(), canonical.digest, sizeof(bytes));
  return bytes;
}

// Blocks of 16 tokens are the most frequent: for one size the compiler does half of the work.
constexpr size_t kUsualBytes = 64;

[[gnu::flatten, gnu::noinline]] Hash usual_chained_hash(Hash parent, const void* tokens) {
  return hash_of(parent.data(), parent.size(), tokens, kUsualBytes);
}

}  // namespace

Hash root_hash(std::string_view root) {
  return hash_of(kRootPrefix.data(), kRootPrefix.size(), root.data(), root.size());
}

Hash chained_hash(Hash parent, const void* tokens, size_t num_bytes) {
  if (num_bytes == kUsualBytes) return usual_chained_hash(parent, tokens);
  return hash_of(parent.data(), parent.size(), tokens, num_bytes);
}

}  // namespace kvplane::blocks
