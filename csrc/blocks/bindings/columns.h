// Helpers of the bindings of pools: columns are bytes on the side of Python.

#pragma once

#include <pybind11/pybind11.h>

#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pool/pool.h"

namespace kvplane::blocks {

namespace py = pybind11;
using namespace py::literals;

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
// As the first group has it.
inline Session& session_of(const Pool& pool, SessionHandle handle) {
  return pool.first().sessions[checked(pool, handle)];
}

// A call of a pool, whose first argument must be the handle of an open session.
template <typename Result, typename... Arguments>
auto of_session(Result (Pool::*call)(SessionHandle, Arguments...)) {
  return [call](Pool& self, SessionHandle handle, Arguments... arguments) {
    return (self.*call)(checked(self, handle), arguments...);
  };
}
template <typename Result, typename... Arguments>
auto of_session(Result (Pool::*call)(SessionHandle, Arguments...) const) {
  return [call](const Pool& self, SessionHandle handle, Arguments... arguments) {
    return (self.*call)(checked(self, handle), arguments...);
  };
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

inline void check_num_blocks(uint32_t num_device_blocks, uint32_t num_host_blocks) {
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();  // indices are int32
  if (num_device_blocks > kMost || num_host_blocks > kMost)
    throw py::value_error("a tier must have fewer than 2^31 blocks");
}

// `settings`: by name, as in kvplane_blocks/_native.pyi; those that are missing have a default.
inline PoolConfig make_config(uint32_t block_size_tokens, const py::kwargs& settings) {
  PoolConfig config;
  size_t num_known = 0;
  const auto read_setting = [&](const char* name, auto& value) {
    if (!settings.contains(name)) return;
    value = settings[name].cast<std::decay_t<decltype(value)>>();
    ++num_known;
  };
  py::bytes generations[2];
  read_setting("device_generations", generations[0]);
  read_setting("host_generations", generations[1]);
  read_setting("eviction_policy", config.eviction_policy);
  read_setting("window_tokens", config.window_tokens);
  read_setting("holds_states", config.holds_states);
  read_setting("max_sequences", config.max_sequences);
  read_setting("max_table_entries", config.max_table_entries);
  read_setting("max_pinned_blocks", config.max_pinned_blocks);
  read_setting("max_owner_blocks", config.max_owner_blocks);
  read_setting("seed", config.seed);
  if (num_known != settings.size()) throw py::type_error("there is no such setting");
  if (block_size_tokens < 1 || block_size_tokens > 256 || 256 % block_size_tokens)
    throw py::value_error("block_size_tokens must be a power of two up to 256");
  if (config.window_tokens < 0) throw py::value_error("window_tokens must not be negative");
  if (config.window_tokens && config.holds_states)
    throw py::value_error("holds_states must not be set with window_tokens");
  if (config.max_owner_blocks < 0) throw py::value_error("max_owner_blocks must not be negative");
  config.block_size_tokens = block_size_tokens;
  for (int t = 0; t < 2; ++t) {
    const auto known = read<int64_t>(generations[t], "generations");
    config.generations[t].assign(known.data, known.data + known.size);
  }
  return config;
}

}  // namespace kvplane::blocks

// Tiers are ints in Python.
template <>
struct pybind11::detail::type_caster<kvplane::blocks::Tier> {
  PYBIND11_TYPE_CASTER(kvplane::blocks::Tier, const_name("int"));
  bool load(handle source, bool convert) {
    type_caster<int> number;
    if (!number.load(source, convert)) return false;
    value = static_cast<kvplane::blocks::Tier>(static_cast<int>(number));
    if (value != kvplane::blocks::kDevice && value != kvplane::blocks::kHost)
      throw value_error("tier must be 1 or 2");
    return true;
  }
};
