// The columns of a session's next plan, and their protobuf encoding (message Plan).
#pragma once

#include <functional>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

enum class ChangeKind : uint8_t {
  kSet = 1,
  kReplace = 2,
  kFork = 3,
  kDrop = 4,
  kTruncate = 5,
  kTrim = 6,
  kKeep = 7
};

struct TableChanges {
  std::vector<uint8_t> kinds;
  std::vector<int64_t> sequence_ids;
  std::vector<uint8_t> groups;  // empty: all are 0
  std::vector<uint8_t> tiers;
  std::vector<int32_t> first_blocks;
  std::vector<int32_t> num_blocks;
  std::vector<int64_t> parents;
  std::vector<int32_t> indices;
  std::vector<int64_t> generations;
  std::vector<uint8_t> allocated;

  // In the order of the message's fields.
  template <typename Self>
  static auto columns(Self& self) {
    return std::tie(self.kinds, self.sequence_ids, self.groups, self.tiers, self.first_blocks,
                    self.num_blocks, self.parents, self.indices, self.generations, self.allocated);
  }

  // A SET or REPLACE; the caller adds num entries.
  void set(ChangeKind kind, int64_t sequence_id, Tier tier, int64_t first, int64_t num) {
    add(kind, sequence_id, tier, first, num);
  }
  void fork(int64_t sequence_id, int64_t parent_id, int64_t num) {
    add(ChangeKind::kFork, sequence_id, Tier(0), 0, num);
    parents.push_back(parent_id);
  }
  void drop(int64_t sequence_id) { add(ChangeKind::kDrop, sequence_id, Tier(0), 0, 0); }
  // TRUNCATE and KEEP keep the first num entries, TRIM drops them.
  void cut(ChangeKind kind, int64_t sequence_id, int64_t num) {
    add(kind, sequence_id, Tier(0), 0, num);
  }
  bool empty() const { return kinds.empty(); }

 private:
  void add(ChangeKind kind, int64_t sequence_id, Tier tier, int64_t first, int64_t num);
};

struct TransferColumns {
  std::vector<uint8_t> groups;  // empty: all are 0
  std::vector<uint8_t> source_tiers;
  std::vector<int32_t> source_indices;
  std::vector<int64_t> source_generations;
  std::vector<uint8_t> destination_tiers;
  std::vector<int32_t> destination_indices;
  std::vector<int64_t> destination_generations;

  // In the order of the message's fields.
  template <typename Self>
  static auto columns(Self& self) {
    return std::tie(self.groups, self.source_tiers, self.source_indices, self.source_generations,
                    self.destination_tiers, self.destination_indices, self.destination_generations);
  }

  template <typename Ref>
  void add(const Ref& source, const Ref& destination) {
    source_tiers.push_back(source.tier);
    source_indices.push_back(static_cast<int32_t>(source.block));
    source_generations.push_back(source.generation);
    destination_tiers.push_back(destination.tier);
    destination_indices.push_back(static_cast<int32_t>(destination.block));
    destination_generations.push_back(destination.generation);
  }
  bool empty() const { return source_tiers.empty(); }
};

struct Spans {
  std::vector<int64_t> sequence_ids;
  std::vector<int32_t> first_positions;
  std::vector<int32_t> num_tokens;

  // In the order of the message's fields.
  template <typename Self>
  static auto columns(Self& self) {
    return std::tie(self.sequence_ids, self.first_positions, self.num_tokens);
  }

  bool empty() const { return sequence_ids.empty(); }
};

// Blocks allocated for no table.
struct Allocations {
  std::vector<uint8_t> groups;  // empty: all are 0
  std::vector<uint8_t> tiers;
  std::vector<int32_t> indices;
  std::vector<int64_t> generations;

  // In the order of the message's fields.
  template <typename Self>
  static auto columns(Self& self) {
    return std::tie(self.tiers, self.indices, self.generations, self.groups);
  }

  bool empty() const { return tiers.empty(); }
};

struct Draft {
  TableChanges changes;
  TransferColumns transfers;
  Spans spans;
  Allocations allocations;

  bool empty() const {
    return changes.empty() && transfers.empty() && spans.empty() && allocations.empty();
  }
  // Adds what a layer group drafted. All groups have the same spans.
  void add(const Draft& other, uint8_t group);
  void clear();
  // Writes fields 5 to 11 and 13 of Plan, after `prefix`, which holds the other fields, encoded, to
  // where `make(num_bytes)` says. `finished`: the last plan that has run, where the plan keeps
  // tables.
  void encode(std::string_view prefix, int64_t number, int64_t previous, bool resync,
              int64_t finished, const std::function<char*(size_t)>& make) const;
};

}  // namespace kvplane::blocks
