// Doubly linked lists of small integers whose links are columns: no allocation, O(1) a step. An
// integer is in one list of a `Links` at most.
#pragma once

#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

constexpr uint32_t kEnd = 0xFFFFFFFF;

struct List {
  uint32_t head = kEnd;
  uint32_t tail = kEnd;
  uint32_t size = 0;
};

class Links {
 public:
  explicit Links(size_t size) : next_(size, kEnd), prev_(size, kEnd) {}

  void push_front(List& list, uint32_t x) {
    prev_[x] = kEnd;
    next_[x] = list.head;
    (list.head == kEnd ? list.tail : prev_[list.head]) = x;
    list.head = x;
    ++list.size;
  }

  void remove(List& list, uint32_t x) {
    (prev_[x] == kEnd ? list.head : next_[prev_[x]]) = next_[x];
    (next_[x] == kEnd ? list.tail : prev_[next_[x]]) = prev_[x];
    --list.size;
  }

  uint32_t next(uint32_t x) const { return next_[x]; }

 private:
  std::vector<uint32_t> next_;
  std::vector<uint32_t> prev_;
};

}  // namespace kvplane::blocks
