// Searches for cached prefixes, and descriptions of their blocks.
#include "pool/prefix_search.h"

#include <algorithm>
#include <string>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// With the bytes that it reads.
struct BoundSearch {
  py::bytes token_ids, hashes;
  PrefixSearch search;
};

std::unique_ptr<BoundSearch> make_search(Groups groups, const LayerGroup& primary,
                                         const py::bytes& root, const py::bytes& token_ids,
                                         const py::bytes& hashes, bool with_hashes) {
  PrefixSearch search(groups, primary, std::string_view(root),
                      read<int32_t>(token_ids, "token_ids"), read<uint8_t>(hashes, "hashes"),
                      with_hashes);
  return std::make_unique<BoundSearch>(BoundSearch{token_ids, hashes, std::move(search)});
}

// How many of the entries lie on the device, and how many, from the first that does not, follow.
std::pair<int64_t, int64_t> counts(const LayerGroup& group, const std::vector<EntryId>& found) {
  // An entry without blocks lies behind the attention window.
  const auto is_hosted = [&](EntryId e) {
    return group.index[e].block(kDevice) == kNoBlock && group.index[e].block(kHost) != kNoBlock;
  };
  const auto first_hosted = std::find_if(found.begin(), found.end(), is_hosted);
  return {first_hosted - found.begin(), found.end() - first_hosted};
}

std::string hashes_of(const LayerGroup& group, const std::vector<EntryId>& found) {
  std::string hashes;
  hashes.reserve(found.size() * sizeof(Hash));
  for (const EntryId e : found) {
    const Hash& hash = group.index.hash(e);
    hashes.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  }
  return hashes;
}

// Columns of the blocks of the entries; those behind the attention window have none.
py::tuple describe(const LayerGroup& group, std::vector<EntryId> found) {
  const PrefixIndex& index = group.index;
  found.erase(
      std::remove_if(found.begin(), found.end(), [&](EntryId e) { return !index[e].has_blocks(); }),
      found.end());
  const size_t num = found.size();
  std::vector<uint8_t> tiers(num), priorities(num);
  std::vector<int32_t> indices(num), ref_counts(num);
  std::vector<int64_t> generations(num), num_hits(num), ages_ms(num), idle_ms(num);
  for (size_t i = 0; i < num; ++i) {
    const Entry& entry = index[found[i]];
    const Tier tier = entry.block(kDevice) != kNoBlock ? kDevice : kHost;
    const BlockStore& blocks = group.stores[tier];
    const Block b = entry.block(tier);
    tiers[i] = tier;
    indices[i] = static_cast<int32_t>(b);
    generations[i] = blocks.generation(b);
    ref_counts[i] = static_cast<int32_t>(blocks.ref_count(b));
    num_hits[i] = entry.num_uses;
    ages_ms[i] = static_cast<int64_t>((group.now_s - entry.published_s) * 1000);
    const double idle_s = blocks.ref_count(b) ? 0 : group.now_s - entry.used_s;
    idle_ms[i] = static_cast<int64_t>(idle_s * 1000);
    priorities[i] = blocks.priority(b);
  }
  return py::make_tuple(py::bytes(hashes_of(group, found)), pack(tiers), pack(indices),
                        pack(generations), pack(ref_counts), pack(num_hits), pack(ages_ms),
                        pack(idle_ms), pack(priorities));
}

}  // namespace

void bind_searches(py::module_& module, PoolClass& pool) {
  py::class_<BoundSearch>(module, "PrefixSearch")
      .def(
          "search_some",
          [](BoundSearch& self, int64_t max_blocks) { return self.search.search_some(max_blocks); },
          "max_blocks"_a)
      .def("counts",
           [](const BoundSearch& self) {
             return counts(self.search.primary(), self.search.found());
           })
      .def("blocks", [](const BoundSearch& self) {
        return describe(self.search.primary(), self.search.found());
      });
  pool.def(
      "search",
      [](const Pool& self, const LayerGroup& primary, const py::bytes& root,
         const py::bytes& token_ids, const py::bytes& hashes, bool with_hashes) {
        return make_search(self.groups(), primary, root, token_ids, hashes, with_hashes);
      },
      "primary"_a, "root"_a, "token_ids"_a, "hashes"_a, "with_hashes"_a, py::keep_alive<0, 1>());
}

}  // namespace kvplane::blocks
