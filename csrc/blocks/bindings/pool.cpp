// A pool's sessions and prefixes, in all layer groups.
#include "pool/pool.h"

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

namespace {

std::unique_ptr<Pool> make_pool(const py::list& list) {
  std::vector<LayerGroup*> groups;
  for (const py::handle group : list) groups.push_back(group.cast<LayerGroup*>());
  if (groups.empty() || groups.size() > 255) throw py::value_error("there must be 1 to 255 groups");
  for (const LayerGroup* group : groups)
    if (group->config.block_size_tokens != groups[0]->config.block_size_tokens)
      throw py::value_error("all groups must have one block size");
  for (size_t g = 0; g + 1 < groups.size(); ++g)
    if (groups[g]->config.holds_states) throw py::value_error("a group of states must be the last");
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
      "root"_a, "owner"_a, "token_ids"_a, "priority"_a, "expires_at_s"_a, "most_blocks"_a);
  pool.def(
      "release_retained",
      [](Pool& self, const py::bytes& root, uint32_t owner, const py::bytes& token_ids) {
        return self.release_retained(std::string_view(root), owner,
                                     read<int32_t>(token_ids, "token_ids"));
      },
      "root"_a, "owner"_a, "token_ids"_a);
  pool.def(
      "forget",
      [](Pool& self, const py::bytes& root, const py::bytes& token_ids, bool force,
         int64_t most_counted) {
        const auto tokens = read<int32_t>(token_ids, "token_ids");
        return as_pair(self.forget(std::string_view(root), tokens, force, most_counted));
      },
      "root"_a, "token_ids"_a, "force"_a, "most_counted"_a);
  pool.def(
      "forget_roots",
      [](Pool& self, const py::list& roots, bool force) {
        std::vector<std::string_view> names;
        for (const auto& root : roots) names.push_back(py::cast<std::string_view>(root));
        return as_pair(self.forget_roots(names, force));
      },
      "roots"_a, "force"_a);
}

std::vector<int64_t> family_on_device(const Pool& pool, SessionHandle handle, int64_t family) {
  return pool.first().families.on_device(session_of(pool, handle), family);
}

void bind_families(PoolClass& pool) {
  pool.def(
      "take_family_events",
      [](Pool& self, SessionHandle handle) -> py::object {
        const std::vector<FamilyEvent> events =
            self.first().families.take_events(session_of(self, handle));
        if (events.empty()) return py::tuple();
        py::list list;
        for (const auto& [change, family] : events)
          list.append(py::make_tuple(static_cast<int>(change), family));
        return list;
      },
      "handle"_a);
  pool.def(
      "family_of",
      [](const Pool& self, SessionHandle handle, int64_t id) {
        return sequence_of(self.first(), handle, id).family;
      },
      "handle"_a, "sequence_id"_a);
  pool.def(
      "family_on_device",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        return pack(family_on_device(self, handle, family));
      },
      "handle"_a, "family"_a);
  pool.def(
      "family_held",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        return self.num_held(handle, family_on_device(self, handle, family));
      },
      "handle"_a, "family"_a);
  pool.def(
      "num_device_blocks_held",
      [](const Pool& self, SessionHandle handle) {
        int64_t num = 0;
        bool some_on_host = false;
        for (const Sequence* sequence : self.first().sequences.of(session_of(self, handle))) {
          some_on_host = some_on_host || !sequence->claims_device;
          if (sequence->claims_device) num += self.num_held(handle, *sequence);
        }
        return some_on_host ? num : self.num_blocks_held(handle);
      },
      "handle"_a);
  pool.def(
      "family_progress",
      [](const Pool& self, SessionHandle handle, int64_t family) {
        std::pair<double, bool> latest{0, false};
        for (const int64_t id : family_on_device(self, handle, family)) {
          const Sequence& sequence = sequence_of(self.first(), handle, id);
          latest.first = std::max(latest.first, sequence.progress_s);
          latest.second = latest.second || !sequence.pending.empty();
        }
        return latest;
      },
      "handle"_a, "family"_a);
}

void bind_sessions(PoolClass& pool) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  pool.def(
      "open_session",
      [](Pool& self, const py::bytes& root, uint32_t owner) {
        return self.open_session(std::string_view(root), owner);
      },
      "root"_a, "owner"_a);
  pool.def("end_session", of_session(&Pool::end_session), "handle"_a, "max_blocks"_a = kAll);
  pool.def(
      "end_some",
      [](Pool& self, SessionHandle handle, int64_t max_blocks) {
        if (!self.first().sessions.is_unfenced(handle))
          throw py::index_error("no ended session has this handle");
        return self.end_some(handle, max_blocks);
      },
      "handle"_a, "max_blocks"_a);
  pool.def(
      "session_fenced",
      [](Pool& self, SessionHandle handle) {
        if (!self.first().sessions.is_unfenced(handle) || self.is_ending(handle))
          throw py::index_error("no session that has ended has this handle");
        self.session_fenced(handle);
      },
      "handle"_a);
  pool.def("begin", of_session(&Pool::begin), "handle"_a, "number"_a);
  pool.def("receipted", of_session(&Pool::receipted), "handle"_a, "plan"_a, "max_blocks"_a = kAll);
  pool.def("abort", of_session(&Pool::abort), "handle"_a, "next_plan"_a, "keeps_tables"_a = true,
           "max_blocks"_a = kAll);
  pool.def(
      "resync_due",
      [](const Pool& self, SessionHandle handle) { return session_of(self, handle).resync_due; },
      "handle"_a);
  pool.def(
      "plans_in_flight",
      [](const Pool& self, SessionHandle handle) {
        const Session& session = session_of(self, handle);
        return session.aborting.begun ? 0 : session.plans.size();
      },
      "handle"_a);
  pool.def(
      "last_plan",
      [](const Pool& self, SessionHandle handle) { return session_of(self, handle).last_plan; },
      "handle"_a);
  pool.def(
      "num_sequences",
      [](const Pool& self, SessionHandle handle) {
        return session_of(self, handle).sequences.size();
      },
      "handle"_a);
  pool.def(
      "has_sequence",
      [](const Pool& self, SessionHandle handle, int64_t id) {
        return session_of(self, handle).sequences.contains(id);
      },
      "handle"_a, "sequence_id"_a);
  pool.def("num_blocks_held", of_session(&Pool::num_blocks_held), "handle"_a);
  pool.def(
      "sequence_ids",
      [](const Pool& self, SessionHandle handle) {
        std::vector<int64_t> ids;
        for (const Sequence* sequence : self.first().sequences.of(session_of(self, handle)))
          ids.push_back(sequence->id);
        return pack(ids);
      },
      "handle"_a);
  pool.def(
      "states",
      [](const Pool& self, SessionHandle handle, const py::object& sequence_ids) {
        return states_of(self.first(), handle, sequence_ids);
      },
      "handle"_a, "sequence_ids"_a);
  pool.def(
      "checkpoints",
      [](const Pool& self, SessionHandle handle, const py::bytes& sequence_ids) {
        const LayerGroup& group = *self.groups()[self.groups().size - 1];
        std::vector<int32_t> positions;
        if (!self.holds_states()) return pack(positions);
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        for (int64_t i = 0; i < ids.size; ++i) {
          const Sequence& sequence = sequence_of(group, handle, ids[i]);
          const int64_t num_blocks = group.tables.num_to(sequence, sequence.num_written);
          positions.push_back(static_cast<int32_t>(num_blocks * group.config.block_size_tokens));
        }
        return pack(positions);
      },
      "handle"_a, "sequence_ids"_a);
  pool.def(
      "planned_checkpoints",
      [](const Pool& self, SessionHandle handle, const py::bytes& sequence_ids,
         const py::bytes& positions) {
        const LayerGroup& group = *self.groups()[self.groups().size - 1];
        const Session& session = group.sessions[checked(self, handle)];
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        const auto wanted = read<int32_t>(positions, "positions", ids.size);
        std::vector<int32_t> kept;
        for (int64_t i = 0; i < ids.size; ++i) {
          const Sequence* sequence = group.sequences.find(session, ids[i]);
          const int64_t end = sequence ? sequence->table.size * group.index.block_size() : 0;
          kept.push_back(end == wanted[i] ? wanted[i] : 0);
        }
        return pack(kept);
      },
      "handle"_a, "sequence_ids"_a, "positions"_a);
  pool.def("num_obtainable", of_session(&Pool::num_obtainable), "handle"_a, "tier"_a);
  pool.def("num_pending", of_session(&Pool::num_coming), "handle"_a, "tier"_a);
  pool.def("num_own_retired", of_session(&Pool::num_own_retired), "handle"_a, "tier"_a);
  pool.def(
      "usage",
      [](const Pool& self, Tier tier) {
        const auto num_in = [&](State state) { return self.num_in(tier, state); };
        return py::make_tuple(self.num_blocks(tier), num_in(State::kFree), num_in(State::kCached),
                              num_in(State::kHeld) + num_in(State::kPinned),
                              num_in(State::kRetired));
      },
      "tier"_a);
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
  GroupClass group(module, "LayerGroup");
  bind_layer_group(group);
  PoolClass pool(module, "Pool");
  pool.def(py::init(&make_pool), "groups"_a, py::keep_alive<1, 2>());
  bind_sessions(pool);
  bind_families(pool);
  bind_steps(pool);
  bind_prefixes(pool);
  bind_answers(pool);
  bind_searches(module, pool);
}

}  // namespace kvplane::blocks
