// Policies evict idle blocks, tails first, and LRU in its order, whatever sequences come and go.
// A trie of prefixes that is searched as a whole says what may be evicted.

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "eviction/factory.h"

namespace kvplane::blocks {
namespace {

constexpr int kNone = -1;

struct Prefix {
  int parent;
  Block block;  // that holds it, or kNoBlock
};

struct Sequence {
  std::vector<Block> table;
  std::vector<int> prefixes;
  size_t num_published;
};

class Walk {
 public:
  Walk(const std::string& name, uint32_t seed)
      : random_(seed), num_blocks_(8 + random_() % 60), is_lru_(name == "lru") {
    policy_ = make_policy(name, num_blocks_);
    num_references_.resize(num_blocks_);
    prefix_of_.resize(num_blocks_, kNone);
    waits_.resize(num_blocks_);
    for (Block b = 0; b < num_blocks_; ++b) free_.push_back(b);
  }

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      const uint32_t choice = random_() % 10;
      if (choice < 4) {
        admit();
      } else if (choice < 7 && !sequences_.empty()) {
        publish(sequences_[random_() % sequences_.size()]);
      } else if (choice < 9 && !sequences_.empty()) {
        free_sequence(random_() % sequences_.size());
      } else {
        unpublish(random_() % num_blocks_);
      }
      CHECK(policy_->num_idle() == idle_.size());
    }
    take(free_.size() + idle_.size());  // all that is idle is evicted in the end
  }

 private:
  void admit() {
    Sequence sequence;
    int prefix = kNone;
    for (size_t i = 1 + random_() % 10; i > 0; --i) {
      const int token = random_() % (sequence.prefixes.size() < 3 ? 2 : 3);
      sequence.prefixes.push_back(prefix = child_of(prefix, token));
    }
    std::vector<Block> woken;
    const bool looks_up = random_() % 4 != 0;
    for (const int e : sequence.prefixes) {
      const Block block = prefixes_[e].block;
      if (!looks_up || block == kNoBlock) break;
      sequence.table.push_back(block);
      if (is_idle(block)) woken.push_back(block);
    }
    const size_t num_hits = sequence.num_published = sequence.table.size();
    const size_t needed = sequence.prefixes.size() - num_hits;
    if (free_.size() + idle_.size() - woken.size() < needed) return;
    policy_->use(sequence.table.data(), num_hits);
    policy_->remove_idle(woken.data(), woken.size());
    for (const Block b : woken) idle_.remove(b);
    const std::vector<Block> taken = take(needed);
    sequence.table.insert(sequence.table.end(), taken.begin(), taken.end());
    for (const Block b : sequence.table) ++num_references_[b];
    sequences_.push_back(std::move(sequence));
  }

  // Some of what the sequence computed. What another published first is its private copy.
  void publish(Sequence& sequence) {
    const size_t rest = sequence.table.size() - sequence.num_published;
    for (size_t end = sequence.num_published + random_() % (rest + 1); sequence.num_published < end;
         ++sequence.num_published) {
      const int e = sequence.prefixes[sequence.num_published];
      const int above = prefixes_[e].parent;
      if (above != kNone && prefixes_[above].block == kNoBlock) return;
      if (prefixes_[e].block != kNoBlock) continue;
      const Block block = sequence.table[sequence.num_published];
      const uint64_t key = static_cast<uint64_t>(e) * 0x9E3779B97F4A7C15;
      policy_->publish(&block, &key, 1, above == kNone ? kNoBlock : prefixes_[above].block);
      prefixes_[e].block = block;
      prefix_of_[block] = e;
      for (const Prefix& below : prefixes_)
        if (below.parent == e && below.block != kNoBlock) policy_->set_parent(below.block, block);
    }
  }

  void free_sequence(size_t index) {
    const Sequence sequence = sequences_[index];
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
    std::vector<Block> idle;
    for (size_t i = sequence.table.size(); i-- > 0;) {
      const Block block = sequence.table[i];
      if (--num_references_[block]) continue;
      (prefix_of_[block] == kNone ? free_ : idle).push_back(block);
    }
    policy_->add_idle(idle.data(), idle.size());
    for (const Block b : idle) waits_[b] = false;
    idle_.insert(idle_.end(), idle.begin(), idle.end());
  }

  void unpublish(Block block) {
    if (prefix_of_[block] == kNone || random_() % 4) return;
    if (is_idle(block)) {
      policy_->remove_idle(&block, 1);
      idle_.remove(block);
    }
    policy_->unpublish(block);
    prefixes_[prefix_of_[block]].block = kNoBlock;
    prefix_of_[block] = kNone;
    if (num_references_[block] == 0) free_.push_back(block);
    for (Sequence& sequence : sequences_) {
      const auto end = sequence.table.begin() + static_cast<std::ptrdiff_t>(sequence.num_published);
      const auto found = std::find(sequence.table.begin(), end, block);
      sequence.num_published = static_cast<size_t>(found - sequence.table.begin());
    }
  }

  std::vector<Block> take(size_t num) {
    std::vector<Block> taken;
    for (; taken.size() < num && !free_.empty(); free_.pop_back()) taken.push_back(free_.back());
    std::vector<Block> evicted(num - taken.size());
    policy_->pop(evicted.data(), evicted.size());
    for (const Block b : evicted) {
      CHECK(is_idle(b) && !has_idle_below(prefix_of_[b]));
      if (is_lru_) CHECK(is_next(b));
      idle_.remove(b);
      prefixes_[prefix_of_[b]].block = kNoBlock;
      prefix_of_[b] = kNone;
      taken.push_back(b);
    }
    return taken;
  }

  // The least recent one is, but one with idle blocks below it waits, and is next without them.
  bool is_next(Block block) {
    bool some_waited = false;
    for (const Block b : idle_) some_waited |= waits_[b] && !has_idle_below(prefix_of_[b]);
    if (some_waited) return waits_[block];
    auto at = idle_.begin();
    for (; has_idle_below(prefix_of_[*at]); ++at) waits_[*at] = true;
    return block == *at;
  }

  // Whether blocks lead from the prefix to an idle one that continues it.
  bool has_idle_below(int prefix) const {
    return std::any_of(idle_.begin(), idle_.end(), [&](Block b) {
      int e = prefixes_[prefix_of_[b]].parent;
      while (e != kNone && e != prefix && prefixes_[e].block != kNoBlock) e = prefixes_[e].parent;
      return e == prefix;
    });
  }

  bool is_idle(Block block) const {
    return std::find(idle_.begin(), idle_.end(), block) != idle_.end();
  }

  int child_of(int parent, int token) {
    const auto [found, is_new] = children_.emplace(std::pair(parent, token), prefixes_.size());
    if (is_new) prefixes_.push_back({parent, kNoBlock});
    return found->second;
  }

  std::mt19937 random_;
  uint32_t num_blocks_;
  bool is_lru_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Prefix> prefixes_;  // never forgotten
  std::map<std::pair<int, int>, int> children_;
  std::vector<int> num_references_;
  std::vector<int> prefix_of_;
  std::vector<Block> free_;
  std::list<Block> idle_;  // the least recent first
  std::vector<bool> waits_;
  std::vector<Sequence> sequences_;
};

}  // namespace
}  // namespace kvplane::blocks

int main() {
  for (uint32_t seed = 0; seed < 150; ++seed)
    for (const char* name : {"lru", "reuse-rate"}) kvplane::blocks::Walk(name, seed).run(400);
}
