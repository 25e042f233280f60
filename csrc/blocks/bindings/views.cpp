// What people look at: a map of a tier's blocks, and the prefixes of a root as a tree.
#include <algorithm>
#include <array>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace kvplane::blocks {
namespace {

// The state that most blocks of each cell are in; a cell is `blocks_per_cell` neighbours.
py::tuple block_map(const Pool& pool, int tier, uint32_t max_cells) {
  if (!max_cells) throw py::value_error("max_cells must be at least 1");
  const BlockStore& blocks = pool.store(tier_of(tier));
  const auto per_cell =
      static_cast<uint32_t>(std::max<int64_t>(1, div_ceil(blocks.num_blocks, max_cells)));
  std::vector<uint8_t> states;
  for (uint32_t first = 0; first < blocks.num_blocks; first += per_cell) {
    std::array<uint32_t, kNumStates> num_in{};
    const uint32_t end = std::min(first + per_cell, blocks.num_blocks);
    for (Block b = first; b < end; ++b) ++num_in[static_cast<size_t>(blocks.state(b))];
    states.push_back(
        static_cast<uint8_t>(std::max_element(num_in.begin(), num_in.end()) - num_in.begin()));
  }
  return py::make_tuple(per_cell, pack(states));
}

// Whether a table refers to a block of the entry.
bool is_held(const Pool& pool, const Entry& entry) {
  const std::array tiers{kDevice, kHost};
  return std::any_of(tiers.begin(), tiers.end(), [&](Tier tier) {
    return entry.block(tier) != kNoBlock && pool.store(tier).ref_count(entry.block(tier));
  });
}

// A run of entries without branches.
struct Run {
  EntryId first;
  int32_t parent;  // the run that it hangs from, -1 for none
};

// The runs below a root, parents first, of at most max_entries entries. The hash is that of the
// last entry; hits, age and idle time are those of the entry hit most, published first and used
// last; what a table refers to is used now.
py::tuple prefix_tree(const Pool& pool, const py::bytes& root, int64_t max_entries) {
  const PrefixIndex& index = pool.index();
  std::vector<int32_t> parents, num_device, num_host;
  std::vector<int64_t> num_hits, ages_ms, idle_ms;
  std::string hashes;
  std::vector<Run> waiting;
  auto wait_for_children = [&](EntryId e, int32_t parent) {
    for (EntryId c = index[e].child; c != kNoEntry; c = index[c].next)
      waiting.push_back({c, parent});
  };
  const EntryId top = index.find_root(std::string_view(root));
  if (top != kNoEntry) wait_for_children(top, -1);
  const auto now_s = static_cast<float>(pool.now_s());
  int64_t num_seen = 0;
  while (!waiting.empty() && num_seen < max_entries) {
    const Run run = waiting.back();
    waiting.pop_back();
    int32_t on_device = 0, on_host = 0;
    uint32_t hits = 0;
    float published_s = now_s, used_s = 0;
    EntryId last = run.first;
    for (EntryId e = run.first; e != kNoEntry; e = index[e].child) {
      const Entry& entry = index[e];
      on_device += entry.block(kDevice) != kNoBlock;
      on_host += entry.block(kHost) != kNoBlock;
      hits = std::max(hits, entry.num_uses);
      published_s = std::min(published_s, entry.published_s);
      used_s = std::max(used_s, is_held(pool, entry) ? now_s : entry.used_s);
      last = e;
      ++num_seen;
      if (entry.child == kNoEntry || index[entry.child].next != kNoEntry || num_seen >= max_entries)
        break;
    }
    const auto place = static_cast<int32_t>(parents.size());
    parents.push_back(run.parent);
    num_device.push_back(on_device);
    num_host.push_back(on_host);
    num_hits.push_back(hits);
    ages_ms.push_back(static_cast<int64_t>((pool.now_s() - published_s) * 1000));
    idle_ms.push_back(static_cast<int64_t>((pool.now_s() - used_s) * 1000));
    hashes.append(reinterpret_cast<const char*>(index.hash(last).data()), sizeof(Hash));
    wait_for_children(last, place);
  }
  return py::make_tuple(waiting.empty(), pack(parents), pack(num_device), pack(num_host),
                        pack(num_hits), pack(ages_ms), pack(idle_ms), py::bytes(hashes));
}

}  // namespace

void bind_views(py::module_& module) {
  auto pool = py::reinterpret_borrow<py::class_<Pool>>(module.attr("Pool"));
  pool.def("block_map", &block_map, py::arg("tier"), py::arg("max_cells"));
  pool.def("prefix_tree", &prefix_tree, py::arg("root"), py::arg("max_entries"));
}

}  // namespace kvplane::blocks
