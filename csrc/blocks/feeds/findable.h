// Which entries can be found. Entries below a large forgotten prefix name the root that they were
// under until they are removed: as long as there are some, the path up to the root is walked, every
// part of it once.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "containers/zeros.h"
#include "index/prefix_index.h"

namespace kvplane::blocks {

// Answers for an index that does not change meanwhile.
class Findable {
 public:
  explicit Findable(const PrefixIndex& index)
      : index_(index), answers_(index.names_former_roots() ? index.end() : 0) {}

  // Returns whether the entry can be found; nothing once some milliseconds have been spent: ask
  // another `Findable` then, with this entry first.
  std::optional<bool> operator()(EntryId e) {
    if (!index_.is_named(index_.root_of(e))) return false;
    if (!answers_.size()) return true;
    const size_t first = way_.size();
    for (; !answers_[e] && !index_.is_root(e); e = index_[e].parent) {
      if (way_.size() == most_) return std::nullopt;
      way_.push_back(e);
    }
    if (first == 0) most_ = way_.size() + kMany;
    if (!answers_[e]) answers_[e] = index_.is_named(e) ? kYes : kNo;
    for (size_t i = first; i < way_.size(); ++i) answers_[way_[i]] = answers_[e];
    return answers_[e] == kYes;
  }

 private:
  static constexpr size_t kMany = 32'768;
  enum Answer : uint8_t { kUnknown, kYes, kNo };

  const PrefixIndex& index_;
  Zeros<uint8_t> answers_;    // by entry
  std::vector<EntryId> way_;  // all that was walked
  size_t most_ = std::numeric_limits<size_t>::max();
};

}  // namespace kvplane::blocks
