// A search for the longest cached prefix of a prompt, in slices between which the index may change.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pool/pool.h"

namespace kvplane::blocks {

// Owns the entries found so far, each with its uid. Each slice begins by dropping those that a
// look-up would not find any more. So the answer is of one moment: that of the last slice.
class PrefixSearch {
 public:
  // The prompt is given by its tokens, or by the chained hashes of its leading full blocks; these
  // must outlive the search. `primary`: the group whose entries are asked for. `with_hashes`:
  // computes their hashes, which takes longer than to find them.
  PrefixSearch(Groups groups, const LayerGroup& primary, std::string_view root,
               Span<int32_t> tokens, Span<uint8_t> hashes, bool with_hashes);

  // Looks for about `max_blocks` more blocks. Returns whether some are left.
  bool search_some(int64_t max_blocks);
  // The entries of the longest prefix of which every group has the blocks that it needs. Holds
  // until the index changes, once none are left.
  std::vector<EntryId> found() const;
  // The same for each group.
  std::vector<std::vector<EntryId>> found_in_groups() const;
  const LayerGroup& primary() const { return primary_; }

 private:
  using Path = std::vector<std::pair<EntryId, uint32_t>>;  // (entry, uid)

  void drop_stale(const LayerGroup& group, Path& path) const;
  bool extend(const LayerGroup& group, Path& path, int64_t& left) const;
  int64_t num_agreed() const;
  std::vector<EntryId> leading(size_t group, int64_t num) const;
  int64_t num_covered(const LayerGroup& group, const Path& path, int64_t most) const;

  Groups groups_;
  const LayerGroup& primary_;
  std::string root_;
  Span<int32_t> tokens_;
  Span<uint8_t> hashes_;
  bool with_hashes_;
  int64_t num_blocks_;       // full ones of the prompt
  std::vector<Path> paths_;  // by group
};

}  // namespace kvplane::blocks
