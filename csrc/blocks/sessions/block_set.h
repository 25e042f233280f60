// A set of blocks of both tiers.
//
// A bitmap in parts of 4,096 bits, each made when the first of its blocks is added. So no
// insert moves what is there, as the growth of a hash table does, and a million consecutive blocks
// take 128 KiB.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

class BlockSet {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  bool contains(Tier tier, Block b) const {
    const Pages& pages = pages_[tier - 1];
    const size_t page = b / kBitsOfPage;
    return page < pages.size() && pages[page] && ((*pages[page])[word_of(b)] & bit_of(b));
  }

  void insert(Tier tier, Block b) {
    Pages& pages = pages_[tier - 1];
    const size_t page = b / kBitsOfPage;
    if (page >= pages.size()) pages.resize(page + 1);
    if (!pages[page]) pages[page] = std::make_unique<Page>();
    uint64_t& word = (*pages[page])[word_of(b)];
    size_ += !(word & bit_of(b));
    word |= bit_of(b);
  }

  // Returns whether the block was there.
  bool erase(Tier tier, Block b) {
    if (!contains(tier, b)) return false;
    (*pages_[tier - 1][b / kBitsOfPage])[word_of(b)] &= ~bit_of(b);
    --size_;
    return true;
  }

  // Also frees the memory.
  void clear() { *this = BlockSet(); }

 private:
  static constexpr size_t kBitsOfWord = 64, kBitsOfPage = 4096;
  using Page = std::array<uint64_t, kBitsOfPage / kBitsOfWord>;
  using Pages = std::vector<std::unique_ptr<Page>>;

  static size_t word_of(Block b) { return b % kBitsOfPage / kBitsOfWord; }
  static uint64_t bit_of(Block b) { return uint64_t{1} << b % kBitsOfWord; }

  std::array<Pages, 2> pages_;
  size_t size_ = 0;
};

}  // namespace kvplane::blocks
