// A pool's sessions and prefixes, in all layer groups.
#include "core/pool.h"

#include <algorithm>
#include <string>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {

py::tuple states_of(const LayerGroup& group, SessionHandle handle, const py::object& sequence_ids) {
  std::vector<const Sequence*> found;
  if (sequence_ids.is_none()) {
    found = group.sequences.of(group.sessions[checked(group, handle)]);
  } else {
    const py::bytes column = sequence_ids;
    const auto ids = read<int64_t>(column, "sequence_ids");
    for (int64_t i = 0; i < ids.size; ++i) found.push_back(&sequence_of(group, handle, ids[i]));
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

py::tuple matched(const LayerGroup& group, const std::vector<EntryId>& found) {
  int64_t num_device = 0, num_host = 0;
  std::string hashes;
  for (const EntryId e : found) {
    const Entry& entry = group.index[e];
    // An entry without blocks lies behind the attention window.
    const bool on_device = entry.block(kDevice) != kNoBlock || entry.block(kHost) == kNoBlock;
    if (on_device && !num_host)
      ++num_device;
    else
      ++num_host;
    const Hash& hash = group.index.hash(e);
    hashes.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  }
  return py::make_tuple(num_device, num_host, py::bytes(hashes));
}

namespace {

std::unique_ptr<Pool> make_pool(const py::list& list) {
  std::vector<LayerGroup*> groups;
  for (const py::handle group : list) groups.push_back(group.cast<LayerGroup*>());
  if (groups.empty() || groups.size() > 255) throw py::value_error("there must be 1 to 255 groups");
  for (const LayerGroup* group : groups)
    if (group->config.block_size_tokens != groups[0]->config.block_size_tokens)
      throw py::value_error("all groups must have one block size");
  return std::make_unique<Pool>(std::move(groups));
}

std::pair<int64_t, int64_t> as_pair(const Forgotten& forgotten) {
  return {forgotten.num_blocks, forgotten.num_in_use};
}

void bind_prefixes(PoolClass& pool) {
  pool.def(
      "retain",
      [](Pool& self, const py::bytes& root, uint32_t owner, const py::bytes& token_ids,
         int priority, double expires_at_s, int64_t most_blocks) -> py::tuple {
        if (priority < 1 || priority > 100) throw py::value_error("priority must be from 1 to 100");
        const auto tokens = read<int32_t>(token_ids, "token_ids");
        const auto result = self.retain(std::string_view(root), owner, tokens,
                                        static_cast<uint8_t>(priority), expires_at_s, most_blocks);
        if (const auto* failure = std::get_if<Failure>(&result)) return as_tuple(*failure);
        const auto& retained = std::get<Retained>(result);
        return py::make_tuple(retained.num_blocks, retained.num_new);
      },
      py::arg("root"), py::arg("owner"), py::arg("token_ids"), py::arg("priority"),
      py::arg("expires_at_s"), py::arg("most_blocks"));
  pool.def(
      "release_retained",
      [](Pool& self, const py::bytes& root, uint32_t owner, const py::bytes& token_ids) {
        return self.release_retained(std::string_view(root), owner,
                                     read<int32_t>(token_ids, "token_ids"));
      },
      py::arg("root"), py::arg("owner"), py::arg("token_ids"));
  pool.def(
      "forget",
      [](Pool& self, const py::bytes& root, const py::bytes& token_ids, bool force,
         int64_t most_counted) {
        const auto tokens = read<int32_t>(token_ids, "token_ids");
        return as_pair(self.forget(std::string_view(root), tokens, force, most_counted));
      },
      py::arg("root"), py::arg("token_ids"), py::arg("force"), py::arg("most_counted"));
  pool.def(
      "forget_roots",
      [](Pool& self, const py::list& roots, bool force) {
        std::vector<std::string_view> names;
        for (const auto& root : roots) names.push_back(py::cast<std::string_view>(root));
        return as_pair(self.forget_roots(names, force));
      },
      py::arg("roots"), py::arg("force"));
}

void bind_families(PoolClass& pool) {
  pool.def(
      "take_family_events",
      [](Pool& self, SessionHandle handle) -> py::object {
        const std::vector<FamilyEvent> events =
            self.first().families.take_events(self.first().sessions[checked(self, handle)]);
        if (events.empty()) return py::tuple();
        py::list list;
        for (const auto& [change, family] : events)
          list.append(py::make_tuple(static_cast<int>(change), family));
        return list;
      },
      py::arg("handle"));
  pool.def(
      "family_of",
      [](const Pool& self, SessionHandle handle, int64_t id) {
        return sequence_of(self.first(), handle, id).family;
      },
      py::arg("handle"), py::arg("sequence_id"));
  pool.def(
      "family_on_device",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        return pack(
            self.first().families.on_device(self.first().sessions[checked(self, handle)], family));
      },
      py::arg("handle"), py::arg("family"));
  pool.def(
      "family_held",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        int64_t num = 0;
        for (const int64_t id :
             self.first().families.on_device(self.first().sessions[checked(self, handle)], family))
          num += self.num_held(handle, sequence_of(self.first(), handle, id));
        return num;
      },
      py::arg("handle"), py::arg("family"));
  pool.def(
      "num_device_blocks_held",
      [](const Pool& self, SessionHandle handle) {
        int64_t num = 0;
        bool some_on_host = false;
        for (const Sequence* sequence :
             self.first().sequences.of(self.first().sessions[checked(self, handle)])) {
          some_on_host = some_on_host || !sequence->claims_device;
          if (sequence->claims_device) num += self.num_held(handle, *sequence);
        }
        return some_on_host ? num : self.num_blocks_held(handle);
      },
      py::arg("handle"));
  pool.def(
      "family_progress",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        std::pair<double, bool> latest{0, false};
        for (const int64_t id : self.first().families.on_device(
                 self.first().sessions[checked(self, handle)], family)) {
          const Sequence& sequence = sequence_of(self.first(), handle, id);
          latest.first = std::max(latest.first, sequence.progress_s);
          latest.second = latest.second || !sequence.pending.empty();
        }
        return latest;
      },
      py::arg("handle"), py::arg("family"));
}

void bind_sessions(PoolClass& pool) {
  pool.def(
      "open_session",
      [](Pool& self, const py::bytes& root, uint32_t owner) {
        return self.open_session(std::string_view(root), owner);
      },
      py::arg("root"), py::arg("owner"));
  pool.def(
      "end_session",
      [](Pool& self, SessionHandle handle, int64_t max_blocks) {
        return self.end_session(checked(self, handle), max_blocks);
      },
      py::arg("handle"), py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "end_some",
      [](Pool& self, SessionHandle handle, int64_t max_blocks) {
        if (!self.first().sessions.is_unfenced(handle))
          throw py::index_error("no ended session has this handle");
        return self.end_some(handle, max_blocks);
      },
      py::arg("handle"), py::arg("max_blocks"));
  pool.def(
      "session_fenced",
      [](Pool& self, SessionHandle handle) {
        if (!self.first().sessions.is_unfenced(handle) || self.is_ending(handle))
          throw py::index_error("no session that has ended has this handle");
        self.session_fenced(handle);
      },
      py::arg("handle"));
  pool.def(
      "begin",
      [](Pool& self, SessionHandle handle, int64_t number) {
        self.begin(checked(self, handle), number);
      },
      py::arg("handle"), py::arg("number"));
  pool.def(
      "receipted",
      [](Pool& self, SessionHandle handle, int64_t plan, int64_t max_blocks) {
        return self.receipted(checked(self, handle), plan, max_blocks);
      },
      py::arg("handle"), py::arg("plan"),
      py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "abort",
      [](Pool& self, SessionHandle handle, int64_t next_plan, bool keeps_tables,
         int64_t max_blocks) {
        return self.abort(checked(self, handle), next_plan, keeps_tables, max_blocks);
      },
      py::arg("handle"), py::arg("next_plan"), py::arg("keeps_tables") = true,
      py::arg("max_blocks") = std::numeric_limits<int64_t>::max());
  pool.def(
      "resync_due",
      [](const Pool& self, SessionHandle handle) {
        return self.first().sessions[checked(self, handle)].resync_due;
      },
      py::arg("handle"));
  pool.def(
      "plans_in_flight",
      [](const Pool& self, SessionHandle handle) {
        const Session& session = self.first().sessions[checked(self, handle)];
        return session.aborting.begun ? 0 : session.plans.size();
      },
      py::arg("handle"));
  pool.def(
      "last_plan",
      [](const Pool& self, SessionHandle handle) {
        return self.first().sessions[checked(self, handle)].last_plan;
      },
      py::arg("handle"));
  pool.def(
      "num_sequences",
      [](const Pool& self, SessionHandle handle) {
        return self.first().sessions[checked(self, handle)].sequences.size();
      },
      py::arg("handle"));
  pool.def(
      "has_sequence",
      [](const Pool& self, SessionHandle handle, int64_t id) {
        return self.first().sequences.find(self.first().sessions[checked(self, handle)], id) !=
               nullptr;
      },
      py::arg("handle"), py::arg("sequence_id"));
  pool.def(
      "num_blocks_held",
      [](const Pool& self, SessionHandle handle) {
        return self.num_blocks_held(checked(self, handle));
      },
      py::arg("handle"));
  pool.def(
      "sequence_ids",
      [](const Pool& self, SessionHandle handle) {
        std::vector<int64_t> ids;
        for (const Sequence* sequence :
             self.first().sequences.of(self.first().sessions[checked(self, handle)]))
          ids.push_back(sequence->id);
        return pack(ids);
      },
      py::arg("handle"));
  pool.def(
      "states",
      [](const Pool& self, SessionHandle handle, const py::object& sequence_ids) {
        return states_of(self.first(), handle, sequence_ids);
      },
      py::arg("handle"), py::arg("sequence_ids"));
  pool.def(
      "match",
      [](const Pool& self, const py::bytes& root, const py::bytes& token_ids) {
        return matched(self.first(),
                       self.match(std::string_view(root), read<int32_t>(token_ids, "token_ids")));
      },
      py::arg("root"), py::arg("token_ids"));
  pool.def(
      "num_obtainable",
      [](const Pool& self, SessionHandle handle, int tier) {
        return self.num_obtainable(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "num_pending",
      [](const Pool& self, SessionHandle handle, int tier) {
        return self.num_coming(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "num_own_retired",
      [](const Pool& self, SessionHandle handle, int tier) {
        return self.num_own_retired(checked(self, handle), tier_of(tier));
      },
      py::arg("handle"), py::arg("tier"));
  pool.def(
      "usage",
      [](const Pool& self, int tier_number) {
        const Tier tier = tier_of(tier_number);
        const auto num_in = [&](State state) { return self.num_in(tier, state); };
        return py::make_tuple(self.num_blocks(tier), num_in(State::kFree), num_in(State::kCached),
                              num_in(State::kHeld) + num_in(State::kPinned),
                              num_in(State::kRetired));
      },
      py::arg("tier"));
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
  bind_layer_group(module);
  PoolClass pool(module, "Pool");
  pool.def(py::init(&make_pool), py::arg("groups"), py::keep_alive<1, 2>());
  bind_sessions(pool);
  bind_families(pool);
  bind_steps(pool);
  bind_prefixes(pool);
  bind_answers(pool);
}

}  // namespace kvplane::blocks
