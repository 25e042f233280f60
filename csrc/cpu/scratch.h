// Memory that a call needs only while it runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace kvplane {

// The next call of the same thread takes the same memory again. If each call gave it back, the
// allocator would now and then return all that is free at its end to the system, within the call,
// which takes milliseconds, and calls after it would wait for pages.
class Scratch {
 public:
  // Of the thread that calls. Everything that is taken from it is free again when the Lease ends.
  class Lease;

  // From the start of a cache line on; not initialized.
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
  static constexpr size_t kMostKept = 0;  // so that the end of each buffer is known
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
  std::vector<std::unique_ptr<Line[]>> more_;  // what the kept memory had no room for
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
