// One layer group: its blocks, tables and prefixes. Columns go in as bytes and come out as bytes;
// nothing is made for a sequence or a block.
#include "pool/layer_group.h"

#include <pybind11/typing.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// Blocks that one call announces: a few milliseconds.
constexpr size_t kMaxAnnounced = 16384;

std::unique_ptr<LayerGroup> make_group(uint32_t block_size_tokens, uint32_t num_device_blocks,
                                       uint32_t num_host_blocks, const py::kwargs& settings) {
  check_num_blocks(num_device_blocks, num_host_blocks);
  PoolConfig config = make_config(block_size_tokens, settings);
  config.num_blocks[0] = num_device_blocks;
  config.num_blocks[1] = num_host_blocks;
  return std::make_unique<LayerGroup>(std::move(config));
}

py::tuple usage(const LayerGroup& group, Tier tier) {
  const BlockStore& blocks = group.stores[tier];
  const auto num_in = [&](State state) { return blocks.num_in(state); };
  return py::make_tuple(blocks.num_blocks, num_in(State::kFree), num_in(State::kCached),
                        num_in(State::kHeld) + num_in(State::kPinned), num_in(State::kRetired));
}

py::tuple table(const LayerGroup& group, SessionHandle handle, int64_t sequence_id) {
  const Sequence& sequence = sequence_of(group, handle, sequence_id);
  const std::vector<Block> blocks = group.tables.blocks_of(sequence);
  std::vector<int64_t> generations;
  for (const Block b : blocks)
    generations.push_back(b == kNoBlock ? 0 : group.stores[sequence.tier].generation(b));
  return py::make_tuple(static_cast<int>(sequence.tier), pack(blocks), pack(generations),
                        sequence.tokens.size, sequence.num_trimmed);
}

// The columns of some announced blocks of one root.
py::tuple publication(const LayerGroup& group, EntryId root, const std::vector<EntryId>& entries) {
  const PrefixIndex& index = group.index;
  const BlockStore& device = group.stores[kDevice];
  const size_t num = entries.size(), size = index.block_size() * sizeof(int32_t);
  std::vector<int32_t> indices(num), parents(num);
  std::vector<int64_t> generations(num), parent_generations(num);
  // Written in place: copying a long prompt's tokens takes longer than everything else.
  const py::bytes hashes = make_bytes(num * sizeof(Hash)), tokens = make_bytes(num * size);
  char* const to_hashes = PyBytes_AS_STRING(hashes.ptr());
  char* const to_tokens = PyBytes_AS_STRING(tokens.ptr());
  for (size_t i = 0; i < num; ++i) {
    const Entry& entry = index[entries[i]];
    const auto [parent, parent_generation] = *group.announcements.parent_of(entries[i]);
    indices[i] = static_cast<int32_t>(entry.block(kDevice));
    generations[i] = device.generation(entry.block(kDevice));
    parents[i] = static_cast<int32_t>(parent);
    parent_generations[i] = parent_generation;
    std::memcpy(to_hashes + i * sizeof(Hash), index.hash(entries[i]).data(), sizeof(Hash));
    std::memcpy(to_tokens + i * size, index.tokens(entries[i]), size);
  }
  return py::make_tuple(py::bytes(index.root_name(root)), pack(indices), pack(generations),
                        pack(parents), pack(parent_generations), hashes, tokens);
}

// Runs of one root of at most max_blocks.
py::list publications(const LayerGroup& group, const std::vector<Announcement>& announcements,
                      size_t max_blocks) {
  py::list runs;
  std::vector<EntryId> run;
  EntryId root = kNoEntry;
  auto end_run = [&] {
    if (!run.empty()) runs.append(publication(group, root, run));
    run.clear();
  };
  for (const Announcement& item : announcements) {
    if (item.root != root || run.size() == max_blocks) end_run();
    root = item.root;
    run.push_back(item.entry);
  }
  end_run();
  return runs;
}

py::list take_publications(LayerGroup& group, size_t max_blocks) {
  if (group.announcements.empty()) return py::list();
  return publications(group, group.announcements.take(kMaxAnnounced), max_blocks);
}

// Publications in device blocks [begin, end) whose parents the data planes know; the indices and
// generations of allocated blocks there that hold nothing that can be found; and the first block
// that was not scanned.
py::tuple publications_in(const LayerGroup& group, size_t begin, size_t end) {
  const BlockStore& device = group.stores[kDevice];
  Block last = static_cast<Block>(std::min<size_t>(end, device.num_blocks));
  const auto first = static_cast<Block>(std::min<size_t>(begin, last));
  std::vector<Announcement> found = group.announcements.all_in(first, last);
  std::vector<bool> holds(last - first);
  for (const Announcement& item : found)
    holds[group.index[item.entry].block(kDevice) - first] = true;
  std::vector<int32_t> indices;
  std::vector<int64_t> generations;
  for (Block b = first; b < last; ++b)
    if (!holds[b - first] && device.generation(b) > 0) {
      indices.push_back(static_cast<int32_t>(b));
      generations.push_back(device.generation(b));
    }
  found.erase(std::remove_if(found.begin(), found.end(),
                             [&](const Announcement& item) {
                               return !group.announcements.parent_of(item.entry);
                             }),
              found.end());
  return py::make_tuple(publications(group, found, found.size()), pack(indices), pack(generations),
                        last);
}

// The state that most blocks of each cell are in; a cell is `blocks_per_cell` neighbours.
py::tuple block_map(const LayerGroup& group, Tier tier, uint32_t max_cells) {
  if (!max_cells) throw py::value_error("max_cells must be at least 1");
  const BlockStore& blocks = group.stores[tier];
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

void bind_queries(GroupClass& group) {
  group.def("block_map", &block_map, "tier"_a, "max_cells"_a);
  group.def("usage", &usage, "tier"_a);
  group.def("states", &states_of, "handle"_a, "sequence_ids"_a);
  group.def(
      "num_blocks_held",
      [](const LayerGroup& self, SessionHandle handle) {
        return self.sessions[checked(self, handle)].num_held;
      },
      "handle"_a);
  group.def("table", &table, "handle"_a, "sequence_id"_a);
  group.def(
      "num_owned",
      [](const LayerGroup& self, uint32_t owner) { return self.tables.num_owned(owner); },
      "owner"_a);
  group.def("counters", [](const LayerGroup& self) {
    const Counters& c = self.counters;
    return py::make_tuple(c.num_lookup_tokens, c.num_hit_tokens, c.num_copies_on_write,
                          c.num_swapped_out, c.num_swapped_in, c.num_evictions, c.num_publications,
                          c.max_held, c.num_host_hit_tokens, c.num_demoted, c.num_forgotten);
  });
  group.def_property_readonly("num_touched", &LayerGroup::num_touched);
  group.def_property_readonly("revision",
                              [](const LayerGroup& self) { return self.feed.revision(); });
  group.def(
      "generations",
      [](const LayerGroup& self, Tier tier) { return pack(self.stores[tier].generations()); },
      "tier"_a);
  group.def("take_publications", &take_publications, "max_blocks"_a);
  group.def_property_readonly("has_publications",
                              [](const LayerGroup& self) { return !self.announcements.empty(); });
  group.def_property_readonly(
      "has_withdrawn", [](const LayerGroup& self) { return !self.forgetter.withdrawn().empty(); });
  group.def("publications_in", &publications_in, "begin"_a, "end"_a);
  group.def("check_integrity", [](const LayerGroup& self) {
    try {
      self.check();
    } catch (const std::logic_error& error) {
      PyErr_SetString(PyExc_AssertionError, error.what());
      throw py::error_already_set();
    }
  });
}

void bind_prefixes(GroupClass& group) {
  group.def(
      "num_retained",
      [](const LayerGroup& self, uint32_t owner) { return self.retention.num_entries(owner); },
      "owner"_a);
  group.def("roots", [](const LayerGroup& self) {
    py::list names;
    for (const EntryId root : self.index.roots())
      names.append(py::bytes(self.index.root_name(root)));
    return names;
  });
  group.def(
      "outdate", [](LayerGroup& self, bool all) { self.stores[kDevice].outdate(all); }, "all"_a);
  group.def(
      "forget_some",
      [](LayerGroup& self, int64_t max_entries) { return self.forgetter.forget_some(max_entries); },
      "max_entries"_a);
  group.def(
      "take_withdrawn",
      [](LayerGroup& self, size_t max_blocks) {
        std::vector<int32_t> indices;
        std::vector<int64_t> generations;
        auto& withdrawn = self.forgetter.withdrawn();
        for (; indices.size() < max_blocks && !withdrawn.empty(); withdrawn.pop_front()) {
          indices.push_back(static_cast<int32_t>(withdrawn.front().first));
          generations.push_back(withdrawn.front().second);
        }
        return py::make_tuple(pack(indices), pack(generations));
      },
      "max_blocks"_a);
}

// For each tier: evictions by reason, then three histograms, each its counts and its sum.
py::typing::List<double> block_times(const LayerGroup& group) {
  py::typing::List<double> values;
  for (const Tier tier : {kDevice, kHost}) {
    const BlockTimes& times = group.block_times[tier - 1];
    for (const int64_t num : times.num_evictions) values.append(static_cast<double>(num));
    for (const Durations* durations : {&times.lifetime, &times.idle, &times.reuse_gap}) {
      for (const int64_t num : durations->counts) values.append(static_cast<double>(num));
      values.append(durations->sum_s);
    }
  }
  return values;
}

void bind_metrics(GroupClass& group) {
  group.def("block_times", &block_times);
  group.def("num_sequences_in", &LayerGroup::num_sequences_in, "tier"_a);
  group.def("oldest_release_s", &LayerGroup::oldest_release_s);
}

void bind_watching(GroupClass& group) {
  group.def(
      "watch_enable", [](LayerGroup& self, size_t max_events) { self.feed.keep(max_events); },
      "max_events"_a);
  group.def(
      "changes_since",
      [](const LayerGroup& self, int64_t revision, const py::bytes& root,
         size_t max_events) -> py::typing::Optional<py::tuple> {
        ChangeColumns changes;
        if (!self.feed.log().since(revision, std::string_view(root), max_events, changes))
          return py::none();
        return py::make_tuple(changes.revision, pack(changes.kinds), pack(changes.tiers),
                              py::bytes(changes.hashes), py::bytes(changes.parent_hashes),
                              pack(changes.token_ids));
      },
      "revision"_a, "root"_a, "max_events"_a);
  group.def(
      "snapshot",
      [](const LayerGroup& self, const py::bytes& root, int64_t cursor, size_t max_blocks) {
        if (cursor < 0 || cursor > kNoEntry) throw py::value_error("cursor is not one of a part");
        ChangeColumns blocks;
        const EntryId next = snapshot(self.index, std::string_view(root),
                                      static_cast<EntryId>(cursor), max_blocks, blocks);
        return py::make_tuple(next == kNoEntry ? -1 : static_cast<int64_t>(next),
                              self.feed.revision(), pack(blocks.tiers), py::bytes(blocks.hashes),
                              py::bytes(blocks.parent_hashes), pack(blocks.token_ids));
      },
      "root"_a, "cursor"_a, "max_blocks"_a);
  group.def_property_readonly("num_token_chunks", [](const LayerGroup& self) {
    return self.sequences.tokens().num_used();
  });
  group.def("memory", [](const LayerGroup& self) {
    const PrefixIndex& index = self.index;
    return py::make_tuple(self.stores[kDevice].num_bytes() + self.stores[kHost].num_bytes() +
                              index.num_bytes_of_blocks(),
                          index.num_bytes_of_entries(), index.num_entries());
  });
}

}  // namespace

void bind_layer_group(GroupClass& group) {
  group.def(py::init(&make_group), "block_size_tokens"_a, "num_device_blocks"_a,
            "num_host_blocks"_a);
  group.def(
      "set_time",
      [](LayerGroup& self, double now_s) {
        if (!(now_s >= 0 && now_s < 1e12)) throw py::value_error("now_s must be from 0 to 1e12");
        self.set_time(now_s);
      },
      "now_s"_a);
  bind_queries(group);
  bind_prefixes(group);
  bind_metrics(group);
  bind_watching(group);
}

}  // namespace kvplane::blocks
