#include <algorithm>
#include <string>
#include <string_view>

#include "bindings/bindings.h"
#include "index/hash.h"

namespace py = pybind11;
using namespace py::literals;

namespace kvplane::blocks {
namespace {

py::bytes as_bytes(const Hash& hash) {
  return py::bytes(reinterpret_cast<const char*>(hash.data()), hash.size());
}

py::bytes bind_chained_hash(const py::bytes& parent_hash, const py::bytes& tokens) {
  const std::string_view parent = parent_hash;
  const std::string_view columns = tokens;
  Hash hash;
  if (parent.size() != hash.size()) {
    throw py::value_error("parent_hash must have 16 bytes, has " + std::to_string(parent.size()));
  }
  std::copy(parent.begin(), parent.end(), hash.begin());
  return as_bytes(chained_hash(hash, columns.data(), columns.size()));
}

}  // namespace

void bind_hashes(py::module_& module) {
  module.def(
      "root_hash", [](const py::bytes& root) { return as_bytes(root_hash(root)); }, "root"_a);
  module.def("chained_hash", &bind_chained_hash, "parent_hash"_a, "tokens"_a);
}

}  // namespace kvplane::blocks
