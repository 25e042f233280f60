// Which entries can be found. Those below a large prefix that was forgotten say, until they are
// taken apart, that they are of the root they were under: as long as there are some, the way up is
// walked, every part of it once.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "containers/zeros.h"
#include "index/prefix_index.h"

namespace kvplane::blocks {

// Of an index that does not change meanwhile.
class Findable {
 public:
  // `walks`: whether there are entries that say a wrong root.
  Findable(const PrefixIndex& index, bool walks)
      : index_(index), answers_(walks ? index.end() : 0) {}

  // Whether the entry can be found; nothing when a millisecond or a few were spent already, and it
  // is to be asked of another `Findable`, as the first there.
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
