// Arrays that grow without moving their elements, so that growth never copies a large array.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

// Rows of `width` elements each. Rows keep their addresses. A width that is known here, if not 0,
// makes a row quicker to find. The first row begins with a line of the cache, if elements may.
template <typename T, size_t kWidth = 1>
class Slab {
 public:
  Slab() = default;
  explicit Slab(size_t width) : width_(width) {}

  T* row(uint32_t i) { return rows_[i >> kShift] + (i & kMask) * width(); }
  const T* row(uint32_t i) const { return rows_[i >> kShift] + (i & kMask) * width(); }
  T& operator[](uint32_t i) { return *row(i); }
  const T& operator[](uint32_t i) const { return *row(i); }

  // Index of one more row, whose elements are value-initialised.
  uint32_t add() {
    if ((size_ >> kShift) == rows_.size()) add_chunk();
    return size_++;
  }

  // As `add`, or one that was given back, with the elements that it had then.
  uint32_t take() {
    if (free_.empty()) return add();
    const uint32_t i = free_.back();
    free_.pop_back();
    return i;
  }
  void give_back(uint32_t i) { free_.push_back(i); }

  uint32_t size() const { return size_; }
  uint32_t num_taken() const { return size_ - static_cast<uint32_t>(free_.size()); }
  size_t num_bytes() const { return (rows_.size() << kShift) * width() * sizeof(T); }

 private:
  static constexpr size_t kLineBytes = 64;
  // Chunks of some 128 KiB, of rows of 64 bytes where their width is not known here.
  static constexpr uint32_t shift_of(size_t row_bytes) {
    uint32_t shift = 14;
    while (shift > 4 && (row_bytes << shift) > (size_t{1} << 17)) --shift;
    return shift;
  }
  static constexpr uint32_t kShift = shift_of(kWidth ? kWidth * sizeof(T) : 64);
  static constexpr uint32_t kMask = (1u << kShift) - 1;

  void add_chunk() {
    constexpr size_t num_spare = kLineBytes % sizeof(T) ? 0 : kLineBytes / sizeof(T) - 1;
    chunks_.push_back(std::make_unique<T[]>((size_t{1} << kShift) * width() + num_spare));
    T* const elements = chunks_.back().get();
    const size_t num_over = reinterpret_cast<uintptr_t>(elements) % kLineBytes / sizeof(T);
    rows_.push_back(elements + (num_spare && num_over ? num_spare + 1 - num_over : 0));
  }

  size_t width() const { return kWidth ? kWidth : width_; }

  size_t width_ = kWidth;
  uint32_t size_ = 0;
  std::vector<T*> rows_;  // the first of each chunk
  std::vector<std::unique_ptr<T[]>> chunks_;
  std::vector<uint32_t> free_;
};

}  // namespace kvplane::blocks
