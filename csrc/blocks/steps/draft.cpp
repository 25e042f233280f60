#include "steps/draft.h"

#include "steps/proto_writer.h"

namespace kvplane::blocks {

namespace {

template <typename Fields, typename T>
void column(Fields& fields, uint32_t field, const std::vector<T>& values) {
  fields.column(field, values.data(), values.size());
}

template <typename Fields>
void write(Fields& fields, const TableChanges& changes) {
  column(fields, 1, changes.kinds);
  column(fields, 2, changes.sequence_ids);
  column(fields, 3, changes.groups);
  column(fields, 4, changes.tiers);
  column(fields, 5, changes.first_blocks);
  column(fields, 6, changes.num_blocks);
  column(fields, 7, changes.parents);
  column(fields, 8, changes.indices);
  column(fields, 9, changes.generations);
  column(fields, 10, changes.allocated);
}

template <typename Fields>
void write(Fields& fields, const TransferColumns& transfers) {
  column(fields, 1, transfers.groups);
  column(fields, 2, transfers.source_tiers);
  column(fields, 3, transfers.source_indices);
  column(fields, 4, transfers.source_generations);
  column(fields, 5, transfers.destination_tiers);
  column(fields, 6, transfers.destination_indices);
  column(fields, 7, transfers.destination_generations);
}

template <typename Fields>
void write(Fields& fields, const Spans& spans) {
  column(fields, 1, spans.sequence_ids);
  column(fields, 2, spans.first_positions);
  column(fields, 3, spans.num_tokens);
}

template <typename Fields>
void write(Fields& fields, const Allocations& allocations) {
  column(fields, 1, allocations.tiers);
  column(fields, 2, allocations.indices);
  column(fields, 3, allocations.generations);
  column(fields, 4, allocations.groups);
}

}  // namespace

void TableChanges::add(ChangeKind kind, int64_t sequence_id, Tier tier, int64_t first,
                       int64_t num) {
  kinds.push_back(static_cast<uint8_t>(kind));
  sequence_ids.push_back(sequence_id);
  tiers.push_back(tier);
  first_blocks.push_back(static_cast<int32_t>(first));
  num_blocks.push_back(static_cast<int32_t>(num));
}

namespace {

// Elements of an emptied column for which memory is kept: a session may have one large admission.
constexpr size_t kNumKept = 1024;

template <typename T>
void clear_column(std::vector<T>& column) {
  column.clear();
  if (column.capacity() > kNumKept) column.shrink_to_fit();
}

}  // namespace

void TableChanges::clear() {
  kinds.clear();
  sequence_ids.clear();
  groups.clear();
  tiers.clear();
  first_blocks.clear();
  num_blocks.clear();
  parents.clear();
  clear_column(indices);
  clear_column(generations);
  clear_column(allocated);
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

void Spans::clear() {
  sequence_ids.clear();
  first_positions.clear();
  num_tokens.clear();
}

void Allocations::clear() {
  groups.clear();
  tiers.clear();
  indices.clear();
  generations.clear();
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

void Draft::encode(std::string_view prefix, int64_t number, int64_t previous, bool resync,
                   int64_t finished, const std::function<char*(size_t)>& make) const {
  const auto write_part = [](auto& fields, uint32_t field, const auto& part) {
    if (part.empty()) return;
    ProtoSize size;
    write(size, part);
    fields.message(field, size.num_bytes());
    write(fields, part);
  };
  const auto write_plan = [&](auto& fields) {
    fields.put(prefix.data(), prefix.size());
    fields.varint(5, number);
    fields.varint(6, previous);
    fields.varint(7, resync);
    write_part(fields, 8, changes);
    write_part(fields, 9, transfers);
    write_part(fields, 10, spans);
    write_part(fields, 11, allocations);
    fields.varint(13, finished);
  };
  ProtoSize size;
  write_plan(size);
  ProtoWriter writer(make(size.num_bytes()));
  write_plan(writer);
}

}  // namespace kvplane::blocks
