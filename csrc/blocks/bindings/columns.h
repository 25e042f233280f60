// Helpers of the bindings of pools: columns are bytes on the side of Python.

#pragma once

#include <pybind11/pybind11.h>

#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/pool.h"

namespace kvplane::blocks {

namespace py = pybind11;

template <typename T>
py::bytes pack(const T* values, size_t num) {
  return py::bytes(reinterpret_cast<const char*>(values), num * sizeof(T));
}

template <typename T>
py::bytes pack(const std::vector<T>& values) {
  return pack(values.data(), values.size());
}

// The elements of a column; `length` is how many there must be, -1 for any number.
template <typename T>
Span<T> read(const py::bytes& column, const char* name, int64_t length = -1) {
  const std::string_view bytes = column;
  if (bytes.size() % sizeof(T))
    throw ColumnError(name, -1, "must be a multiple of " + std::to_string(sizeof(T)) + " bytes");
  const auto num = static_cast<int64_t>(bytes.size() / sizeof(T));
  if (length >= 0 && num != length)
    throw ColumnError(name, -1,
                      "must have " + std::to_string(length) +
                          " elements, as many as the first "
                          "column, but has " +
                          std::to_string(num));
  return {reinterpret_cast<const T*>(bytes.data()), num};
}

inline SessionHandle checked(const LayerGroup& group, SessionHandle handle) {
  if (!group.sessions.is_open(handle)) throw py::index_error("no session has this handle");
  return handle;
}
inline SessionHandle checked(const Pool& pool, SessionHandle handle) {
  return checked(pool.first(), handle);
}

inline Tier tier_of(int tier) {
  if (tier != kDevice && tier != kHost) throw py::value_error("tier must be 1 or 2");
  return static_cast<Tier>(tier);
}

inline const Sequence& sequence_of(const LayerGroup& group, SessionHandle handle, int64_t id) {
  const Sequence* sequence = group.sequences.find(group.sessions[checked(group, handle)], id);
  if (!sequence) throw py::key_error(std::to_string(id));
  return *sequence;
}

inline py::tuple as_tuple(const Failure& failure) {
  return py::make_tuple(failure.item, static_cast<int>(failure.code), failure.a, failure.b,
                        failure.c);
}

inline py::tuple as_tuple(const std::variant<Admitted, Failure>& result) {
  if (const auto* failure = std::get_if<Failure>(&result)) return as_tuple(*failure);
  const auto& admitted = std::get<Admitted>(result);
  return py::make_tuple(admitted.num_cached_tokens, admitted.num_blocks,
                        admitted.num_scheduled_tokens);
}

inline py::object as_list(const std::vector<Failure>& failures) {
  if (failures.empty()) return py::none();
  py::list list;
  for (const Failure& failure : failures) list.append(as_tuple(failure));
  return list;
}

// Bytes that the caller fills in place.
inline py::bytes make_bytes(size_t num_bytes) {
  auto bytes = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num_bytes)));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

inline std::vector<int64_t> read_generations(const py::bytes& column) {
  const auto span = read<int64_t>(column, "generations");
  return {span.data, span.data + span.size};
}

inline void check_num_blocks(uint32_t num_device_blocks, uint32_t num_host_blocks) {
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();  // indices are int32
  if (num_device_blocks > kMost || num_host_blocks > kMost)
    throw py::value_error("a tier must have fewer than 2^31 blocks");
}

inline PoolConfig make_config(uint32_t block_size_tokens, const py::bytes& device_generations,
                              const py::bytes& host_generations, const std::string& eviction_policy,
                              int64_t window_tokens, int64_t max_sequences,
                              int64_t max_table_entries, int64_t max_owner_blocks, uint64_t seed) {
  if (block_size_tokens < 1 || block_size_tokens > 256 || 256 % block_size_tokens)
    throw py::value_error("block_size_tokens must be a power of two up to 256");
  if (window_tokens < 0) throw py::value_error("window_tokens must not be negative");
  if (max_owner_blocks < 0) throw py::value_error("max_owner_blocks must not be negative");
  PoolConfig config;
  config.block_size_tokens = block_size_tokens;
  config.generations[0] = read_generations(device_generations);
  config.generations[1] = read_generations(host_generations);
  config.eviction_policy = eviction_policy;
  config.window_tokens = window_tokens;
  config.max_sequences = max_sequences;
  config.max_table_entries = max_table_entries;
  config.max_owner_blocks = max_owner_blocks;
  config.seed = seed;
  return config;
}

}  // namespace kvplane::blocks
