#include "sessions/draft.h"

#include <utility>

#include "sessions/proto_writer.h"

namespace kvplane::blocks {

namespace {

template <typename Fields, typename Part>
void write(Fields& fields, const Part& part) {
  uint32_t field = 0;
  std::apply(
      [&](const auto&... column) { (fields.column(++field, column.data(), column.size()), ...); },
      Part::columns(part));
}

template <typename Part>
void clear_columns(Part& part) {
  std::apply([](auto&... column) { (column.clear(), ...); }, Part::columns(part));
}

template <typename Part, size_t... kIs>
void join(Part& part, const Part& more, std::index_sequence<kIs...>) {
  const auto append = [](auto& column, const auto& other) {
    column.insert(column.end(), other.begin(), other.end());
  };
  const auto columns = Part::columns(part);
  const auto others = Part::columns(more);
  (append(std::get<kIs>(columns), std::get<kIs>(others)), ...);
}

template <typename Part>
void join(Part& part, const Part& more) {
  constexpr size_t kNum = std::tuple_size_v<decltype(Part::columns(part))>;
  join(part, more, std::make_index_sequence<kNum>());
}

// Elements of an emptied column for which memory is kept: a session may have one large admission.
constexpr size_t kNumKept = 1024;

}  // namespace

void TableChanges::add(ChangeKind kind, int64_t sequence_id, Tier tier, int64_t first,
                       int64_t num) {
  kinds.push_back(static_cast<uint8_t>(kind));
  sequence_ids.push_back(sequence_id);
  tiers.push_back(tier);
  first_blocks.push_back(static_cast<int32_t>(first));
  num_blocks.push_back(static_cast<int32_t>(num));
}

void Draft::add(const Draft& other, uint8_t group) {
  join(changes, other.changes);
  changes.groups.resize(changes.kinds.size(), group);
  join(transfers, other.transfers);
  transfers.groups.resize(transfers.source_tiers.size(), group);
  join(allocations, other.allocations);
  allocations.groups.resize(allocations.tiers.size(), group);
  if (group == 0) spans = other.spans;
}

void Draft::clear() {
  clear_columns(changes);
  clear_columns(transfers);
  clear_columns(spans);
  clear_columns(allocations);
  const auto shrink = [](auto& column) {
    if (column.capacity() > kNumKept) column.shrink_to_fit();
  };
  shrink(changes.indices);
  shrink(changes.generations);
  shrink(changes.allocated);
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
