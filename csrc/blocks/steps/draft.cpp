#include "steps/draft.h"

#include "steps/proto_writer.h"

namespace kvplane::blocks {

void TableChanges::add(ChangeKind kind, int64_t sequence_id, Tier tier, int64_t first,
                       int64_t num) {
  kinds.push_back(static_cast<uint8_t>(kind));
  sequence_ids.push_back(sequence_id);
  tiers.push_back(tier);
  first_blocks.push_back(static_cast<int32_t>(first));
  num_blocks.push_back(static_cast<int32_t>(num));
}

void TableChanges::clear() {
  kinds.clear();
  sequence_ids.clear();
  groups.clear();
  tiers.clear();
  first_blocks.clear();
  num_blocks.clear();
  parents.clear();
  indices.clear();
  generations.clear();
  allocated.clear();
}

std::string TableChanges::encoded() const {
  std::string out;
  out.reserve(22 * kinds.size() + 13 * indices.size() + 64);
  ProtoWriter writer(out);
  writer.column(1, kinds.data(), kinds.size());
  writer.column(2, sequence_ids.data(), sequence_ids.size());
  writer.column(3, groups.data(), groups.size());
  writer.column(4, tiers.data(), tiers.size());
  writer.column(5, first_blocks.data(), first_blocks.size());
  writer.column(6, num_blocks.data(), num_blocks.size());
  writer.column(7, parents.data(), parents.size());
  writer.column(8, indices.data(), indices.size());
  writer.column(9, generations.data(), generations.size());
  writer.column(10, allocated.data(), allocated.size());
  return out;
}

void TransferColumns::clear() {
  groups.clear();
  source_tiers.clear();
  source_indices.clear();
  source_generations.clear();
  destination_tiers.clear();
  destination_indices.clear();
  destination_generations.clear();
}

std::string TransferColumns::encoded() const {
  std::string out;
  ProtoWriter writer(out);
  writer.column(1, groups.data(), groups.size());
  writer.column(2, source_tiers.data(), source_tiers.size());
  writer.column(3, source_indices.data(), source_indices.size());
  writer.column(4, source_generations.data(), source_generations.size());
  writer.column(5, destination_tiers.data(), destination_tiers.size());
  writer.column(6, destination_indices.data(), destination_indices.size());
  writer.column(7, destination_generations.data(), destination_generations.size());
  return out;
}

void Spans::clear() {
  sequence_ids.clear();
  first_positions.clear();
  num_tokens.clear();
}

std::string Spans::encoded() const {
  std::string out;
  out.reserve(20 * sequence_ids.size() + 16);
  ProtoWriter writer(out);
  writer.column(1, sequence_ids.data(), sequence_ids.size());
  writer.column(2, first_positions.data(), first_positions.size());
  writer.column(3, num_tokens.data(), num_tokens.size());
  return out;
}

void Allocations::clear() {
  groups.clear();
  tiers.clear();
  indices.clear();
  generations.clear();
}

std::string Allocations::encoded() const {
  std::string out;
  ProtoWriter writer(out);
  writer.column(1, tiers.data(), tiers.size());
  writer.column(2, indices.data(), indices.size());
  writer.column(3, generations.data(), generations.size());
  writer.column(4, groups.data(), groups.size());
  return out;
}

void Draft::add(const Draft& other, uint8_t group) {
  const auto join = [](auto& column, const auto& more) {
    column.insert(column.end(), more.begin(), more.end());
  };
  join(changes.kinds, other.changes.kinds);
  join(changes.sequence_ids, other.changes.sequence_ids);
  join(changes.tiers, other.changes.tiers);
  join(changes.first_blocks, other.changes.first_blocks);
  join(changes.num_blocks, other.changes.num_blocks);
  join(changes.parents, other.changes.parents);
  join(changes.indices, other.changes.indices);
  join(changes.generations, other.changes.generations);
  join(changes.allocated, other.changes.allocated);
  changes.groups.resize(changes.kinds.size(), group);
  join(transfers.source_tiers, other.transfers.source_tiers);
  join(transfers.source_indices, other.transfers.source_indices);
  join(transfers.source_generations, other.transfers.source_generations);
  join(transfers.destination_tiers, other.transfers.destination_tiers);
  join(transfers.destination_indices, other.transfers.destination_indices);
  join(transfers.destination_generations, other.transfers.destination_generations);
  transfers.groups.resize(transfers.source_tiers.size(), group);
  join(allocations.tiers, other.allocations.tiers);
  join(allocations.indices, other.allocations.indices);
  join(allocations.generations, other.allocations.generations);
  allocations.groups.resize(allocations.tiers.size(), group);
  if (group == 0) spans = other.spans;
}

void Draft::clear() {
  changes.clear();
  transfers.clear();
  spans.clear();
  allocations.clear();
}

std::string Draft::encode(std::string_view prefix, int64_t number, int64_t previous,
                          bool resync) const {
  std::string parts[4];
  if (!changes.empty()) parts[0] = changes.encoded();
  if (!transfers.empty()) parts[1] = transfers.encoded();
  if (!spans.empty()) parts[2] = spans.encoded();
  if (!allocations.empty()) parts[3] = allocations.encoded();
  std::string out;
  size_t size = prefix.size() + 64;
  for (const std::string& part : parts) size += part.size() + 8;
  out.reserve(size);
  out.append(prefix);
  ProtoWriter writer(out);
  writer.varint(5, number);
  writer.varint(6, previous);
  writer.varint(7, resync);
  for (uint32_t i = 0; i < 4; ++i) writer.bytes(8 + i, parts[i]);
  return out;
}

}  // namespace kvplane::blocks
