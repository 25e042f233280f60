// Types that all parts of the metadata core share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvplane::blocks {

using Block = uint32_t;
constexpr Block kNoBlock = 0xFFFFFFFF;

// An entry of the prefix index.
using EntryId = uint32_t;
constexpr EntryId kNoEntry = 0xFFFFFFFF;

// Names a session in the pool; used again after its fence.
using SessionHandle = uint32_t;
constexpr SessionHandle kNoSession = 0xFFFFFFFF;
// Where a block concerns several sessions.
constexpr SessionHandle kManySessions = 0xFFFFFFFE;

// As on the wire.
enum Tier : uint8_t { kDevice = 1, kHost = 2 };

// Above every plan's number: of releases that wait for the fence of an ended session.
constexpr int64_t kEnded = std::numeric_limits<int64_t>::max();

template <typename T>
struct Span {
  const T* data = nullptr;
  int64_t size = 0;
  const T& operator[](int64_t i) const { return data[i]; }
};

// Divides a value that is not negative, rounding up.
inline int64_t div_ceil(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0);
}

}  // namespace kvplane::blocks
