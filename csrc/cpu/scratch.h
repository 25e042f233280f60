// Memory that a call needs only while it runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace kvplane {

// Memory of a thread's calls, kept from one call to the next. If each call freed it, the allocator
// would sometimes return its free memory to the system, which takes milliseconds of a call, and
// later calls would wait for pages.
class Scratch {
 public:
  // Access to the calling thread's Scratch. At its end all memory that was taken is free again.
  class Lease;

  // Returns memory that starts at a cache line; not initialized.
  template <typename T>
  T* take(int64_t count) {
    static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= sizeof(Line));
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const size_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
    const size_t first = num_taken_;
    num_taken_ += lines;
    if (more_.empty() && num_taken_ <= num_kept_) {
      return reinterpret_cast<T*>(kept_.get() + first);
    }
    more_.emplace_back(new Line[lines]);
    return reinterpret_cast<T*>(more_.back().get());
  }

  template <typename T>
  T* take_zeros(int64_t count) {
    T* const taken = take<T>(count);
    std::fill_n(taken, count, T{});
    return taken;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };

#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kMostKept = 0;  // so that overruns of each buffer are found
#else
  static constexpr size_t kMostKept = (size_t{16} << 20) / sizeof(Line);
#endif

  void free_all() {
    if (!more_.empty() && num_taken_ <= kMostKept) {
      kept_.reset();
      kept_.reset(new (std::nothrow) Line[num_taken_]);
      num_kept_ = kept_ == nullptr ? 0 : num_taken_;
    }
    more_.clear();
    num_taken_ = 0;
  }

  std::unique_ptr<Line[]> kept_;
  std::vector<std::unique_ptr<Line[]>> more_;  // buffers that did not fit in the kept memory
  size_t num_kept_ = 0, num_taken_ = 0;        // lines
};

class Scratch::Lease {
 public:
  Lease() : scratch_(of_thread()) {}
  ~Lease() { scratch_.free_all(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Scratch& operator*() const { return scratch_; }

 private:
  static Scratch& of_thread() {
    thread_local Scratch scratch;
    return scratch;
  }

  Scratch& scratch_;
};

}  // namespace kvplane
