// An array that begins as zeros. The kernel gives the pages of a large one as they are written, so
// to make one takes no longer for a million items than for a few.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace kvplane::blocks {

template <typename T>
class Zeros {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Zeros() = default;
  explicit Zeros(size_t size) : items_(static_cast<T*>(std::calloc(size, sizeof(T)))), size_(size) {
    if (size && !items_) throw std::bad_alloc();
  }

  Zeros(Zeros&& other) noexcept { *this = std::move(other); }
  Zeros& operator=(Zeros&& other) noexcept {
    items_ = std::move(other.items_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  size_t size() const { return size_; }
  T& operator[](size_t i) { return items_.get()[i]; }
  const T& operator[](size_t i) const { return items_.get()[i]; }

 private:
  struct Free {
    void operator()(T* items) const { std::free(items); }
  };

  std::unique_ptr<T, Free> items_;
  size_t size_ = 0;
};

}  // namespace kvplane::blocks
