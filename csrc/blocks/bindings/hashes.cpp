#include <algorithm>
#include <string>
#include <string_view>

#include "bindings/bindings.h"
#include "index/hash.h"

namespace py = pybind11;

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

// Of each prefix of a prompt that ends with a full block.
py::bytes bind_prompt_hashes(const py::bytes& root, const py::bytes& token_ids,
                             int64_t block_size_tokens) {
  if (block_size_tokens < 1) throw py::value_error("block_size_tokens must be at least 1");
  const std::string_view tokens = token_ids;
  std::string hashes;
  Hash hash = root_hash(std::string_view(root));
  if (static_cast<uint64_t>(block_size_tokens) > tokens.size()) return py::bytes(hashes);
  const size_t block_bytes = static_cast<size_t>(block_size_tokens) * sizeof(int32_t);
  hashes.reserve(tokens.size() / block_bytes * sizeof(Hash));
  for (size_t end = block_bytes; end <= tokens.size(); end += block_bytes) {
    hash = chained_hash(hash, tokens.data() + end - block_bytes, block_bytes);
    hashes.append(hash.begin(), hash.end());
  }
  return py::bytes(hashes);
}

}  // namespace

void bind_hashes(py::module_& module) {
  module.def(
      "root_hash", [](const py::bytes& root) { return as_bytes(root_hash(root)); },
      py::arg("root"));
  module.def("chained_hash", &bind_chained_hash, py::arg("parent_hash"), py::arg("tokens"));
  module.def("prompt_hashes", &bind_prompt_hashes, py::arg("root"), py::arg("token_ids"),
             py::arg("block_size_tokens"));
}

}  // namespace kvplane::blocks
