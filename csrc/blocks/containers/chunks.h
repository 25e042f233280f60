// Tables and tokens of sequences, in chunks that forks share: a fork copies neither entries nor
// tokens, and a write to a shared chunk copies that chunk first.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "containers/slab.h"

namespace kvplane::blocks {

template <typename T, uint32_t kSize>
struct Chunk {
  uint32_t num_owners;  // arrays that have this chunk
  T items[kSize];
};

// All chunks of one kind.
template <typename T, uint32_t kSize>
class ChunkStore {
 public:
  using Item = T;
  static constexpr uint32_t kItems = kSize;

  // A chunk with one owner; its items are undefined.
  uint32_t add() {
    const uint32_t id = chunks_.take();
    chunks_[id].num_owners = 1;
    return id;
  }

  Chunk<T, kSize>& operator[](uint32_t id) { return chunks_[id]; }
  const Chunk<T, kSize>& operator[](uint32_t id) const { return chunks_[id]; }

  // Removes an owner. Returns whether it was the last; the chunk may be reused then.
  bool drop(uint32_t id) {
    if (--chunks_[id].num_owners) return false;
    chunks_.give_back(id);
    return true;
  }

  // Whether the chunk is in use; false for a number that no chunk has.
  bool has(uint32_t id) const { return id < chunks_.size() && chunks_[id].num_owners > 0; }

  size_t num_used() const { return chunks_.num_taken(); }

 private:
  Slab<Chunk<T, kSize>> chunks_;
};

// An array of items in chunks. Indices of chunks that hold block references are managed by the
// caller (see steps/tables.cpp), which counts references when chunks are copied or dropped.
template <typename Store>
struct ChunkedArray {
  using Item = typename Store::Item;
  static constexpr uint32_t kItems = Store::kItems;

  std::vector<uint32_t> chunks;
  int64_t size = 0;

  const Item& at(const Store& store, int64_t i) const {
    return store[chunks[static_cast<size_t>(i / kItems)]].items[i % kItems];
  }

  // Calls f(items, num_items) for the runs of [begin, end), in order.
  template <typename F>
  void runs(const Store& store, int64_t begin, int64_t end, F f) const {
    while (begin < end) {
      const int64_t first = begin % kItems;
      const int64_t num = std::min<int64_t>(kItems - first, end - begin);
      f(store[chunks[static_cast<size_t>(begin / kItems)]].items + first, num);
      begin += num;
    }
  }
};

using TokenStore = ChunkStore<int32_t, 256>;

// The known tokens of a sequence.
struct Tokens : ChunkedArray<TokenStore> {
  void append(TokenStore& store, const int32_t* tokens, int64_t num) {
    while (num > 0) {
      const int64_t first = size % kItems;
      if (first == 0) {
        chunks.push_back(store.add());
      } else if (store[chunks.back()].num_owners > 1) {
        const uint32_t copy = store.add();
        std::memcpy(store[copy].items, store[chunks.back()].items, size_t(first) * sizeof(int32_t));
        store.drop(chunks.back());
        chunks.back() = copy;
      }
      const int64_t now = std::min<int64_t>(kItems - first, num);
      int32_t* items = store[chunks.back()].items + first;
      if (now == 1)
        *items = *tokens;
      else  // memcpy of a bounded size becomes `rep movs`, which is slow where it must fetch lines
        std::memmove(items, tokens, size_t(now) * sizeof(int32_t));
      tokens += now;
      num -= now;
      size += now;
    }
  }

  // Shares the chunks of `other`.
  void share(TokenStore& store, const Tokens& other) {
    chunks = other.chunks;
    size = other.size;
    for (const uint32_t id : chunks) ++store[id].num_owners;
  }

  // Appends a whole chunk that another array may have, if it holds these tokens. The size is a
  // multiple of a chunk's.
  bool share_chunk(TokenStore& store, uint32_t id, const int32_t* tokens) {
    if (!store.has(id) || std::memcmp(store[id].items, tokens, sizeof store[id].items) != 0)
      return false;
    ++store[id].num_owners;
    chunks.push_back(id);
    size += kItems;
    return true;
  }

  void cut(TokenStore& store, int64_t num) {
    if (num >= size) return;
    const size_t keep = static_cast<size_t>(div_ceil(num, kItems));
    while (chunks.size() > keep) {
      store.drop(chunks.back());
      chunks.pop_back();
    }
    size = num;
  }

  void copy(const TokenStore& store, int64_t begin, int64_t end, int32_t* out) const {
    runs(store, begin, end, [&](const int32_t* items, int64_t num) {
      std::memcpy(out, items, size_t(num) * sizeof(int32_t));
      out += num;
    });
  }

  bool equals(const TokenStore& store, int64_t begin, const int32_t* tokens, int64_t num) const {
    bool equal = true;
    runs(store, begin, begin + num, [&](const int32_t* items, int64_t n) {
      equal = equal && std::memcmp(items, tokens, size_t(n) * sizeof(int32_t)) == 0;
      tokens += n;
    });
    return equal;
  }
};

}  // namespace kvplane::blocks
