// Columns go in as bytes and come out as bytes; nothing is made for a sequence or a block.
#include "core/pool.h"

#include <cstring>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// Checks that num_tokens, each at_least or more, add up to the tokens given.
void check_tokens(Span<int32_t> num_tokens, Span<int32_t> token_ids, int32_t at_least) {
  int64_t sum = 0;
  for (int64_t i = 0; i < num_tokens.size; ++i) {
    if (num_tokens[i] < at_least)
      throw ColumnError("num_tokens", i, "must be at least " + std::to_string(at_least));
    sum += num_tokens[i];
  }
  if (sum != token_ids.size)
    throw ColumnError("token_ids", -1,
                      "must hold " + std::to_string(sum) +
                          " tokens of 4 bytes, the sum of "
                          "num_tokens, but holds " +
                          std::to_string(token_ids.size * 4) + " bytes");
}

py::tuple as_tuple(const Failure& failure) {
  return py::make_tuple(failure.item, static_cast<int>(failure.code), failure.a, failure.b,
                        failure.c);
}

py::object as_list(const std::vector<Failure>& failures) {
  if (failures.empty()) return py::none();
  py::list list;
  for (const Failure& failure : failures) list.append(as_tuple(failure));
  return list;
}

py::tuple as_tuple(const ItemResults& results) {
  return py::make_tuple(pack(results.values), as_list(results.failures));
}

py::tuple as_tuple(const std::variant<Admitted, Failure>& result) {
  if (const auto* failure = std::get_if<Failure>(&result)) return as_tuple(*failure);
  const auto& admitted = std::get<Admitted>(result);
  return py::make_tuple(admitted.num_cached_tokens, admitted.num_blocks,
                        admitted.num_scheduled_tokens);
}

Admission read_admission(int64_t sequence_id, const py::bytes& token_ids, const py::bytes& fork_ids,
                         int64_t num_compute, int64_t max_total_tokens, bool skip_lookup,
                         int64_t headroom) {
  Admission admission;
  admission.sequence_id = sequence_id;
  admission.tokens = read<int32_t>(token_ids, "token_ids");
  if (!admission.tokens.size) throw ColumnError("token_ids", -1, "must hold at least 1 token");
  admission.fork_ids = read<int64_t>(fork_ids, "fork_sequence_ids");
  admission.num_compute = num_compute;
  admission.max_total_tokens = max_total_tokens;
  admission.skip_lookup = skip_lookup;
  if (headroom < 0) throw py::value_error("headroom must not be negative");
  admission.headroom = headroom;
  return admission;
}

AppendColumns read_growth(const py::bytes& sequence_ids, const py::bytes& first_positions,
                          const py::bytes& num_slots, const py::bytes& num_lookahead) {
  AppendColumns columns;
  columns.sequence_ids = read<int64_t>(sequence_ids, "sequence_ids");
  const int64_t num = columns.sequence_ids.size;
  columns.first_positions = read<int64_t>(first_positions, "first_positions", num);
  columns.num_slots = read<int32_t>(num_slots, "num_slots", num);
  const int64_t num_ahead = std::string_view(num_lookahead).empty() ? 0 : num;
  columns.num_lookahead = read<int32_t>(num_lookahead, "num_lookahead_slots", num_ahead);
  return columns;
}

const Sequence& sequence_of(const Pool& pool, Slot slot, int64_t id) {
  const Sequence* sequence = pool.find(checked(pool, slot), id);
  if (!sequence) throw py::key_error(std::to_string(id));
  return *sequence;
}

std::unique_ptr<Pool> make_pool(uint32_t block_size_tokens, uint32_t num_device_blocks,
                                uint32_t num_host_blocks, const py::bytes& device_generations,
                                const py::bytes& host_generations,
                                const std::string& eviction_policy, int64_t window_tokens,
                                int64_t max_sequences, int64_t max_table_entries, uint64_t seed) {
  check_num_blocks(num_device_blocks, num_host_blocks);
  PoolConfig config =
      make_config(block_size_tokens, device_generations, host_generations, eviction_policy,
                  window_tokens, max_sequences, max_table_entries, seed);
  config.num_blocks[0] = num_device_blocks;
  config.num_blocks[1] = num_host_blocks;
  return std::make_unique<Pool>(std::move(config));
}

py::tuple states(const Pool& pool, Slot slot, const py::object& sequence_ids) {
  std::vector<const Sequence*> found;
  if (sequence_ids.is_none()) {
    found = pool.sequences_of(checked(pool, slot));
  } else {
    const py::bytes column = sequence_ids;
    const auto ids = read<int64_t>(column, "sequence_ids");
    for (int64_t i = 0; i < ids.size; ++i) found.push_back(&sequence_of(pool, slot, ids[i]));
  }
  std::vector<int64_t> ids, admitted_by, num_tokens, scheduled, written, cached;
  std::vector<int32_t> num_blocks;
  std::vector<uint8_t> tiers;
  for (const Sequence* sequence : found) {
    ids.push_back(sequence->id);
    admitted_by.push_back(sequence->admitted_by);
    num_tokens.push_back(sequence->tokens.size);
    scheduled.push_back(sequence->num_scheduled);
    written.push_back(sequence->num_written);
    cached.push_back(sequence->num_cached);
    num_blocks.push_back(static_cast<int32_t>(sequence->table.size));
    tiers.push_back(sequence->tier);
  }
  return py::make_tuple(pack(ids), pack(admitted_by), pack(num_tokens), pack(scheduled),
                        pack(written), pack(cached), pack(num_blocks), pack(tiers));
}

py::tuple table(const Pool& pool, Slot slot, int64_t sequence_id) {
  const Sequence& sequence = sequence_of(pool, slot, sequence_id);
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
    const bool on_device = entry.block(kDevice) != kNoBlock;
    if (on_device && !num_host)
      ++num_device;
    else
      ++num_host;
    hashes.append(reinterpret_cast<const char*>(entry.hash.data()), entry.hash.size());
  }
  return py::make_tuple(num_device, num_host, py::bytes(hashes));
}

py::tuple explain(const Pool& pool, const py::bytes& root, const py::bytes& token_ids) {
  std::vector<uint8_t> tiers, priorities;
  std::vector<int32_t> indices, ref_counts;
  std::vector<int64_t> generations, num_hits, ages_ms, idle_ms;
  for (const EntryId e :
       pool.match(std::string_view(root), read<int32_t>(token_ids, "token_ids"))) {
    const Entry& entry = pool.index()[e];
    if (entry.block(kDevice) == kNoBlock && entry.block(kHost) == kNoBlock) continue;
    const Tier tier = entry.block(kDevice) != kNoBlock ? kDevice : kHost;
    const BlockStore& blocks = pool.store(tier);
    const Block b = entry.block(tier);
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
  return py::make_tuple(pack(tiers), pack(indices), pack(generations), pack(ref_counts),
                        pack(num_hits), pack(ages_ms), pack(idle_ms), pack(priorities));
}

// The columns of some announced blocks of one root.
py::tuple publication(const Pool& pool, EntryId root, const std::vector<EntryId>& entries) {
  const PrefixIndex& index = pool.index();
  const BlockStore& device = pool.store(kDevice);
  const size_t num = entries.size(), size = index.block_size() * sizeof(int32_t);
  std::vector<int32_t> indices(num), parents(num);
  std::vector<int64_t> generations(num), parent_generations(num);
  std::string hashes(num * sizeof(Hash), '\0'), tokens(num * size, '\0');
  for (size_t i = 0; i < num; ++i) {
    const Entry& entry = index[entries[i]];
    const Block parent = index[entry.parent].block(kDevice);
    indices[i] = static_cast<int32_t>(entry.block(kDevice));
    generations[i] = device.generation(entry.block(kDevice));
    parents[i] = static_cast<int32_t>(parent);
    parent_generations[i] = parent == kNoBlock ? 0 : device.generation(parent);
    std::memcpy(&hashes[i * sizeof(Hash)], entry.hash.data(), sizeof(Hash));
    std::memcpy(&tokens[i * size], index.tokens(entries[i]), size);
  }
  return py::make_tuple(py::bytes(index.root_name(root)), pack(indices), pack(generations),
                        pack(parents), pack(parent_generations), py::bytes(hashes),
                        py::bytes(tokens));
}

// Runs of one root of at most max_blocks; what is no longer there is left out.
template <typename Announcements>
py::list publications(const Pool& pool, const Announcements& announcements, size_t max_blocks) {
  const PrefixIndex& index = pool.index();
  py::list runs;
  std::vector<EntryId> run;
  EntryId root = kNoEntry;
  auto end_run = [&] {
    if (!run.empty()) runs.append(publication(pool, root, run));
    run.clear();
  };
  for (const Pool::Announcement& item : announcements) {
    if (!index.alive(item.entry, item.uid) || index[item.entry].block(kDevice) == kNoBlock ||
        index.root_of(item.entry) != item.root || !index.is_named(item.root))
      continue;
    const EntryId parent = index[item.entry].parent;
    if (!index.is_root(parent) && index[parent].block(kDevice) == kNoBlock) continue;
    if (item.root != root || run.size() == max_blocks) end_run();
    root = item.root;
    run.push_back(item.entry);
  }
  end_run();
  return runs;
}

py::list take_publications(Pool& pool, size_t max_blocks) {
  if (pool.announcements().empty()) return py::list();
  py::list runs = publications(pool, pool.announcements(), max_blocks);
  pool.announcements().clear();
  return runs;
}

using PoolClass = py::class_<Pool>;

void bind_steps(PoolClass& pool) {
  pool.def(
      "admit",
      [](Pool& self, Slot slot, int64_t sequence_id, const py::bytes& token_ids,
         const py::bytes& fork_ids, int64_t num_compute, int64_t max_total_tokens, bool skip_lookup,
         int64_t headroom) {
        return as_tuple(self.admit(checked(self, slot),
                                   read_admission(sequence_id, token_ids, fork_ids, num_compute,
                                                  max_total_tokens, skip_lookup, headroom)));
      },
      py::arg("slot"), py::arg("sequence_id"), py::arg("token_ids"), py::arg("fork_ids"),
      py::arg("num_compute"), py::arg("max_total_tokens"), py::arg("skip_lookup"),
      py::arg("headroom"));
  pool.def(
      "grant",
      [](Pool& self, Slot slot, int64_t admitted_by, int64_t sequence_id,
         const py::bytes& token_ids, const py::bytes& fork_ids, int64_t num_compute,
         int64_t max_total_tokens, bool skip_lookup, int64_t headroom) {
        return as_tuple(self.grant(checked(self, slot), admitted_by,
                                   read_admission(sequence_id, token_ids, fork_ids, num_compute,
                                                  max_total_tokens, skip_lookup, headroom)));
      },
      py::arg("slot"), py::arg("admitted_by"), py::arg("sequence_id"), py::arg("token_ids"),
      py::arg("fork_ids"), py::arg("num_compute"), py::arg("max_total_tokens"),
      py::arg("skip_lookup"), py::arg("headroom"));
  pool.def(
      "append",
      [](Pool& self, Slot slot, const py::bytes& sequence_ids, const py::bytes& first_positions,
         const py::bytes& num_slots, const py::bytes& num_tokens, const py::bytes& token_ids,
         const py::bytes& num_lookahead) {
        AppendColumns columns =
            read_growth(sequence_ids, first_positions, num_slots, num_lookahead);
        columns.num_tokens = read<int32_t>(num_tokens, "num_tokens", columns.sequence_ids.size);
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        check_tokens(columns.num_tokens, columns.token_ids, 0);
        return as_tuple(self.append(checked(self, slot), columns));
      },
      py::arg("slot"), py::arg("sequence_ids"), py::arg("first_positions"), py::arg("num_slots"),
      py::arg("num_tokens"), py::arg("token_ids"), py::arg("num_lookahead"));
  pool.def(
      "growth",
      [](const Pool& self, Slot slot, const py::bytes& sequence_ids,
         const py::bytes& first_positions, const py::bytes& num_slots,
         const py::bytes& num_lookahead) {
        return pack(self.growth(checked(self, slot), read_growth(sequence_ids, first_positions,
                                                                 num_slots, num_lookahead)));
      },
      py::arg("slot"), py::arg("sequence_ids"), py::arg("first_positions"), py::arg("num_slots"),
      py::arg("num_lookahead"));
  pool.def(
      "truncate",
      [](Pool& self, Slot slot, const py::bytes& sequence_ids, const py::bytes& num_tokens) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        return as_tuple(self.truncate(checked(self, slot), ids,
                                      read<int64_t>(num_tokens, "num_tokens", ids.size)));
      },
      py::arg("slot"), py::arg("sequence_ids"), py::arg("num_tokens"));
  pool.def(
      "fork",
      [](Pool& self, Slot slot, const py::bytes& parent_ids, const py::bytes& sequence_ids) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        const auto parents = read<int64_t>(parent_ids, "parent_sequence_ids", ids.size);
        return as_tuple(self.fork(checked(self, slot), parents, ids));
      },
      py::arg("slot"), py::arg("parent_ids"), py::arg("sequence_ids"));
  pool.def(
      "free",
      [](Pool& self, Slot slot, const py::bytes& sequence_ids) {
        return as_tuple(
            self.free(checked(self, slot), read<int64_t>(sequence_ids, "sequence_ids")));
      },
      py::arg("slot"), py::arg("sequence_ids"));
  pool.def(
      "swap",
      [](Pool& self, Slot slot, const py::bytes& sequence_ids, int destination,
         int64_t headroom) -> py::object {
        if (headroom < 0) throw py::value_error("headroom must not be negative");
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        const auto result = self.swap(checked(self, slot), ids, tier_of(destination), headroom);
        if (const auto* failure = std::get_if<Failure>(&result)) return as_tuple(*failure);
        return py::int_(std::get<int64_t>(result));
      },
      py::arg("slot"), py::arg("sequence_ids"), py::arg("destination_tier"),
      py::arg("headroom") = 0);
  pool.def(
      "cut",
      [](Pool& self, Slot slot, int64_t sequence_id) {
        sequence_of(self, slot, sequence_id);
        return self.cut(slot, sequence_id);
      },
      py::arg("slot"), py::arg("sequence_id"));
  pool.def(
      "reserve",
      [](Pool& self, Slot slot, int64_t sequence_id, int64_t num_blocks) {
        sequence_of(self, slot, sequence_id);
        if (num_blocks < 0) throw py::value_error("num_blocks must not be negative");
        return self.reserve(slot, sequence_id, num_blocks);
      },
      py::arg("slot"), py::arg("sequence_id"), py::arg("num_blocks"));
  pool.def(
      "finish",
      [](Pool& self, Slot slot, const py::bytes& prefix) -> py::object {
        const std::string plan = self.finish(checked(self, slot), std::string_view(prefix));
        if (plan.empty()) return py::none();
        return py::bytes(plan);
      },
      py::arg("slot"), py::arg("prefix"));
  pool.def(
      "deferred_tokens",
      [](Pool& self, Slot slot, const py::bytes& sequence_ids, const py::bytes& admitted_by,
         const py::bytes& first_positions, const py::bytes& num_tokens,
         const py::bytes& token_ids) -> py::object {
        DeferredColumns columns;
        columns.sequence_ids = read<int64_t>(sequence_ids, "sequence_ids");
        const int64_t num = columns.sequence_ids.size;
        columns.admitted_by = read<int64_t>(admitted_by, "admitted_by", num);
        columns.first_positions = read<int64_t>(first_positions, "first_positions", num);
        columns.num_tokens = read<int32_t>(num_tokens, "num_tokens", num);
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        check_tokens(columns.num_tokens, columns.token_ids, 1);
        for (int64_t i = 0; i < columns.token_ids.size; ++i)
          if (columns.token_ids[i] < 0) throw ColumnError("token_ids", i, "must not be negative");
        const auto failures = self.deferred_tokens(checked(self, slot), columns);
        if (failures.empty()) return py::none();
        return as_tuple(failures[0]);
      },
      py::arg("slot"), py::arg("sequence_ids"), py::arg("admitted_by"), py::arg("first_positions"),
      py::arg("num_tokens"), py::arg("token_ids"));
}

void bind_sessions(PoolClass& pool) {
  pool.def(
      "open_session",
      [](Pool& self, const py::bytes& root, uint32_t owner) {
        return self.open_session(std::string_view(root), owner);
      },
      py::arg("root"), py::arg("owner"));
  pool.def(
      "end_session", [](Pool& self, Slot slot) { self.end_session(checked(self, slot)); },
      py::arg("slot"));
  pool.def(
      "session_fenced",
      [](Pool& self, Slot slot) {
        if (!self.is_unfenced(slot)) throw py::index_error("no ended session is in this slot");
        self.session_fenced(slot);
      },
      py::arg("slot"));
  pool.def(
      "begin",
      [](Pool& self, Slot slot, int64_t number, bool dry_run) {
        self.begin(checked(self, slot), number, dry_run);
      },
      py::arg("slot"), py::arg("number"), py::arg("dry_run") = false);
  pool.def("end_dry_run", &Pool::end_dry_run);
  pool.def(
      "receipted",
      [](Pool& self, Slot slot, int64_t plan) { self.receipted(checked(self, slot), plan); },
      py::arg("slot"), py::arg("plan"));
  pool.def(
      "abort",
      [](Pool& self, Slot slot, int64_t next_plan) { self.abort(checked(self, slot), next_plan); },
      py::arg("slot"), py::arg("next_plan"));
  pool.def(
      "resync_due",
      [](const Pool& self, Slot slot) { return self.session(checked(self, slot)).resync_due; },
      py::arg("slot"));
  pool.def(
      "plans_in_flight",
      [](const Pool& self, Slot slot) { return self.session(checked(self, slot)).plans.size(); },
      py::arg("slot"));
  pool.def(
      "last_plan",
      [](const Pool& self, Slot slot) { return self.session(checked(self, slot)).last_plan; },
      py::arg("slot"));
  pool.def(
      "num_sequences",
      [](const Pool& self, Slot slot) {
        return self.session(checked(self, slot)).sequences.size();
      },
      py::arg("slot"));
  pool.def(
      "num_blocks_held",
      [](const Pool& self, Slot slot) { return self.session(checked(self, slot)).num_held; },
      py::arg("slot"));
  pool.def(
      "has_sequence",
      [](const Pool& self, Slot slot, int64_t id) {
        return self.find(checked(self, slot), id) != nullptr;
      },
      py::arg("slot"), py::arg("sequence_id"));
  pool.def(
      "num_held",
      [](const Pool& self, Slot slot, int64_t id) {
        return self.held_by(sequence_of(self, slot, id));
      },
      py::arg("slot"), py::arg("sequence_id"));
}

void bind_queries(PoolClass& pool) {
  pool.def("states", &states, py::arg("slot"), py::arg("sequence_ids"));
  pool.def("table", &table, py::arg("slot"), py::arg("sequence_id"));
  pool.def(
      "common_prefix",
      [](const Pool& self, Slot slot, const py::bytes& sequence_ids) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        if (!ids.size) throw ColumnError("sequence_ids", -1, "must name at least one sequence");
        for (int64_t i = 0; i < ids.size; ++i) sequence_of(self, slot, ids[i]);
        return self.common_prefix(slot, ids);
      },
      py::arg("slot"), py::arg("sequence_ids"));
  pool.def(
      "match",
      [](const Pool& self, const py::bytes& root, const py::bytes& token_ids) {
        return match(self,
                     self.match(std::string_view(root), read<int32_t>(token_ids, "token_ids")));
      },
      py::arg("root"), py::arg("token_ids"));
  pool.def(
      "match_hashes",
      [](const Pool& self, const py::bytes& root, const py::bytes& hashes) {
        return match(self,
                     self.match_hashes(std::string_view(root), read<uint8_t>(hashes, "hashes")));
      },
      py::arg("root"), py::arg("hashes"));
  pool.def("explain", &explain, py::arg("root"), py::arg("token_ids"));
  pool.def(
      "usage",
      [](const Pool& self, int tier) {
        const BlockStore& blocks = self.store(tier_of(tier));
        return py::make_tuple(blocks.num_blocks, blocks.num_in(State::kFree),
                              blocks.num_in(State::kCached),
                              blocks.num_in(State::kHeld) + blocks.num_in(State::kPinned),
                              blocks.num_in(State::kRetired));
      },
      py::arg("tier"));
  pool.def(
      "num_obtainable",
      [](const Pool& self, Slot slot, int tier) {
        return self.store(tier_of(tier)).num_obtainable(checked(self, slot));
      },
      py::arg("slot"), py::arg("tier"));
  pool.def(
      "num_pending",
      [](const Pool& self, Slot slot, int tier) {
        return self.store(tier_of(tier)).num_coming(checked(self, slot));
      },
      py::arg("slot"), py::arg("tier"));
  pool.def("counters", [](const Pool& self) {
    const Counters& c = self.counters();
    return py::make_tuple(
        c.num_lookup_tokens, c.num_hit_tokens, c.num_copies_on_write, c.num_swapped_out,
        c.num_swapped_in, self.store(kDevice).num_evictions() + self.store(kHost).num_evictions(),
        c.num_publications, c.max_held, c.num_host_hit_tokens, c.num_demoted, c.num_forgotten);
  });
  pool.def_property_readonly("revision", &Pool::revision);
  pool.def(
      "generations",
      [](const Pool& self, int tier) { return pack(self.store(tier_of(tier)).generations()); },
      py::arg("tier"));
  pool.def("take_publications", &take_publications, py::arg("max_blocks"));
  pool.def(
      "all_publications",
      [](const Pool& self, size_t max_blocks) {
        return publications(self, self.findable(), max_blocks);
      },
      py::arg("max_blocks"));
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
           py::arg("seed") = 0);
  pool.def(
      "set_time",
      [](Pool& self, double now_s) {
        if (!(now_s >= 0 && now_s < 1e12)) throw py::value_error("now_s must be from 0 to 1e12");
        self.set_time(now_s);
      },
      py::arg("now_s"));
  bind_sessions(pool);
  bind_steps(pool);
  bind_queries(pool);
}

}  // namespace kvplane::blocks
