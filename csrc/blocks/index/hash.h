// Hashes of prefixes: xxh3-128 (Yann Collet's xxHash) in its canonical form, 16 big-endian bytes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvplane::blocks {

using Hash = std::array<uint8_t, 16>;

// The hash that the first block of each of a root's prefixes is chained to.
Hash root_hash(std::string_view root);

// The hash of a block's tokens (num_bytes of little-endian uint32) after the prefix of `parent`.
// `parent` is passed in registers: mostly it was just stored to memory in halves, and a CPU that
// reads both at once waits until they are in its cache.
Hash chained_hash(Hash parent, const void* tokens, size_t num_bytes);

}  // namespace kvplane::blocks
