// Columns go in as bytes and come out as bytes; nothing is made for a sequence or a block.
#include "core/pool.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

using PoolClass = py::class_<Pool>;

// Blocks that one call announces: a few milliseconds.
constexpr size_t kMaxAnnounced = 16384;

std::unique_ptr<Pool> make_pool(uint32_t block_size_tokens, uint32_t num_device_blocks,
                                uint32_t num_host_blocks, const py::bytes& device_generations,
                                const py::bytes& host_generations,
                                const std::string& eviction_policy, int64_t window_tokens,
                                int64_t max_sequences, int64_t max_table_entries,
                                int64_t max_owner_blocks, uint64_t seed) {
  check_num_blocks(num_device_blocks, num_host_blocks);
  PoolConfig config =
      make_config(block_size_tokens, device_generations, host_generations, eviction_policy,
                  window_tokens, max_sequences, max_table_entries, max_owner_blocks, seed);
  config.num_blocks[0] = num_device_blocks;
  config.num_blocks[1] = num_host_blocks;
  return std::make_unique<Pool>(std::move(config));
}

std::unique_ptr<GroupedPool> make_grouped_pool(const py::list& groups) {
  std::vector<Pool*> pools;
  for (const py::handle group : groups) pools.push_back(group.cast<Pool*>());
  if (pools.empty() || pools.size() > 255) throw py::value_error("there must be 1 to 255 groups");
  for (const Pool* pool : pools)
    if (pool->index().block_size() != pools[0]->index().block_size())
      throw py::value_error("all groups must have one block size");
  return std::make_unique<GroupedPool>(std::move(pools));
}

py::tuple states(const Pool& pool, SessionHandle handle, const py::object& sequence_ids) {
  std::vector<const Sequence*> found;
  if (sequence_ids.is_none()) {
    found = pool.sequences_of(checked(pool, handle));
  } else {
    const py::bytes column = sequence_ids;
    const auto ids = read<int64_t>(column, "sequence_ids");
    for (int64_t i = 0; i < ids.size; ++i) found.push_back(&sequence_of(pool, handle, ids[i]));
  }
  std::vector<int64_t> ids, admitted_by;
  std::vector<int32_t> num_tokens, scheduled, written, cached, num_blocks;
  std::vector<uint8_t> tiers;
  for (auto* column : {&ids, &admitted_by}) column->reserve(found.size());
  for (auto* column : {&num_tokens, &scheduled, &written, &cached, &num_blocks})
    column->reserve(found.size());
  tiers.reserve(found.size());
  for (const Sequence* sequence : found) {
    ids.push_back(sequence->id);
    admitted_by.push_back(sequence->admitted_by);
    num_tokens.push_back(static_cast<int32_t>(sequence->tokens.size));
    scheduled.push_back(static_cast<int32_t>(sequence->num_scheduled));
    written.push_back(static_cast<int32_t>(sequence->num_written));
    cached.push_back(static_cast<int32_t>(sequence->num_cached));
    num_blocks.push_back(static_cast<int32_t>(sequence->table.size));
    tiers.push_back(sequence->tier);
  }
  return py::make_tuple(pack(ids), pack(admitted_by), pack(num_tokens), pack(scheduled),
                        pack(written), pack(cached), pack(num_blocks), pack(tiers));
}

py::tuple table(const Pool& pool, SessionHandle handle, int64_t sequence_id) {
  const Sequence& sequence = sequence_of(pool, handle, sequence_id);
  const std::vector<Block> blocks = pool.table_of(sequence);
  std::vector<int64_t> generations;
  for (const Block b : blocks)
    generations.push_back(b == kNoBlock ? 0 : pool.store(sequence.tier).generation(b));
  return py::make_tuple(static_cast<int>(sequence.tier), pack(blocks), pack(generations),
                        sequence.tokens.size, sequence.num_trimmed);
}

py::tuple match(const Pool& pool, const std::vector<EntryId>& found) {
  int64_t num_device = 0, num_host = 0;
  std::string hashes;
  for (const EntryId e : found) {
    const Entry& entry = pool.index()[e];
    // An entry without blocks lies behind the attention window.
    const bool on_device = entry.block(kDevice) != kNoBlock || entry.block(kHost) == kNoBlock;
    if (on_device && !num_host)
      ++num_device;
    else
      ++num_host;
    const Hash& hash = pool.index().hash(e);
    hashes.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  }
  return py::make_tuple(num_device, num_host, py::bytes(hashes));
}

// Columns of the blocks of the entries that were found.
py::tuple explain(const Pool& pool, const std::vector<EntryId>& found) {
  std::string hashes;
  std::vector<uint8_t> tiers, priorities;
  std::vector<int32_t> indices, ref_counts;
  std::vector<int64_t> generations, num_hits, ages_ms, idle_ms;
  for (const EntryId e : found) {
    const Entry& entry = pool.index()[e];
    if (entry.block(kDevice) == kNoBlock && entry.block(kHost) == kNoBlock) continue;
    const Tier tier = entry.block(kDevice) != kNoBlock ? kDevice : kHost;
    const BlockStore& blocks = pool.store(tier);
    const Block b = entry.block(tier);
    const Hash& hash = pool.index().hash(e);
    hashes.append(reinterpret_cast<const char*>(hash.data()), hash.size());
    tiers.push_back(tier);
    indices.push_back(static_cast<int32_t>(b));
    generations.push_back(blocks.generation(b));
    ref_counts.push_back(static_cast<int32_t>(blocks.ref_count(b)));
    num_hits.push_back(entry.num_uses);
    ages_ms.push_back(static_cast<int64_t>((pool.now_s() - entry.published_s) * 1000));
    const double idle_s = blocks.ref_count(b) ? 0 : pool.now_s() - entry.used_s;
    idle_ms.push_back(static_cast<int64_t>(idle_s * 1000));
    priorities.push_back(blocks.priority(b));
  }
  return py::make_tuple(py::bytes(hashes), pack(tiers), pack(indices), pack(generations),
                        pack(ref_counts), pack(num_hits), pack(ages_ms), pack(idle_ms),
                        pack(priorities));
}

py::bytes unwritten_bytes(size_t num) {
  PyObject* const bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num));
  if (!bytes) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

// The columns of some announced blocks of one root.
py::tuple publication(const Pool& pool, EntryId root, const std::vector<EntryId>& entries) {
  const PrefixIndex& index = pool.index();
  const BlockStore& device = pool.store(kDevice);
  const size_t num = entries.size(), size = index.block_size() * sizeof(int32_t);
  std::vector<int32_t> indices(num), parents(num);
  std::vector<int64_t> generations(num), parent_generations(num);
  // Written in place: copying a long prompt's tokens takes longer than everything else.
  const py::bytes hashes = unwritten_bytes(num * sizeof(Hash)),
                  tokens = unwritten_bytes(num * size);
  char* const to_hashes = PyBytes_AS_STRING(hashes.ptr());
  char* const to_tokens = PyBytes_AS_STRING(tokens.ptr());
  for (size_t i = 0; i < num; ++i) {
    const Entry& entry = index[entries[i]];
    const Block parent = index[entry.parent].block(kDevice);
    indices[i] = static_cast<int32_t>(entry.block(kDevice));
    generations[i] = device.generation(entry.block(kDevice));
    parents[i] = static_cast<int32_t>(parent);
    parent_generations[i] = parent == kNoBlock ? 0 : device.generation(parent);
    std::memcpy(to_hashes + i * sizeof(Hash), index.hash(entries[i]).data(), sizeof(Hash));
    std::memcpy(to_tokens + i * size, index.tokens(entries[i]), size);
  }
  return py::make_tuple(py::bytes(index.root_name(root)), pack(indices), pack(generations),
                        pack(parents), pack(parent_generations), hashes, tokens);
}

// Runs of one root of at most max_blocks.
py::list publications(const Pool& pool, const std::vector<Pool::Announcement>& announcements,
                      size_t max_blocks) {
  py::list runs;
  std::vector<EntryId> run;
  EntryId root = kNoEntry;
  auto end_run = [&] {
    if (!run.empty()) runs.append(publication(pool, root, run));
    run.clear();
  };
  for (const Pool::Announcement& item : announcements) {
    if (item.root != root || run.size() == max_blocks) end_run();
    root = item.root;
    run.push_back(item.entry);
  }
  end_run();
  return runs;
}

py::list take_publications(Pool& pool, size_t max_blocks) {
  if (!pool.has_announcements()) return py::list();
  return publications(pool, pool.take_announcements(kMaxAnnounced), max_blocks);
}

// Publications in device blocks [begin, end) whose parents the data planes know; the indices and
// generations of allocated blocks there that hold nothing that can be found; and the first block
// that was not scanned.
py::tuple publications_in(const Pool& pool, size_t begin, size_t end) {
  const BlockStore& device = pool.store(kDevice);
  Block last = static_cast<Block>(std::min<size_t>(end, device.num_blocks));
  const auto first = static_cast<Block>(std::min<size_t>(begin, last));
  std::vector<Pool::Announcement> found = pool.findable_in(first, last);
  std::vector<bool> holds(last - first);
  for (const Pool::Announcement& item : found)
    holds[pool.index()[item.entry].block(kDevice) - first] = true;
  std::vector<int32_t> indices;
  std::vector<int64_t> generations;
  for (Block b = first; b < last; ++b)
    if (!holds[b - first] && device.generation(b) > 0) {
      indices.push_back(static_cast<int32_t>(b));
      generations.push_back(device.generation(b));
    }
  found.erase(std::remove_if(found.begin(), found.end(),
                             [&](const Pool::Announcement& item) {
                               return !pool.index().follows_device(item.entry);
                             }),
              found.end());
  return py::make_tuple(publications(pool, found, found.size()), pack(indices), pack(generations),
                        last);
}

template <typename P>
void bind_families(py::class_<P>& pool) {
  pool.def(
      "take_family_events",
      [](P& self, SessionHandle handle) -> py::object {
        const std::vector<FamilyEvent> events = self.take_family_events(checked(self, handle));
        if (events.empty()) return py::tuple();
        py::list list;
        for (const auto& [change, family] : events)
          list.append(py::make_tuple(static_cast<int>(change), family));
        return list;
      },
      py::arg("handle"));
  pool.def(
      "family_of",
      [](const P& self, SessionHandle handle, int64_t id) {
        return sequence_of(self, handle, id).family;
      },
      py::arg("handle"), py::arg("sequence_id"));
  pool.def(
      "family_on_device",
      [](const P& self, SessionHandle handle, int64_t family) {
        return pack(first_of(self).on_device(checked(self, handle), family));
      },
      py::arg("handle"), py::arg("family"));
  pool.def(
      "family_held",
      [](const P& self, SessionHandle handle, int64_t family) {
        int64_t num = 0;
        for (const int64_t id : first_of(self).on_device(checked(self, handle), family))
          num += self.num_held(handle, id);
        return num;
      },
      py::arg("handle"), py::arg("family"));
  pool.def(
      "num_device_blocks_held",
      [](const P& self, SessionHandle handle) {
        int64_t num = 0;
        bool some_on_host = false;
        for (const Sequence* sequence : first_of(self).sequences_of(checked(self, handle))) {
          some_on_host = some_on_host || !sequence->claims_device;
          if (sequence->claims_device) num += self.num_held(handle, sequence->id);
        }
        return some_on_host ? num : self.num_blocks_held(handle);
      },
      py::arg("handle"));
  pool.def(
      "family_progress",
      [](const P& self, SessionHandle handle, int64_t family) {
        std::pair<double, bool> latest{0, false};
        for (const int64_t id : first_of(self).on_device(checked(self, handle), family)) {
          const Sequence& sequence = *first_of(self).find(handle, id);
          latest.first = std::max(latest.first, sequence.progress_s);
          latest.second = latest.second || !sequence.pending.empty();
        }
        return latest;
      },
      py::arg("handle"), py::arg("family"));
}

template <typename P>
void bind_sessions(py::class_<P>& pool) {
  pool.def(
      "open_session",
      [](P& self, const py::bytes& root, uint32_t owner) {
        return self.open_session(std::string_view(root), owner);
      },
      py::arg("root"), py::arg("owner"));
  pool.def(
      "end_session",
      [](P& self, SessionHandle handle, int64_t max_blocks) {
        self.end_session(checked(self, handle));
        return self.end_some(handle, max_blocks);
      },
      py::arg("handle"), py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "end_some",
      [](P& self, SessionHandle handle, int64_t max_blocks) {
        if (!first_of(self).is_unfenced(handle))
          throw py::index_error("no ended session has this handle");
        return self.end_some(handle, max_blocks);
      },
      py::arg("handle"), py::arg("max_blocks"));
  pool.def(
      "session_fenced",
      [](P& self, SessionHandle handle) {
        if (!first_of(self).is_unfenced(handle) || self.is_ending(handle))
          throw py::index_error("no session that has ended has this handle");
        self.session_fenced(handle);
      },
      py::arg("handle"));
  pool.def(
      "begin",
      [](P& self, SessionHandle handle, int64_t number) {
        self.begin(checked(self, handle), number);
      },
      py::arg("handle"), py::arg("number"));
  pool.def(
      "receipted",
      [](P& self, SessionHandle handle, int64_t plan, int64_t max_blocks) {
        return self.receipted(checked(self, handle), plan, max_blocks);
      },
      py::arg("handle"), py::arg("plan"),
      py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "abort",
      [](P& self, SessionHandle handle, int64_t next_plan, bool keeps_tables, int64_t max_blocks) {
        checked(self, handle);
        return in_groups(self, [&](Groups groups) {
          return Pool::abort(groups, handle, next_plan, keeps_tables, max_blocks);
        });
      },
      py::arg("handle"), py::arg("next_plan"), py::arg("keeps_tables") = true,
      py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "num_unsent",
      [](P& self, SessionHandle handle) {
        checked(self, handle);
        return in_groups(self, [&](Groups groups) {
          int64_t num = 0;
          for (int64_t g = 0; g < groups.size; ++g)
            for (const Sequence* sequence : groups[g]->sequences_of(handle))
              num += sequence->table.size - num_sent(groups[g]->session(handle), *sequence);
          return num;
        });
      },
      py::arg("handle"));
  pool.def(
      "resync_due",
      [](const P& self, SessionHandle handle) {
        return first_of(self).session(checked(self, handle)).resync_due;
      },
      py::arg("handle"));
  pool.def(
      "plans_in_flight",
      [](const P& self, SessionHandle handle) {
        const Session& session = first_of(self).session(checked(self, handle));
        return session.aborting.begun ? 0 : session.plans.size();
      },
      py::arg("handle"));
  pool.def(
      "last_plan",
      [](const P& self, SessionHandle handle) {
        return first_of(self).session(checked(self, handle)).last_plan;
      },
      py::arg("handle"));
  pool.def(
      "num_sequences",
      [](const P& self, SessionHandle handle) {
        return first_of(self).session(checked(self, handle)).sequences.size();
      },
      py::arg("handle"));
  pool.def(
      "has_sequence",
      [](const P& self, SessionHandle handle, int64_t id) {
        return first_of(self).find(checked(self, handle), id) != nullptr;
      },
      py::arg("handle"), py::arg("sequence_id"));
  bind_families(pool);
  pool.def(
      "num_blocks_held",
      [](const P& self, SessionHandle handle) {
        return self.num_blocks_held(checked(self, handle));
      },
      py::arg("handle"));
  pool.def(
      "sequence_ids",
      [](const P& self, SessionHandle handle) {
        std::vector<int64_t> ids;
        for (const Sequence* sequence : first_of(self).sequences_of(checked(self, handle)))
          ids.push_back(sequence->id);
        return pack(ids);
      },
      py::arg("handle"));
  pool.def(
      "states",
      [](const P& self, SessionHandle handle, const py::object& sequence_ids) {
        return states(first_of(self), handle, sequence_ids);
      },
      py::arg("handle"), py::arg("sequence_ids"));
  pool.def(
      "match",
      [](const P& self, const py::bytes& root, const py::bytes& token_ids) {
        return match(first_of(self),
                     self.match(std::string_view(root), read<int32_t>(token_ids, "token_ids")));
      },
      py::arg("root"), py::arg("token_ids"));
  pool.def(
      "num_obtainable",
      [](const P& self, SessionHandle handle, int tier) {
        return self.num_obtainable(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "num_pending",
      [](const P& self, SessionHandle handle, int tier) {
        return self.num_coming(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "num_own_retired",
      [](const P& self, SessionHandle handle, int tier) {
        return self.num_own_retired(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "usage",
      [](const P& self, int tier_number) {
        const Tier tier = tier_of(tier_number);
        const auto num_in = [&](State state) { return self.num_in(tier, state); };
        return py::make_tuple(self.num_blocks(tier), num_in(State::kFree), num_in(State::kCached),
                              num_in(State::kHeld) + num_in(State::kPinned),
                              num_in(State::kRetired));
      },
      py::arg("tier"));
}

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

void bind_queries(PoolClass& pool) {
  pool.def("block_map", &block_map, py::arg("tier"), py::arg("max_cells"));
  pool.def("table", &table, py::arg("handle"), py::arg("sequence_id"));
  pool.def(
      "match_hashes",
      [](const Pool& self, const py::bytes& root, const py::bytes& hashes) {
        return match(self, self.index().match_hashes(self.index().find_root(std::string_view(root)),
                                                     read<uint8_t>(hashes, "hashes")));
      },
      py::arg("root"), py::arg("hashes"));
  pool.def(
      "explain",
      [](const Pool& self, const py::bytes& root, const py::bytes& token_ids) {
        return explain(self,
                       self.match(std::string_view(root), read<int32_t>(token_ids, "token_ids")));
      },
      py::arg("root"), py::arg("token_ids"));
  pool.def(
      "explain_hashes",
      [](const Pool& self, const py::bytes& root, const py::bytes& hashes) {
        return explain(self,
                       self.index().match_hashes(self.index().find_root(std::string_view(root)),
                                                 read<uint8_t>(hashes, "hashes")));
      },
      py::arg("root"), py::arg("hashes"));
  pool.def("num_owned", &Pool::num_owned, py::arg("owner"));
  pool.def("counters", [](const Pool& self) {
    const Counters& c = self.counters();
    return py::make_tuple(
        c.num_lookup_tokens, c.num_hit_tokens, c.num_copies_on_write, c.num_swapped_out,
        c.num_swapped_in, self.store(kDevice).num_evictions() + self.store(kHost).num_evictions(),
        c.num_publications, c.max_held, c.num_host_hit_tokens, c.num_demoted, c.num_forgotten);
  });
  pool.def_property_readonly("num_touched", &Pool::num_touched);
  pool.def_property_readonly("revision", [](const Pool& self) { return self.feed().revision(); });
  pool.def(
      "generations",
      [](const Pool& self, int tier) { return pack(self.store(tier_of(tier)).generations()); },
      py::arg("tier"));
  pool.def("take_publications", &take_publications, py::arg("max_blocks"));
  pool.def_property_readonly("has_publications", &Pool::has_announcements);
  pool.def(
      "all_publications",
      [](const Pool& self, size_t max_blocks) {
        return publications(self, self.findable(), max_blocks);
      },
      py::arg("max_blocks"));
  pool.def("publications_in", &publications_in, py::arg("begin"), py::arg("end"));
  pool.def("check_integrity", [](const Pool& self) {
    try {
      self.check();
    } catch (const std::logic_error& error) {
      PyErr_SetString(PyExc_AssertionError, error.what());
      throw py::error_already_set();
    }
  });
}

}  // namespace

void bind_pool(py::module_& module) {
  static py::exception<ColumnError> column_error(module, "ColumnError", PyExc_ValueError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const ColumnError& error) {
      PyErr_SetObject(column_error.ptr(),
                      py::make_tuple(error.column, error.index, error.text).ptr());
    }
  });
  PoolClass pool(module, "Pool");
  pool.def(py::init(&make_pool), py::arg("block_size_tokens"), py::arg("num_device_blocks"),
           py::arg("num_host_blocks"), py::arg("device_generations"), py::arg("host_generations"),
           py::arg("eviction_policy"), py::arg("window_tokens") = 0,
           py::arg("max_sequences") = 65536, py::arg("max_table_entries") = 4194304,
           py::arg("max_owner_blocks") = 0, py::arg("seed") = 0);
  pool.def(
      "set_time",
      [](Pool& self, double now_s) {
        if (!(now_s >= 0 && now_s < 1e12)) throw py::value_error("now_s must be from 0 to 1e12");
        self.set_time(now_s);
      },
      py::arg("now_s"));
  bind_sessions(pool);
  bind_queries(pool);
  py::class_<GroupedPool> grouped(module, "GroupedPool");
  grouped.def(py::init(&make_grouped_pool), py::arg("groups"), py::keep_alive<1, 2>());
  bind_sessions(grouped);
}

}  // namespace kvplane::blocks
