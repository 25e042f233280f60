#include "pool/prefix_search.h"

#include <algorithm>

namespace kvplane::blocks {

PrefixSearch::PrefixSearch(Groups groups, const LayerGroup& primary, std::string_view root,
                           Span<int32_t> tokens, Span<uint8_t> hashes, bool with_hashes)
    : groups_(groups),
      primary_(primary),
      root_(root),
      tokens_(tokens),
      hashes_(hashes),
      with_hashes_(with_hashes),
      num_blocks_(hashes.size ? hashes.size / static_cast<int64_t>(sizeof(Hash))
                              : tokens.size / primary.config.block_size_tokens),
      paths_(static_cast<size_t>(groups.size)) {}

bool PrefixSearch::search_some(int64_t max_blocks) {
  for (int64_t g = 0; g < groups_.size; ++g)
    drop_stale(*groups_[g], paths_[static_cast<size_t>(g)]);
  int64_t left = max_blocks;
  for (int64_t g = 0; g < groups_.size; ++g)
    if (extend(*groups_[g], paths_[static_cast<size_t>(g)], left)) return true;
  return false;
}

void PrefixSearch::drop_stale(const LayerGroup& group, Path& path) const {
  const PrefixIndex& index = group.index;
  EntryId before = index.find_root(root_);
  const auto is_stale = [&](const std::pair<EntryId, uint32_t>& step) {
    const auto [e, uid] = step;
    const bool is_found = index.alive(e, uid) && index[e].parent == before &&
                          (index[e].has_blocks() || !group.config.needs_all_blocks());
    before = e;
    return !is_found;
  };
  path.erase(std::find_if(path.begin(), path.end(), is_stale), path.end());
}

// Returns whether some are left.
bool PrefixSearch::extend(const LayerGroup& group, Path& path, int64_t& left) const {
  const PrefixIndex& index = group.index;
  EntryId e = path.empty() ? index.find_root(root_) : path.back().first;
  for (auto i = static_cast<int64_t>(path.size()); e != kNoEntry && i < num_blocks_; ++i, --left) {
    if (left <= 0) return true;
    if (hashes_.size) {
      Hash hash;
      std::copy_n(hashes_.data + i * static_cast<int64_t>(hash.size()), hash.size(), hash.begin());
      e = index.find_hash(e, hash);
    } else {
      e = index.find(e, tokens_.data + i * index.block_size());
    }
    if (e == kNoEntry || (!index[e].has_blocks() && group.config.needs_all_blocks())) return false;
    if (with_hashes_ && &group == &primary_) index.hash(e);
    path.emplace_back(e, index[e].uid);
  }
  return false;
}

std::vector<EntryId> PrefixSearch::found() const {
  size_t g = 0;
  while (groups_[static_cast<int64_t>(g)] != &primary_) ++g;
  return leading(g, num_agreed());
}

std::vector<std::vector<EntryId>> PrefixSearch::found_in_groups() const {
  const int64_t num = num_agreed();
  std::vector<std::vector<EntryId>> all;
  for (size_t g = 0; g < paths_.size(); ++g) all.push_back(leading(g, num));
  return all;
}

int64_t PrefixSearch::num_agreed() const {
  int64_t most = num_blocks_;
  for (int64_t num_agreed = 0; num_agreed < groups_.size;) {
    num_agreed = 0;
    for (int64_t g = 0; g < groups_.size; ++g) {
      const int64_t num = num_covered(*groups_[g], paths_[static_cast<size_t>(g)], most);
      num_agreed += num == most || groups_.size == 1;
      most = num;
    }
  }
  return most;
}

std::vector<EntryId> PrefixSearch::leading(size_t group, int64_t num) const {
  std::vector<EntryId> entries;
  entries.reserve(static_cast<size_t>(num));
  for (size_t i = 0; i < static_cast<size_t>(num); ++i) entries.push_back(paths_[group][i].first);
  return entries;
}

// The longest prefix of at most `most` blocks of which the group has the blocks that it needs.
int64_t PrefixSearch::num_covered(const LayerGroup& group, const Path& path, int64_t most) const {
  const int64_t num = std::min(most, static_cast<int64_t>(path.size()));
  if (group.config.needs_all_blocks()) return num;
  std::vector<uint8_t> present;
  for (int64_t i = 0; i < num; ++i)
    present.push_back(group.index[path[static_cast<size_t>(i)].first].has_blocks());
  // An admission computes the last token; hashes are mostly of a prompt that goes on.
  const int64_t num_tokens =
      hashes_.size ? num_blocks_ * group.index.block_size() + 1 : tokens_.size;
  return group.admitter.needed_hits(present, num_tokens).first;
}

}  // namespace kvplane::blocks
