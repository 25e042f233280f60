// Arrays that grow without moving what they hold, so that growth never copies a large array.
#pragma once

#include <memory>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

// Rows of `width` elements each. Rows keep their addresses.
template <typename T>
class Slab {
 public:
  explicit Slab(size_t width = 1) : width_(width) {
    while (shift_ > 4 && (sizeof(T) * width << shift_) > kChunkBytes) --shift_;
    mask_ = (1u << shift_) - 1;
  }

  T* row(uint32_t i) { return chunks_[i >> shift_].get() + (i & mask_) * width_; }
  const T* row(uint32_t i) const { return chunks_[i >> shift_].get() + (i & mask_) * width_; }
  T& operator[](uint32_t i) { return *row(i); }
  const T& operator[](uint32_t i) const { return *row(i); }

  // Index of one more row, whose elements are value-initialised.
  uint32_t add() {
    if ((size_ >> shift_) == chunks_.size())
      chunks_.push_back(std::make_unique<T[]>((size_t{1} << shift_) * width_));
    return size_++;
  }

  uint32_t size() const { return size_; }
  size_t num_bytes() const { return (chunks_.size() << shift_) * width_ * sizeof(T); }

 private:
  static constexpr size_t kChunkBytes = 1 << 17;
  size_t width_;
  uint32_t shift_ = 14;
  uint32_t mask_ = 0;
  uint32_t size_ = 0;
  std::vector<std::unique_ptr<T[]>> chunks_;
};

}  // namespace kvplane::blocks
